//go:build linux

package guestagent

import (
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

const maxFlush = 30 * time.Second

// flusher flushes the file system of the writable disk. A running flush in the kernel cannot be stopped. So a flush
// that takes too long is left alone, and no other flush begins before it ends.
type flusher struct {
	path string
	busy chan struct{} // of size 1; full while a flush runs
}

func newFlusher(path string) *flusher { return &flusher{path: path, busy: make(chan struct{}, 1)} }

// flush reports whether everything that was written before the call reached the disk within the limit.
func (f *flusher) flush(limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case f.busy <- struct{}{}:
	case <-timer.C:
		return false
	}
	done := make(chan error, 1)
	go func() {
		err := syncFS(f.path)
		<-f.busy
		done <- err
	}()
	select {
	case err := <-done:
		return err == nil
	case <-timer.C:
		return false
	}
}

func syncFS(path string) error {
	fd, err := smallfile.Open(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return smallfile.PathError("open", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	return os.NewSyscallError("syncfs", unix.Syncfs(fd))
}

// flushDisk is called before a capture, while the workload runs, so that little is left to flush in the quiesce.
func (a *Agent) flushDisk(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.FlushRequest
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	limit, err := flushLimit(req.TimeoutMS)
	if err != nil {
		return err
	}
	start := time.Now()
	done := a.disk.flush(limit)
	answer.WriteJSON(w, http.StatusOK, guestapi.FlushResponse{Flushed: done, FlushMS: core.Milliseconds(time.Since(start))})
	return nil
}

func flushLimit(ms int) (time.Duration, error) {
	limit := time.Duration(ms) * time.Millisecond
	if ms < 0 || limit > maxFlush {
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "a flush may take at most %d ms", maxFlush.Milliseconds())
	}
	return limit, nil
}
