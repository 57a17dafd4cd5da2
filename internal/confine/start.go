package confine

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
)

// program is the helper's name in process lists. Enter recognizes a helper by it.
const program = "coppice-confined"

// process is a running helper.
type process struct {
	task                  string
	uid                   uint32
	confined              bool // it runs in namespaces and as its own user
	bare                  bool // its root is the container's; see emptyRoot
	chroot                bool // it enters its root itself; see stageRoot
	proc                  *os.Process
	stdin, stdout, stderr *os.File
	ended                 chan struct{}
	state                 *os.ProcessState // after ended

	onThread chan func() // functions for the thread with the helper's mount namespace

	mu  sync.Mutex
	why error // the reason of kill
	dir string
}

// start starts the helper's process on a new thread. The thread is changed permanently: it enters the helper's mount
// namespace and drops everything that helpers must not inherit. The helper waits until it is confined.
func start(spec Spec, uid uint32) (*process, error) {
	p := &process{
		task: spec.Task, uid: uid, confined: os.Geteuid() == 0, dir: spec.Dir,
		ended: make(chan struct{}), onThread: make(chan func()),
	}
	if spec.Dir != "" && !p.confined {
		return nil, errors.New("only root can give it a directory")
	}
	if spec.Dir != "" {
		can, err := canPivot()
		if err != nil {
			return nil, err
		}
		if p.chroot = !can; p.chroot {
			spec.Caps = append(slices.Clip(spec.Caps), unix.CAP_SYS_CHROOT)
		}
	}
	stdin, stdout, stderr, err := p.pipes()
	if err != nil {
		return nil, err
	}
	given, err := reopened(spec.Files)
	defer func() {
		for _, f := range given {
			_ = f.Close() // it is open only for reading
		}
	}()
	if err != nil {
		p.close()
		return nil, errors.Join(err, stdin.Close(), stdout.Close(), stderr.Close())
	}
	attr := &os.ProcAttr{Dir: "/", Env: []string{}, Files: append([]*os.File{stdin, stdout, stderr}, given...), Sys: p.attributes(spec.Caps)}
	started := make(chan error, 1)
	osthread.Go(func() {
		var err error
		if p.confined {
			err = p.prepareThread(spec.Caps)
		}
		if err == nil {
			p.proc, err = os.StartProcess("/proc/self/exe", []string{program, spec.Task}, attr)
		}
		started <- err
		if err != nil {
			return
		}
		// The helper dies with this thread (Pdeathsig), so the thread stays until the helper has ended.
		go func() {
			p.state, _ = p.proc.Wait() // it fails only for a process that is not our child
			close(p.ended)
		}()
		for {
			select {
			case fn := <-p.onThread:
				fn()
			case <-p.ended:
				return
			}
		}
	})
	err = errors.Join(<-started, stdin.Close(), stdout.Close(), stderr.Close())
	if err != nil {
		if p.proc != nil {
			p.kill(err)
			<-p.ended
		}
		p.close()
		return nil, err
	}
	return p, nil
}

// reopened opens the files for a helper once more, at the same offset. The helper then shares no
// file description with the caller, so it cannot change the caller's offset and flags. A file that
// is not regular is duplicated: a pipe has no offset, and the filter forbids changes of flags.
func reopened(files []*os.File) (out []*os.File, err error) {
	for _, f := range files {
		info, err := f.Stat()
		if err != nil {
			return out, fmt.Errorf("give a file to a confined helper: %w", err)
		}
		if !info.Mode().IsRegular() {
			fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return out, fmt.Errorf("give a file to a confined helper: %w", err)
			}
			out = append(out, os.NewFile(uintptr(fd), f.Name()))
			continue
		}
		again, err := os.Open("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
		if err != nil {
			return out, fmt.Errorf("open a file again for a confined helper: %w", err)
		}
		out = append(out, again)
		at, err := f.Seek(0, io.SeekCurrent)
		if err == nil {
			_, err = again.Seek(at, io.SeekStart)
		}
		if err != nil {
			return out, fmt.Errorf("give a file to a confined helper: %w", err)
		}
	}
	return out, nil
}

// pipes makes the helper's standard streams and returns the helper's ends.
func (p *process) pipes() (stdin, stdout, stderr *os.File, err error) {
	var inErr, outErr, errErr error
	stdin, p.stdin, inErr = os.Pipe()
	p.stdout, stdout, outErr = os.Pipe()
	p.stderr, stderr, errErr = os.Pipe()
	if err = errors.Join(inErr, outErr, errErr); err != nil {
		for _, f := range []*os.File{stdin, stdout, stderr} {
			_ = f.Close() // nothing was written to it; closing nil is an error, too
		}
		p.close()
	}
	return stdin, stdout, stderr, err
}

