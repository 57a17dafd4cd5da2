package httpapi

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pass"
	"github.com/coppice-dev/coppice/runner/writelog"
)

func openLog(t *testing.T) *writelog.Log {
	t.Helper()
	l, err := writelog.Open(filepath.Join(t.TempDir(), "writes.log"), core.NewID[core.RunnerID](), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// TestWritesAreBounded: what no controller has recorded yet is bounded in count and bytes, for each key and for all. Beyond that a write is
// refused, a read is not. What fills up is reported soon.
func TestWritesAreBounded(t *testing.T) {
	t.Parallel()
	d := NewData(nil, nil, openLog(t), nil)
	woken := 0
	d.wake = func() { woken++ }
	key := func(i int) core.KeyID { return core.KeyID(fmt.Sprint("key_", i)) }
	note := func(method string, by core.KeyID) error {
		q := httptest.NewRequestWithContext(t.Context(), method, "/files?path=/"+strings.Repeat("x", 5000), nil)
		return d.note(httptest.NewRecorder(), q, pass.Claims{Key: by})
	}
	for i := range runnerapi.MaxDataWrites {
		if err := note(http.MethodPut, key(i/writelog.KeyWrites)); err != nil {
			t.Fatal(err)
		}
		if i%writelog.KeyWrites == writelog.KeyWrites-1 && i+1 < runnerapi.MaxDataWrites {
			if err := note(http.MethodPut, key(i/writelog.KeyWrites)); core.CodeOf(err) != core.CodeRateLimited {
				t.Errorf("a write beyond the share of a key: %v", err)
			}
		}
		if i == writelog.KeyWrites/4-1 && woken != 0 || i == writelog.KeyWrites/4 && woken != 1 {
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
	_, list := d.Writes()
	if len(list) != runnerapi.MaxDataWrites || len(list[0].Path) != runnerapi.MaxDataPath {
		t.Errorf("%d writes, a path of %d bytes", len(list), len(list[0].Path))
	}
	recorded := func(number int64, left int) {
		t.Helper()
		if err := d.Recorded(number); err != nil {
			t.Error(err)
		}
		if _, list := d.Writes(); len(list) != left {
			t.Errorf("%d writes wait, not %d", len(list), left)
		}
	}
	recorded(list[len(list)-2].Number, 1)
	if err := note(http.MethodPut, key(0)); err != nil {
		t.Error(err)
	}
	recorded(0, 2)
	recorded(list[len(list)-1].Number+1, 0)
}

// TestRefusedWritesAreNotNoted: a request that does not get as far as the guest leaves no record, and one beyond its share is told when to come back.
func TestRefusedWritesAreNotNoted(t *testing.T) {
	t.Parallel()
	d := NewData(nil, nil, openLog(t), slog.New(slog.DiscardHandler))
	for _, query := range []string{"?path=/x&never=1", "", "?path="} {
		w := httptest.NewRecorder()
		d.pass(w, httptest.NewRequestWithContext(t.Context(), http.MethodPut, "/files"+query, nil), pass.Claims{}, "/v1/files", "path")
		if _, list := d.Writes(); w.Code != http.StatusBadRequest || len(list) != 0 {
			t.Errorf("%q: %d, and %d writes are noted", query, w.Code, len(list))
		}
	}
	w := httptest.NewRecorder()
	d.fail(w, httptest.NewRequestWithContext(t.Context(), http.MethodPut, "/files", nil), core.Errorf(core.Exhausted, core.CodeRateLimited, "later"))
	if w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") == "" {
		t.Errorf("%d, %v", w.Code, w.Header())
	}
}
