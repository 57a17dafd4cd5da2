//go:build linux

package guestagent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/hashicorp/yamux"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/guestagent/link"
	"github.com/coppice-dev/coppice/guestagent/reseal"
)

// wire is to the agent what a VMM is to a virtio port: one stream for the guest, and one host after the other at its
// other end.
type wire struct {
	t     *testing.T
	guest net.Conn // the VMM's end of the guest's stream

	mu   sync.Mutex
	host net.Conn // the VMM's end of the host's connection
}

func socketPair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if a, err = net.Dial("unix", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	return a, b
}

// plugIn runs an agent at the guest's end.
func plugIn(t *testing.T, a *Agent) *wire {
	t.Helper()
	vmm, stream := socketPair(t)
	w := &wire{t: t, guest: vmm}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := a.hosts.Serve(ctx, guestapi.NewChannel(stream)); err != nil {
			t.Errorf("the channel failed: %v", err)
		}
	})
	wg.Go(func() {
		buf := make([]byte, 4096)
		for {
			n, err := vmm.Read(buf)
			if err != nil {
				return
			}
			w.mu.Lock()
			if w.host != nil {
				_, _ = w.host.Write(buf[:n]) // to nobody, if the host is gone
			}
			w.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = vmm.Close()
		w.connect(nil)
		wg.Wait()
	})
	return w
}

// connect replaces the connected host.
func (w *wire) connect(host net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.host != nil {
		_ = w.host.Close()
	}
	w.host = host
	if host != nil {
		go func() { _, _ = io.Copy(w.guest, host) }()
	}
}

// linkClient greets and returns an HTTP client on the new link.
func linkClient(t *testing.T, w *wire) *http.Client {
	t.Helper()
	conn, vmm := socketPair(t)
	w.connect(vmm)
	t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), guesttest.Watchdog)
	defer cancel()
	greeted, err := guestapi.Greet(ctx, conn)
	if err != nil {
		t.Fatal(err)
	}
	mux, err := yamux.Client(greeted, link.MuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mux.Close() })
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return mux.Open() },
	}}
}

func linkAgent(t *testing.T) *Agent {
	t.Helper()
	w := &guesttest.Workload{}
	a := newAgent(Config{Logger: slog.New(slog.NewTextHandler(t.Output(), nil))}, w, filepath.Join(t.TempDir(), "state"))
	a.reseal = reseal.New(w, []reseal.Step{{Name: guestapi.StepEntropy, Do: func(context.Context, *reseal.Run) (reseal.Evidence, error) {
		return nil, nil
	}}})
	t.Cleanup(func() {
		_ = a.sessions.Close(context.WithoutCancel(t.Context()))
		a.idle.stop()
	})
	return a
}

// TestNextHostEndsTheLast: the requests of an earlier connection end before the next connection is answered; sessions
// go on.
func TestNextHostEndsTheLast(t *testing.T) {
	t.Parallel()
	a := linkAgent(t)
	w := plugIn(t, a)
	first := linkClient(t, w)
	res, err := first.Post("http://guest"+guestapi.PathSessions, "application/json", strings.NewReader(`{"command":["cat"],"cwd":"/","stdin_open":true}`))
	if err != nil {
		t.Fatal(err)
	}
	var s guestapi.Session
	if err := errors.Join(json.NewDecoder(res.Body).Decode(&s), res.Body.Close()); err != nil {
		t.Fatal(err)
	}
	// Three requests of the first host: one waits, one uploads for ever, one is held up by the freeze.
	dir := t.TempDir()
	body, feed := io.Pipe()
	ended, following := make(chan error, 3), make(chan struct{})
	get := func(method, path string, body io.Reader) {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://guest"+path, body)
		if err != nil {
			t.Error(err)
		}
		res, err := first.Do(req)
		if method == http.MethodGet {
			close(following) // the answer has begun: its reader follows the output
		}
		if err == nil {
			_, err = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
		}
		ended <- err
	}
	go get(http.MethodGet, guesttest.Route(guestapi.PathSessionOutput, s.ID)+"?follow=1", nil)
	go get(http.MethodPut, guestapi.PathFiles+"?path="+filepath.Join(dir, "f"), body)
	if _, err := feed.Write(bytes.Repeat([]byte("x"), 100_000)); err != nil {
		t.Fatal(err)
	}
	<-following
	guesttest.Eventually(t, func() bool {
		list, err := os.ReadDir(dir)
		return err == nil && len(list) == 1
	})
	res, err = first.Post("http://guest"+guestapi.PathQuiesce, "application/json", strings.NewReader(`{"capture_id":"c"}`))
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("quiesce: %v %v", err, res)
	}
	_ = res.Body.Close()
	go get(http.MethodPost, guestapi.PathSessions, strings.NewReader(`{"command":["touch","`+filepath.Join(dir, "started")+`"],"cwd":"/"}`))

	// The VM has been cloned: another host greets on the same stream, in the middle of all that.
	second := linkClient(t, w)
	res, err = second.Get("http://guest" + guestapi.PathHealth)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("health over the new link: %v", err)
	}
	_ = res.Body.Close()
	if list, err := os.ReadDir(dir); err != nil || len(list) != 0 {
		t.Errorf("the upload of the old link has left %v (%v)", list, err)
	}
	for _, path := range []string{guestapi.PathReseed, guestapi.PathRelease} {
		res, err := second.Post("http://guest"+path, "application/json", strings.NewReader(`{"generation":"`+a.gate.get().Generation+`","entropy":"`+
			"MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEyMw=="+`"}`))
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
	}
	_ = feed.Close()
	for range 3 {
		if err := <-ended; err == nil {
			t.Error("a request of the old link was answered")
		}
	}
	res, err = second.Get("http://guest" + guestapi.PathSessions)
	if err != nil {
		t.Fatal(err)
	}
	var list guestapi.Sessions
	if err := errors.Join(json.NewDecoder(res.Body).Decode(&list), res.Body.Close()); err != nil || len(list.Sessions) != 1 {
		t.Errorf("%d sessions (%v), want the one of before", len(list.Sessions), err)
	}
	if _, err := os.Stat(filepath.Join(dir, "started")); err == nil {
		t.Error("a session that waited on the old link was started after the thaw")
	}
}
