//go:build linux

package guestagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/guestagent/userthread"
)

// entriesOf lists a directory.
func entriesOf(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Error(err)
	}
	var out []string
	for _, e := range list {
		out = append(out, e.Name())
	}
	return out
}

// readerFunc is a function that is a reader.
type readerFunc func(b []byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

// TestBrokenPutAsAUserLeavesNothing: the body of a put breaks off because its link has ended, and so has the context of
// the request. The temporary file goes all the same, before the request ends: the next host must not find it.
func TestBrokenPutAsAUserLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := userDir(t)
	a := newTestAgent(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	breaks := readerFunc(func([]byte) (int, error) {
		if n := entriesOf(t, dir); len(n) != 1 || !strings.HasPrefix(n[0], ".f.part-") {
			t.Errorf("in the middle of the body there are %q", n)
		}
		cancel(errors.New("the link has ended"))
		return 0, io.ErrUnexpectedEOF
	})
	query := "?path=" + url.QueryEscape(filepath.Join(dir, "f")) + "&user=" + nobody
	req := httptest.NewRequestWithContext(ctx, http.MethodPut, guestapi.PathFileContent+query, io.MultiReader(strings.NewReader("half"), breaks))
	answered := make(chan int, 1)
	go func() {
		rec := httptest.NewRecorder()
		a.handler.ServeHTTP(rec, req)
		answered <- rec.Code
	}()
	select {
	case status := <-answered:
		if status < http.StatusBadRequest {
			t.Errorf("half a body was taken: status %d", status)
		}
	case <-time.After(guesttest.Watchdog):
		t.Fatal("the request does not end")
	}
	if n := entriesOf(t, dir); len(n) > 0 {
		t.Errorf("it left %q", n)
	}
}

// TestBrokenPutsAsAUserEnd: a connection that ends in the middle of a body ends each kind of put, and its thread. (The
// test writes to the connection itself: a client whose body is a pipe waits for the pipe even after its request has been
// given up.)
func TestBrokenPutsAsAUserEnd(t *testing.T) {
	t.Parallel()
	for name, query := range map[string]string{"beside": "", "in place": "&in_place=1", "tar": "&untar=1"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := userDir(t)
			a := newTestAgent(t)
			threads := userthread.New(a.work.Join)
			begun := make(chan struct{}, 1)
			var running atomic.Int64
			a.files.As = func(ctx context.Context, cred *syscall.Credential, fn func() error) error {
				running.Add(1)
				defer running.Add(-1)
				return threads.As(ctx, cred, fn)
			}
			put := a.files.Put
			mux := http.NewServeMux()
			ended := make(chan error, 1)
			mux.HandleFunc("PUT "+guestapi.PathFiles, func(w http.ResponseWriter, r *http.Request) {
				r.Body = telling{r.Body, begun}
				ended <- put(w, r)
			})
			conn, served := socketPair(t)
			srv := &http.Server{Handler: mux, ReadHeaderTimeout: guesttest.Watchdog}
			l := &queue{waiting: make(chan net.Conn, 1), closed: make(chan struct{})}
			l.waiting <- served
			go func() { _ = srv.Serve(l) }()
			t.Cleanup(func() { _ = srv.Close() }) // it does not wait for a put that hangs
			defer func() { _ = conn.Close() }()
			target := guestapi.PathFiles + "?path=" + url.QueryEscape(filepath.Join(dir, "f")) + "&user=" + nobody + query
			_, err := fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: guest\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", target)
			do(t, err)
			select {
			case <-begun: // the server tells of a chunk once it is whole
			case <-time.After(guesttest.Watchdog):
				t.Fatal("the put does not begin")
			}
			_, err = io.WriteString(conn, "10000\r\nha")
			do(t, err, conn.Close())
			select {
			case err := <-ended:
				if err == nil {
					t.Error("half a body was taken")
				}
			case <-time.After(guesttest.Watchdog):
				t.Fatal("the put does not end")
			}
			guesttest.Eventually(t, func() bool {
				return running.Load() == 0
			})
			for _, n := range entriesOf(t, dir) {
				if n != "f" { // what is written in place or unpacked stays
					t.Errorf("it left %q", n)
				}
			}
		})
	}
}

// telling is a body that tells when its first bytes have been read.
type telling struct {
	io.ReadCloser
	begun chan<- struct{}
}

func (s telling) Read(b []byte) (int, error) {
	n, err := s.ReadCloser.Read(b)
	if n > 0 {
		select {
		case s.begun <- struct{}{}:
		default: // told already
		}
	}
	return n, err
}
