package main

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
)

// chain is an error of cloud-hypervisor, with its causes after it.
type chain []string

func (c chain) Error() string { return strings.Join(c, ": ") }

// wrap puts words before an error.
func wrap(words string, err error) chain { return append(chain{words}, asChain(err)...) }

// asChain is an error in the form of the API. Errors of the kernel are printed as Rust prints them.
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

// status is the API's status for an error of a call.
func status(err chain) int {
	if len(err) > 0 && (err[0] == errNotCreated[0] || err[0] == errMissingConfig[0]) {
		return 404
	}
	return 500
}
