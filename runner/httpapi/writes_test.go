package httpapi

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pass"
)

// TestWritesAreBounded: what no controller has recorded yet is bounded in count and bytes, for each key and for all. Beyond that a write is
// refused, a read is not. What fills up is reported soon.
func TestWritesAreBounded(t *testing.T) {
	t.Parallel()
	d := NewData(nil, nil, nil)
	woken := 0
	d.wake = func() { woken++ }
	key := func(i int) core.KeyID { return core.KeyID(fmt.Sprint("key_", i)) }
	note := func(method string, by core.KeyID) error {
		q := httptest.NewRequestWithContext(t.Context(), method, "/files?path=/"+strings.Repeat("x", 5000), nil)
		return d.note(httptest.NewRecorder(), q, pass.Claims{Key: by})
	}
	for i := range runnerapi.MaxDataWrites {
		if err := note(http.MethodPut, key(i/keyWrites)); err != nil {
			t.Fatal(err)
		}
		if i%keyWrites == keyWrites-1 && i+1 < runnerapi.MaxDataWrites {
			if err := note(http.MethodPut, key(i/keyWrites)); core.CodeOf(err) != core.CodeRateLimited {
				t.Errorf("a write beyond the share of a key: %v", err)
			}
		}
		if i == keyWrites/4-1 && woken != 0 || i == keyWrites/4 && woken != 1 {
			t.Errorf("after %d writes a report was asked for %d times", i+1, woken)
		}
	}
	for _, method := range []string{http.MethodPut, http.MethodDelete} {
		if err := note(method, "key_other"); core.CategoryOf(err) != core.Unavailable {
			t.Errorf("%s beyond the bound: %v", method, err)
		}
	}
	if err := note(http.MethodGet, key(0)); err != nil {
		t.Error(err)
	}
	list := d.Writes()
	if len(list) != runnerapi.MaxDataWrites || len(list[0].Path) != runnerapi.MaxDataPath {
		t.Errorf("%d writes, a path of %d bytes", len(list), len(list[0].Path))
	}
	d.Recorded(len(list) - 1)
	if err := note(http.MethodPut, key(0)); err != nil || len(d.Writes()) != 2 {
		t.Errorf("%d writes, %v", len(d.Writes()), err)
	}
	d.Recorded(3)
	if n := len(d.Writes()); n != 0 {
		t.Errorf("%d writes", n)
	}
}

// TestRefusedWritesAreNotNoted: a request that does not get as far as the guest leaves no record, and one beyond its share is told when to come back.
func TestRefusedWritesAreNotNoted(t *testing.T) {
	t.Parallel()
	d := NewData(nil, nil, slog.New(slog.DiscardHandler))
	for _, query := range []string{"?path=/x&never=1", "", "?path="} {
		w := httptest.NewRecorder()
		d.pass(w, httptest.NewRequestWithContext(t.Context(), http.MethodPut, "/files"+query, nil), pass.Claims{}, "/v1/files", "path")
		if w.Code != http.StatusBadRequest || len(d.Writes()) != 0 {
			t.Errorf("%q: %d, and %d writes are noted", query, w.Code, len(d.Writes()))
		}
	}
	w := httptest.NewRecorder()
	d.fail(w, httptest.NewRequestWithContext(t.Context(), http.MethodPut, "/files", nil), core.Errorf(core.Exhausted, core.CodeRateLimited, "later"))
	if w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") == "" {
		t.Errorf("%d, %v", w.Code, w.Header())
	}
}
