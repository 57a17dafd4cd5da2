package osthread

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/require"
)

func TestDo(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	if err := Do(func() error { return cause }); !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
}

func TestDoOutlivesGoexit(t *testing.T) {
	t.Parallel()
	if err := Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("a function that ended its goroutine has no error")
	}
}

// TestNeverTheFirstThread starts so many at once that one of them would get it.
func TestNeverTheFirstThread(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			for range 20 {
				runtime.Gosched()
				if err := Do(func() error {
					if syscall.Gettid() == os.Getpid() {
						return errors.New("ran on the first thread")
					}
					return nil
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestNamespaceEndsWithTheThread(t *testing.T) {
	t.Parallel()
	require.Root(t)
	namespace := func() string {
		ns, err := os.Readlink("/proc/thread-self/ns/uts") // in one system call: the goroutine may move to another thread
		if err != nil {
			t.Error(err)
		}
		return ns
	}
	ours := namespace()
	for range 100 {
		if err := Do(func() error {
			if err := unix.Unshare(unix.CLONE_NEWUTS); err != nil {
				return err
			}
			if namespace() == ours {
				return errors.New("still in the old namespace")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if got := namespace(); got != ours {
			t.Fatalf("a goroutine of ours runs in %s, want %s", got, ours)
		}
	}
}
