package pager_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/runner/pager"
)

// TestKilled: when a pager dies, mappings of its files are broken and not hung, and another pager can start.
func TestKilled(t *testing.T) {
	server := tests3.Start(t)
	proxy, bucket := server.Proxy(t), server.Bucket(t)
	x := newRig(t, settings{Store: proxy.URL(bucket), AccessKey: server.AccessKey, SecretKey: server.SecretKey})
	b := memory(rand.New(rand.NewPCG(8, 1)), 20000)
	w := x.seal(b, nil, nil)
	src := sourceOf(w)
	x.put(pager.Image{ID: "a", Source: src}, x.part(len(b)))
	m := x.mapped("a", len(b))
	f, err := x.client.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	proxy.Down(t)
	hung := make(chan error)
	go func() {
		_, err := f.ReadAt(make([]byte, len(b)), 0)
		hung <- err
	}()
	x.await("a", func(s *pager.Status) bool { return s != nil && s.Problem != nil })
	watched := make(chan error, 1)
	first := make(chan struct{}, 1)
	go func() {
		watched <- x.client.Watch(t.Context(), func([]pager.Status) {
			select {
			case first <- struct{}{}:
			default:
			}
		})
	}()
	<-first
	if err := syscall.Kill(x.pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-watched; !errors.Is(err, pager.ErrGone) {
		t.Errorf("watching ended with %v", err)
	}
	if err := <-hung; err == nil {
		t.Error("everything was read without store and pager")
	}
	x.waitGone(x.pid)
	faulted := 0
	for p := 0; p < len(b); p += page {
		if faults(m, p) {
			faulted++
		}
	}
	if faulted == 0 {
		t.Error("every page was shown without a pager")
	}
	proxy.Up(t)
	x.start()
	x.put(pager.Image{ID: "a", Source: src}, x.part(len(b)))
	again, err := x.client.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	got := make([]byte, len(b)) // not mapped: the proxy runs in this process, and the collector would stop it during the wait for a page
	if _, err := again.ReadAt(got, 0); err != nil {
		t.Error(err)
	}
	wantEqual(t, got, b, "the image of another pager")
}

// TestDiskFull: when this host's disk has no room for fetched pages, the status says so, and the pager goes on when
// there is room.
func TestDiskFull(t *testing.T) {
	x := newDirRig(t)
	b := memory(rand.New(rand.NewPCG(12, 1)), 2048)
	w := x.seal(b, nil, nil)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil { // the pager may have it open
			t.Error(err)
		}
	})
	part, err := os.Create(filepath.Join(dir, "part"))
	if err != nil {
		t.Fatal(err)
	}
	defer part.Close()
	if err := part.Truncate(int64(len(b))); err != nil {
		t.Fatal(err)
	}
	x.put(pager.Image{ID: "a", Source: sourceOf(w)}, part)
	st := x.await("a", func(s *pager.Status) bool { return s != nil && s.Problem != nil })
	if st.Problem.Code != core.CodeDiskFull || st.Damaged() || !strings.Contains(st.Problem.Message, "delete checkpoints") {
		t.Errorf("with a full disk: %+v since %s", st.Problem, st.Stalled)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT, "size=64m"); err != nil {
		t.Fatal(err)
	}
	st = x.await("a", func(s *pager.Status) bool { return s != nil && s.Whole })
	if st.Problem != nil {
		t.Errorf("with room: %+v", st.Problem)
	}
	got := make([]byte, len(b))
	if _, err := part.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	wantEqual(t, got, b, "the image")
}

// TestStop: a pager ends even if a mount namespace that was made meanwhile has a copy of its mount.
func TestStop(t *testing.T) {
	x := newDirRig(t)
	other := exec.Command("unshare", "--mount", "--propagation", "private", "sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	})
	mine, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "another mount namespace has the pager's mount", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", other.Process.Pid))
		its, linkErr := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", other.Process.Pid))
		return err == nil && linkErr == nil && its != mine && strings.Contains(string(b), x.cfg.Dir)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if err := x.client.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	x.waitGone(x.pid)
}

// TestKilledWhileOpened kills a pager while one of its files is being opened, many times: the pager ends, and the open
// fails.
func TestKilledWhileOpened(t *testing.T) {
	x := newDirRig(t)
	b := memory(rand.New(rand.NewPCG(11, 1)), 64)
	src := sourceOf(x.seal(b, nil, nil))
	for range 5 {
		x.put(pager.Image{ID: "a", Source: src}, x.part(len(b)))
		var openers sync.WaitGroup
		opened := make(chan struct{}, 1)
		for range 4 {
			openers.Go(func() {
				for {
					f, err := x.client.Open(t.Context(), "a")
					if err != nil {
						if !errors.Is(err, pager.ErrGone) {
							t.Errorf("opened while the pager was killed: %v", err)
						}
						return
					}
					select {
					case opened <- struct{}{}:
					default:
					}
					_ = f.Close()
				}
			})
		}
		<-opened
		if err := syscall.Kill(x.pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		x.waitGone(x.pid)
		openers.Wait()
		x.start()
	}
}
