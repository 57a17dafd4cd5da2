package jail

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Own are the namespaces of a new process in addition to those of Enter.
const Own = unix.CLONE_NEWPID

// Enter moves the calling thread into a copy of the jail, and into its own IPC, host name and cgroup namespaces. The
// thread is changed permanently: processes that it starts are in the jail. Such a process still needs Complete.
func (j *Jail) Enter() error {
	if err := j.setns(); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("make its own namespaces: %w", err)
	}
	if err := unix.Sethostname([]byte(hostname)); err != nil {
		return fmt.Errorf("set a host name: %w", err)
	}
	return nil
}

// setns moves the calling thread into the jail itself.
func (j *Jail) setns() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // other threads keep their root and working directory
		return fmt.Errorf("leave the process's root directory: %w", err)
	}
	return wrapIf(unix.Setns(int(j.mounts.Fd()), unix.CLONE_NEWNS), "enter the jail")
}

func wrapIf(err error, doing string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// Complete shows a process its own directory of /proc, and nothing else of /proc, as /proc/self: the process needs it
// to open its inherited files again. The calling thread has entered the jail and started the process, which must not
// have run yet. ptrace holds the process (SysProcAttr.Ptrace at its start), and it goes on when Complete succeeds.
// After an error, the caller must end it.
func Complete(pid int, prepare func() error) error {
	var status unix.WaitStatus
	if _, err := wait(pid, &status); err != nil {
		return fmt.Errorf("wait for the program to be loaded: %w", err)
	}
	if !status.Stopped() {
		return fmt.Errorf("the program ended before it began, with status %#x", int(status))
	}
	if err := unix.PtraceSetOptions(pid, unix.PTRACE_O_EXITKILL); err != nil { // if this thread dies, so does the process
		return fmt.Errorf("hold the program: %w", err)
	}
	if err := showProc(pid); err != nil {
		return err
	}
	if err := prepare(); err != nil {
		return err
	}
	if err := unix.PtraceDetach(pid); err != nil {
		return fmt.Errorf("let the program go: %w", err)
	}
	return nil
}

func wait(pid int, status *unix.WaitStatus) (int, error) {
	for {
		n, err := unix.Wait4(pid, status, unix.WALL, nil)
		if err != unix.EINTR {
			return n, err
		}
	}
}

// showProc binds the process's directory of the host's /proc, which another thread sees, over the jail's.
func showProc(pid int) error {
	tree, err := outside(fmt.Sprintf("/proc/%d", pid))
	if err != nil {
		return err
	}
	defer tree.Close()
	if err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, ownProc, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("show the program its own directory of /proc: %w", err)
	}
	if err := unix.Mount("", ownProc, "", unix.MS_REMOUNT|unix.MS_BIND|dataOnly, ""); err != nil {
		return fmt.Errorf("make that read-only: %w", err)
	}
	return nil
}

// outside returns a detached mount of a path of the host. The calling thread may be in a jail.
func outside(path string) (*os.File, error) {
	type result struct {
		tree *os.File
		err  error
	}
	got := make(chan result, 1)
	go func() { // on another thread, because the calling goroutine is locked to its own
		tree, err := Detached(path)
		got <- result{tree, err}
	}()
	r := <-got
	return r.tree, r.err
}

// Detached returns a directory as the root of its own mount, which ends with the last copy of the descriptor. A holder
// of the descriptor reaches everything below the directory and nothing above it. With a plain descriptor of a host
// directory, ".." would lead out of any jail.
func Detached(path string) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("take %s out of the host's mounts: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}
