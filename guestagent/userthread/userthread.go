//go:build linux

package userthread

import (
	"context"
	"errors"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// The bounds of threads that work as users at the same time: a host may open many files and read none.
const (
	maxOfUser   = 16 // of one user, so that none keeps the others from working
	maxAll      = 256
	longestWait = 5 * time.Second
)

// Threads run functions with the rights of users.
type Threads struct {
	join func() error
	wait time.Duration

	mu      sync.Mutex // guards what follows
	all     int
	running map[uint32]int // threads by user; no entry is 0
	freed   chan struct{}  // closed when a thread ends, and then replaced
}

// New returns an empty set of threads. join moves the calling thread to where the files of the workload are.
func New(join func() error) *Threads {
	return &Threads{join: join, wait: longestWait, running: map[uint32]int{}, freed: make(chan struct{})}
}

// enter takes a place for a thread. It waits a short time for one.
func (u *Threads) enter(ctx context.Context, uid uint32) error {
	late := time.NewTimer(u.wait)
	defer late.Stop()
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		u.mu.Lock()
		freed := u.freed
		free := u.all < maxAll && u.running[uid] < maxOfUser
		if free {
			u.all++
			u.running[uid]++
		}
		u.mu.Unlock()
		if free {
			return nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-late.C:
			return core.Errorf(core.Unavailable, core.CodeGuestBusy, "too many requests work on files as user %d; try again when some have ended", uid)
		}
	}
}

func (u *Threads) leave(uid uint32) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.all--
	if u.running[uid]--; u.running[uid] == 0 {
		delete(u.running, uid)
	}
	close(u.freed)
	u.freed = make(chan struct{})
}

// As runs fn on a thread of its own that becomes the user for good: it has the user's ids and groups and no capability,
// and ends with fn. So fn cannot use the rights of the agent, and no thread keeps the identity of the user.
func (u *Threads) As(ctx context.Context, cred *syscall.Credential, fn func() error) error {
	if err := u.enter(ctx, cred.Uid); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		defer u.leave(cred.Uid)
		ended := false
		defer func() {
			if !ended { // a handler that ends its answer midway must not end the agent
				if p := recover(); p != nil {
					done <- &panicked{p}
				}
			}
		}()
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		err := u.join()
		if err == nil {
			err = become(cred)
		}
		if err != nil {
			err = core.Wrapf(err, core.Internal, core.CodeInternal, "the work cannot be done as the user: %v", err)
		} else {
			err = fn()
		}
		ended = true
		done <- err
	}()
	err := <-done
	if p, ok := errors.AsType[*panicked](err); ok {
		panic(p.value)
	}
	return err
}

// panicked carries a panic to the goroutine that asked for the work.
type panicked struct{ value any }

func (p *panicked) Error() string { return "the work ended with a panic" }

// noID is -1: it changes nothing.
const noID = 1<<32 - 1

// become gives the calling thread, and only it, the identity of a user. (Package syscall would change all threads.) The
// order matters: the last call removes the rights that the others need.
func become(cred *syscall.Credential) error {
	if cred.Uid == noID || cred.Gid == noID {
		return errors.New("the kernel treats this id as no change")
	}
	var groups unsafe.Pointer
	if len(cred.Groups) > 0 {
		groups = unsafe.Pointer(&cred.Groups[0])
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(cred.Groups)), uintptr(groups), 0); errno != 0 {
		return os.NewSyscallError("setgroups", errno)
	}
	gid, uid := uintptr(cred.Gid), uintptr(cred.Uid)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, gid, gid, gid); errno != 0 {
		return os.NewSyscallError("setresgid", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
		return os.NewSyscallError("setresuid", errno)
	}
	if uid != 0 {
		return checkBecame(cred)
	}
	return nil
}

// checkBecame makes sure that the kernel has changed the ids, and has removed every capability with them.
func checkBecame(cred *syscall.Credential) error {
	ruid, euid, suid := unix.Getresuid()
	if id := int(cred.Uid); ruid != id || euid != id || suid != id {
		return errors.New("the ids have not changed")
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	if data[0].Effective|data[1].Effective|data[0].Permitted|data[1].Permitted != 0 {
		return errors.New("capabilities are left")
	}
	return nil
}
