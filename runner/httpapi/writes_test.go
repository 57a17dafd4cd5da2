package httpapi

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pass"
)

// TestWritesAreBounded: what no controller has recorded yet is bounded in count and bytes. Beyond that a write is refused, a read is not.
func TestWritesAreBounded(t *testing.T) {
	t.Parallel()
	d := NewData(nil, nil, nil)
	note := func(method string) error {
		q := httptest.NewRequestWithContext(t.Context(), method, "/files?path=/"+strings.Repeat("x", 5000), nil)
		return d.note(httptest.NewRecorder(), q, pass.Claims{})
	}
	for range runnerapi.MaxDataWrites {
		if err := note(http.MethodPut); err != nil {
			t.Fatal(err)
		}
	}
	for _, method := range []string{http.MethodPut, http.MethodDelete} {
		if err := note(method); core.CategoryOf(err) != core.Unavailable {
			t.Errorf("%s beyond the bound: %v", method, err)
		}
	}
	if err := note(http.MethodGet); err != nil {
		t.Error(err)
	}
	list := d.Writes()
	if len(list) != runnerapi.MaxDataWrites || len(list[0].Path) != runnerapi.MaxDataPath {
		t.Errorf("%d writes, a path of %d bytes", len(list), len(list[0].Path))
	}
	d.Recorded(len(list) - 1)
	if err := note(http.MethodPut); err != nil || len(d.Writes()) != 2 {
		t.Errorf("%d writes, %v", len(d.Writes()), err)
	}
	d.Recorded(3)
	if n := len(d.Writes()); n != 0 {
		t.Errorf("%d writes", n)
	}
}
