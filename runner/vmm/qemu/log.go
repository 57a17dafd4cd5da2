package qemu

import (
	"io"
	"os"
	"time"

	"github.com/coppice-dev/coppice/runner/vmm"
)

// vmmLog keeps the tail of QEMU's own messages. They come through a pipe and never reach a disk, because a guest can make QEMU
// complain without end.
type vmmLog struct {
	*vmm.Tail
	read *os.File
	done chan struct{} // closed when nothing more will come
}

const (
	logBytes = 16 << 10
	logDrain = time.Second // for what an ended VMM left in the pipe
)

// newLog returns a log and the end of the pipe that QEMU writes to, which the caller closes once QEMU has it.
func newLog() (*vmmLog, *os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	l := &vmmLog{Tail: vmm.NewTail(logBytes), read: r, done: make(chan struct{})}
	go func() {
		defer close(l.done)
		_, _ = io.Copy(l.Tail, r) // ends with the VMM or by close
	}()
	return l, w, nil
}

// noLog is that of a recovered machine: the pipe went with the runner that had it.
func noLog() *vmmLog {
	l := &vmmLog{Tail: vmm.NewTail(logBytes), done: make(chan struct{})}
	close(l.done)
	return l
}

// drain reads what an ended VMM has left.
func (l *vmmLog) drain() {
	if l.read != nil {
		_ = l.read.SetReadDeadline(time.Now().Add(logDrain)) // fails only if it was closed, and then nothing is left
	}
	<-l.done
}

// end returns the last lines.
func (l *vmmLog) end() string {
	const limit = 2048
	s := l.String()
	return s[max(0, len(s)-limit):]
}

func (l *vmmLog) close() {
	if l.read != nil {
		_ = l.read.Close() // only read
	}
}