func (p *process) attributes(caps []uint8) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if !p.confined {
		return a
	}
	a.Cloneflags = unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP
	a.Credential = &syscall.Credential{Uid: p.uid, Gid: p.uid}
	for _, c := range caps {
		a.AmbientCaps = append(a.AmbientCaps, uintptr(c))
	}
	return a
}

// unshareMounts gives this thread its own mount namespace. Nothing propagates from it to the host's.
func unshareMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return nil
}

// prepareThread gives this thread its own mount namespace, from which nothing propagates to the host's. It also drops
// what the helper must not inherit: the bounding set except caps, and the ability to gain privileges.
func (p *process) prepareThread(caps []uint8) error {
	if err := unshareMounts(); err != nil {
		return err
	}
	keep := make(map[uintptr]bool, len(caps))
	for _, c := range caps {
		keep[uintptr(c)] = true
	}
	for c := range uintptr(64) {
		if keep[c] {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); errors.Is(err, unix.EINVAL) {
			break // the kernel has no more capabilities
		} else if err != nil {
			return fmt.Errorf("drop capability %d of the bounding set: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	return nil
}

// confine takes everything from the helper that it does not need. The helper does nothing for a tenant yet: it waits
// for its request.
func (p *process) confine() error {
	if !p.confined {
		return nil
	}
	// When the host runs short of memory, the kernel ends the helper first.
	if err := os.WriteFile(filepath.Join("/proc", strconv.Itoa(p.proc.Pid), "oom_score_adj"), []byte("1000"), 0); err != nil {
		return fmt.Errorf("make it the first process that the kernel kills: %w", err)
	}
	result := make(chan error, 1)
	select {
	case p.onThread <- func() {
		var err error
		if p.chroot {
			err = stageRoot(p.dir)
		} else {
			p.bare, err = emptyRoot(p.dir)
		}
		result <- err
	}:
	case <-p.ended:
		return &endedError{errors.New("it ended before it was confined")}
	}
	if err := <-result; err != nil {
		return err
	}
	return p.checkMounts()
}

// checkMounts reads the helper's mounts from the kernel: there must be its root, and its directory if it has one.
func (p *process) checkMounts() error {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.proc.Pid), "mountinfo"))
	if err != nil {
		return fmt.Errorf("read its mounts: %w", err)
	}
	want := 1
	if p.dir != "" {
		want++
	}
	if p.chroot { // it has not entered its root yet
		want++
	}
	if n := strings.Count(string(b), "\n"); n != want {
		return fmt.Errorf("it has %d mounts, want %d", n, want)
	}
	return nil
}

// emptyRoot makes an empty file system the root of this mount namespace. The helper gets the same root, because it had
// the same root as this thread. If dir is not empty, it is mounted at TreeDir. All other mounts of the host are removed
// from the namespace.
//
// Container engines forbid pivot_root. There, the container's root stays, read-only, and every other mount is removed;
// then bare is true. A helper without a directory cannot open anything by its path anyway; one with a directory has
// stageRoot.
func emptyRoot(dir string) (bare bool, err error) {
	mounts, err := mountPoints()
	if err != nil {
		return false, err
	}
	tree := -1
	if dir != "" {
		// The source is opened first, because the mount point may hide it.
		if tree, err = detached(dir); err != nil {
			return false, err
		}
		defer func() { _ = unix.Close(tree) }()
	}
	err = pivot(tree)
	if !errors.Is(err, errNoPivot) || tree >= 0 {
		return false, err
	}
	return true, leaveMounts(mounts)
}

// leaveMounts removes every mount except the root from this thread's mount namespace, and makes the root read-only.
func leaveMounts(mounts []string) error {
	for _, at := range slices.Backward(mounts) {
		if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", at, err)
		}
	}
	if err := unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|rootFlags, ""); err != nil {
		return fmt.Errorf("make the root read-only: %w", err)
	}
	return unix.Chdir("/")
}

