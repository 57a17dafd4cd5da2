package vmmproc

import (
	"io"
	"os"
	"time"

	"github.com/coppice-dev/coppice/runner/vmm"
)

// Log keeps the end of a VMM's own messages. They come through a pipe and never reach a disk, because a guest can make
// a VMM print messages without end.
type Log struct {
	*vmm.Tail
	read *os.File
	done chan struct{} // closed when nothing more will come
}

const (
	logBytes = 16 << 10
	logDrain = time.Second // for what an ended VMM left in the pipe
)

// NewLog returns a log and the end of the pipe that the VMM writes to, which the caller closes once the VMM has it.
func NewLog() (*Log, *os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	l := &Log{Tail: vmm.NewTail(logBytes), read: r, done: make(chan struct{})}
	go func() {
		defer close(l.done)
		_, _ = io.Copy(l.Tail, r) // ends with the VMM or by close
	}()
	return l, w, nil
}

// NoLog is the log of a recovered machine: the pipe ended with the earlier runner.
func NoLog() *Log {
	l := &Log{Tail: vmm.NewTail(logBytes), done: make(chan struct{})}
	close(l.done)
	return l
}

// Drain reads the rest of an ended VMM's messages.
func (l *Log) Drain() {
	if l.read != nil {
		_ = l.read.SetReadDeadline(time.Now().Add(logDrain)) // fails only if it was closed, and then nothing is left
	}
	<-l.done
}

// End returns the last lines.
func (l *Log) End() string {
	const limit = 2048
	s := l.String()
	return s[max(0, len(s)-limit):]
}

// Close ends the reading.
func (l *Log) Close() {
	if l.read != nil {
		_ = l.read.Close() // only read
	}
}
