package pager_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/runner/pager"
)

// TestKilledReader kills a process that waits for a page of a silent store: once directly, and once after a stop, like
// that of a held machine. It ends, and the image goes on for others.
func TestKilledReader(t *testing.T) {
	server := tests3.Start(t)
	proxy, bucket := server.Proxy(t), server.Bucket(t)
	x := newRig(t, settings{Store: proxy.URL(bucket), AccessKey: server.AccessKey, SecretKey: server.SecretKey})
	b := memory(rand.New(rand.NewPCG(8, 1)), 20000)
	x.put(pager.Image{ID: "a", Source: sourceOf(x.seal(b, nil, nil))}, x.part(len(b)))
	f, err := x.client.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	proxy.Down(t)
	for _, first := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		// A file that is opened for writing is read directly: the kernel waits for the pager's answer, as it does for a
		// mapped page.
		in, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), "cat")
		cmd.Stdin = in
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			_ = cmd.Wait() // it is killed
			close(ended)
		}()
		x.await("a", func(s *pager.Status) bool {
			return s != nil && slices.ContainsFunc(s.Waiters, func(w pager.Waiter) bool { return w.Thread == cmd.Process.Pid })
		})
		for _, each := range []syscall.Signal{first, syscall.SIGKILL} {
			if err := cmd.Process.Signal(each); err != nil && !errors.Is(err, os.ErrProcessDone) {
				t.Fatal(err)
			}
		}
		select {
		case <-ended:
		case <-time.After(5 * time.Minute):
			t.Fatalf("a process that was killed after %s waits for the store", first)
		}
		if err := in.Close(); err != nil {
			t.Fatal(err)
		}
	}
	proxy.Up(t)
	got := make([]byte, len(b))
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, b) {
		t.Errorf("the image cannot be read any more, or differs: %v", err)
	}
}
