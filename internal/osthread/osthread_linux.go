// Package osthread runs Go code on OS threads whose kernel state, such as namespaces, may be changed for good.
package osthread

import (
	"errors"
	"os"
	"runtime"
	"syscall"
)

// Go runs fn in a goroutine with an OS thread of its own, which is never used for anything else and ends with fn.
// It is never the process's first thread: that one cannot end, and it is what others see under /proc/PID, so that a
// namespace it entered would look like the whole process's.
//
// A child process that is started by fn with a parent-death signal gets it when fn returns.
func Go(fn func()) {
	go func() {
		runtime.LockOSThread() // not unlocked: the runtime ends the thread with the goroutine
		if syscall.Gettid() != os.Getpid() {
			fn()
			return
		}
		locked := make(chan struct{})
		go func() {
			runtime.LockOSThread() // another thread: ours is taken
			close(locked)
			fn()
		}()
		<-locked
		runtime.UnlockOSThread()
	}()
}

// Do is Go, waiting for fn's result. An fn that ends its goroutine (runtime.Goexit, as in t.FailNow) has an error.
func Do(fn func() error) error {
	result := make(chan error, 1)
	Go(func() {
		err := errors.New("the function ended its goroutine")
		defer func() { result <- err }()
		err = fn()
	})
	return <-result
}