// stageRoot makes an empty file system with dir at TreeDir, for hosts where pivot_root is forbidden. The helper changes
// its root to it with chroot, before it reads its request. The helper keeps CAP_SYS_CHROOT, which is useless under the
// filter: that allows neither chroot nor setns. No descriptor of the helper is a directory outside, so it cannot get
// back to the container's root.
func stageRoot(dir string) error {
	mounts, err := mountPoints()
	if err != nil {
		return err
	}
	tree, err := detached(dir)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(tree) }()
	if err := leaveMounts(mounts); err != nil {
		return err
	}
	return mountStage(tree)
}

// canPivot reports whether this host allows pivot_root. It tries until it has an answer.
var canPivot = remember(func() (bool, error) {
	err := osthread.Do(func() error { // the thread's namespace is changed permanently
		if err := unshareMounts(); err != nil {
			return err
		}
		return pivot(-1)
	})
	if errors.Is(err, errNoPivot) {
		return false, nil
	}
	return err == nil, err
})

// remember returns a function that calls try until try succeeds, and returns that answer from then
// on. An error is not remembered, because it may pass, as when the host is out of memory.
func remember(try func() (bool, error)) func() (bool, error) {
	var mu sync.Mutex // guards the variables below
	var known, answer bool
	return func() (bool, error) {
		mu.Lock()
		defer mu.Unlock()
		if known {
			return answer, nil
		}
		got, err := try()
		if err == nil {
			known, answer = true, got
		}
		return got, err
	}
}

// mountPoints lists the mount points in this thread's namespace, without the root.
func mountPoints() ([]string, error) {
	b, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	// Blanks, tabs, newlines and backslashes are written as octal escapes.
	plain := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var out []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] != "/" {
			out = append(out, plain.Replace(f[4]))
		}
	}
	return out, nil
}

// detached makes a detached mount of a directory, without devices, set-user-id bits and programs.
func detached(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open the directory: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	tree, err := unix.OpenTree(fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return -1, fmt.Errorf("bind the directory: %w", err)
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return -1, errors.Join(fmt.Errorf("bind the directory without devices: %w", err), unix.Close(tree))
	}
	return tree, nil
}

const rootFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// errNoPivot says that the host forbids pivot_root.
var errNoPivot = errors.New("this host forbids pivot_root, as the filters of container engines do; run the program outside of the container, or allow pivot_root in its seccomp profile")

// stageDir is a directory that exists on every host. The mount that it hides is not needed any more.
const stageDir = "/proc"

// mountStage mounts an empty file system at stageDir, with the detached mount tree at TreeDir unless it is -1.
func mountStage(tree int) error {
	if err := unix.Mount("none", stageDir, "tmpfs", rootFlags, "mode=0555,size=64k,nr_inodes=4"); err != nil {
		return fmt.Errorf("mount an empty root: %w", err)
	}
	if tree >= 0 {
		if err := unix.Mkdir(stageDir+TreeDir, 0o555); err != nil {
			return err
		}
		if err := unix.MoveMount(tree, "", unix.AT_FDCWD, stageDir+TreeDir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("mount the directory: %w", err)
		}
	}
	if err := unix.Mount("", stageDir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|rootFlags, ""); err != nil {
		return fmt.Errorf("make the empty root read-only: %w", err)
	}
	return nil
}

// pivot makes a new file system the root, with the detached mount tree at TreeDir unless it is -1.
func pivot(tree int) error {
	if err := mountStage(tree); err != nil {
		return err
	}
	old, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(old) }()
	if err := unix.Chdir(stageDir); err != nil {
		return err
	}
	err = unix.PivotRoot(".", ".") // the old root is then mounted over the new one
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		return errors.Join(errNoPivot, unix.Chdir("/"), unix.Unmount(stageDir, unix.MNT_DETACH))
	}
	if err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	if err := unix.Fchdir(old); err != nil {
		return err
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the old root: %w", err)
	}
	return unix.Chdir("/")
}

// kill kills the helper and everything in its process namespace. Only the first reason counts.
func (p *process) kill(why error) {
	p.mu.Lock()
	if p.why == nil {
		p.why = why
	}
	p.mu.Unlock()
	_ = p.proc.Kill() // it may have ended; Wait says how
}

// killed returns the reason of kill; nil if it was not called.
func (p *process) killed() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.why
}

func (p *process) close() {
	for _, f := range []*os.File{p.stdin, p.stdout, p.stderr} {
		if f != nil {
			_ = f.Close() // the other end is closed already
		}
	}
}

func signalOf(s *os.ProcessState) syscall.Signal {
	if status, ok := s.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return status.Signal()
	}
	return -1
}
