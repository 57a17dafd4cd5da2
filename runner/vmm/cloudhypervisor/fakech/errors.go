package main

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// chain is an error with its causes, outermost first, in the words of cloud-hypervisor.
type chain []string

func (c chain) Error() string { return strings.Join(c, ": ") }

// wrap puts words before an error.
func wrap(words string, err error) chain { return append(chain{words}, asChain(err)...) }

// asChain is an error in the form of the API: one of the kernel reads as Rust prints it.
func asChain(err error) chain {
	if c, ok := errors.AsType[chain](err); ok {
		return c
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		s := errno.Error()
		return chain{fmt.Sprintf("%s (os error %d)", strings.ToUpper(s[:1])+s[1:], int(errno))}
	}
	return chain{err.Error()}
}

// The errors of states.
var (
	errNotCreated     = chain{"VM is not created"}
	errMissingConfig  = chain{"VM config is missing"}
	errAlreadyCreated = chain{"VM is already created"}
	errNotRunning     = chain{"VM is not running"}
)

// status is what the API answers an error with that it got from a call.
func status(err chain) int {
	if len(err) > 0 && (err[0] == errNotCreated[0] || err[0] == errMissingConfig[0]) {
		return 404
	}
	return 500
}

// lockFile takes an advisory lock on the first bytes of a file, or on all of it, as cloud-hypervisor does.
func lockFile(f interface{ Fd() uintptr }, kind int16, length int64) error {
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Len: length})
}
