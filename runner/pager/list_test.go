package pager_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/pager"
)

// TestListWithoutEnd: a pager that announces more images, and then sends none or the same ones, causes an error.
func TestListWithoutEnd(t *testing.T) {
	t.Parallel()
	type images []map[string]any
	for name, parts := range map[string][]images{
		"none at first": {{}},
		"none later":    {{{"id": "a"}}, {}},
		"the same":      {{{"id": "a"}, {"id": "b"}}, {{"id": "b"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "list") //nolint:usetesting // the path of a socket must be short
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			path := filepath.Join(dir, "s")
			listen, err := sidecar.Listen(path)
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				conn, err := listen.AcceptUnix()
				if err != nil {
					return
				}
				defer conn.Close()
				for _, part := range parts {
					if _, err := sidecar.Receive(conn, &map[string]any{}); err != nil {
						return
					}
					_ = sidecar.Send(conn, map[string]any{"images": part, "more": true})
				}
				_, _ = sidecar.Receive(conn, &map[string]any{}) // until the client hangs up
			}()
			_, _, err = pager.NewClient(path).List(t.Context())
			if core.CategoryOf(err) != core.Internal || errors.Is(err, pager.ErrGone) {
				t.Errorf("it lists with %v", err)
			}
			if err := listen.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
			<-ended
		})
	}
}
