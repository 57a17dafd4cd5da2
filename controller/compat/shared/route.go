package shared

import (
	"net/http"
	"path"
)

// Route serves a request by its route, or says why there is none. It never redirects: clients would repeat a POST as a GET.
func Route(mux *http.ServeMux, w http.ResponseWriter, r *http.Request) *StatusError {
	if p := r.URL.Path; path.Clean(p) == p {
		if _, pattern := mux.Handler(r); pattern != "" {
			mux.ServeHTTP(w, r)
			return nil
		}
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
			other := &http.Request{Method: method, URL: r.URL, Host: r.Host}
			if _, pattern := mux.Handler(other); pattern != "" {
				return Failf(http.StatusMethodNotAllowed, "%s does not accept the method %s", Clip(p), Clip(r.Method))
			}
		}
	}
	return Failf(http.StatusNotFound, "there is no route %s %s here", Clip(r.Method), Clip(r.URL.Path))
}
