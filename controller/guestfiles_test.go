package controller_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// TestGuestFilesAreBounded: a guest's description of a file, and its list of watches, are refused when they are too long.
func TestGuestFilesAreBounded(t *testing.T) {
	t.Parallel()
	long := `{"id":"` + string(core.NewID[core.WatchID]()) + `","xattrs":{` + strings.Repeat(`"user.x":"y",`, 3<<10) + `"user.z":""}}`
	many := `{"watches":[` + strings.Repeat(`{},`, 100) + `{}]}`
	w := newWorld(t)
	ws := w.create("files")
	id := ws.ID
	for route, call := range map[string]func() error{
		"POST /files/mkdir": func() error {
			_, err := w.MakeDirectory(t.Context(), w.project, id, controller.MakeDirectory{Path: "/x"})
			return err
		},
		"POST /watches": func() error {
			_, err := w.CreateWatch(t.Context(), w.project, id, controller.CreateWatch{Path: "/x"})
			return err
		},
		"GET /watches": func() error {
			_, err := w.Watches(t.Context(), w.project, id)
			return err
		},
	} {
		answer := long
		if strings.HasPrefix(route, http.MethodGet) {
			answer = many
		}
		w.runner.Corrupt(ws.Sandbox.ID, says(route, text(answer)))
		if err := call(); core.CodeOf(err) != core.CodeGuestProtocol {
			t.Errorf("%s: %v", route, err)
		}
	}
}
