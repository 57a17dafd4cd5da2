package runnertest

import (
	"maps"
	"net/http"
)

// Interim has every guest begin its answers with n interim answers (1xx) that carry these headers.
func (r *Runner) Interim(n int, h http.Header) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.interim, r.interims = h.Clone(), n
}

func (r *Runner) hint(w http.ResponseWriter) {
	r.mu.Lock()
	h, n := r.interim, r.interims
	r.mu.Unlock()
	for range n {
		maps.Copy(w.Header(), h)
		w.WriteHeader(http.StatusEarlyHints)
		clear(w.Header())
	}
}
