package confine_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/internal/confine/confinetest"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

// The tasks of these tests.
const (
	taskEcho       = "echo"   // answers with the request
	taskProbe      = "probe"  // tries what it must not be able to do
	taskMisuse     = "misuse" // does the misuse that the request names
	taskWait       = "wait"   // answers, then reads its first file to the end
	taskTree       = "tree"   // works in its directory
	beAParent      = "COPPICE_TEST_PARENT"
	beInAContainer = "COPPICE_TEST_CONTAINER"
	taskUnknown    = "unknown" // there is no such task
)

func TestMain(m *testing.M) {
	confine.Enter(
		confine.Task{Name: taskEcho, Run: echo}, confine.Task{Name: taskProbe, Run: probe}, confine.Task{Name: taskMisuse, Run: misuse},
		confine.Task{Name: taskWait, Run: wait}, confine.Task{Name: taskTree, Run: tree, Files: true},
	)
	confinetest.AllowWithoutRoot(m)
	if dir := os.Getenv(beAParent); dir != "" {
		parent(dir)
	}
	if dir := os.Getenv(beInAContainer); dir != "" {
		contained(dir)
	}
	testleak.Main(m)
}

func echo(c *confine.Child) error {
	var text string
	if err := c.Request(&text); err != nil {
		return err
	}
	for _, f := range c.Files {
		b, err := io.ReadAll(f)
		if err != nil {
			return err
		}
		text += string(b)
	}
	return c.Answer(text)
}

// attempt is one operation that a helper tried.
type attempt struct {
	What string
	Err  string // empty: it succeeded
}

// probe tries everything that a helper must not be able to do, and answers with the results.
func probe(c *confine.Child) error {
	var in struct{ Peer int }
	if err := c.Request(&in); err != nil {
		return err
	}
	try := func(what string, err error) {
		a := attempt{What: what}
		if err != nil {
			a.Err = err.Error()
		}
		_ = c.Answer(a)
	}
	raw := func(what string, trap uintptr, args ...uintptr) {
		var a [6]uintptr
		copy(a[:], args)
		if _, _, errno := unix.RawSyscall6(trap, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
			try(what, errno)
			return
		}
		try(what, nil)
	}
	for _, path := range []string{"/", "/etc/passwd", "/proc/self/status", "/proc/1/mem", "/dev/null", ".", "..", "../../etc"} {
		f, err := os.Open(path)
		if err == nil {
			_ = f.Close()
		}
		try("open "+path, err)
	}
	_, err := os.Create("/file")
	try("create a file", err)
	_, err = net.Dial("tcp", "127.0.0.1:80")
	try("dial", err)
	for what, domain := range map[string]int{"unix": unix.AF_UNIX, "inet": unix.AF_INET, "netlink": unix.AF_NETLINK, "vsock": unix.AF_VSOCK, "packet": unix.AF_PACKET} {
		_, err := unix.Socket(domain, unix.SOCK_STREAM, 0)
		try("socket "+what, err)
	}
	try("kill the caller", unix.Kill(in.Peer, 0))
	try("kill all", unix.Kill(-1, 0))
	try("ptrace", unix.PtraceAttach(in.Peer))
	raw("fork", unix.SYS_CLONE, uintptr(unix.SIGCHLD))
	raw("vfork", unix.SYS_CLONE, unix.CLONE_VM|unix.CLONE_VFORK|uintptr(unix.SIGCHLD))
	raw("clone3", unix.SYS_CLONE3, 0, 0)
	raw("execveat", unix.SYS_EXECVEAT, 0, 0, 0, 0, 0)
	raw("new namespaces", unix.SYS_UNSHARE, unix.CLONE_NEWUSER|unix.CLONE_NEWNS)
	raw("setns", unix.SYS_SETNS, 0, 0)
	raw("mount", unix.SYS_MOUNT, 0, 0, 0, 0, 0)
	raw("pivot_root", unix.SYS_PIVOT_ROOT, 0, 0)
	raw("chroot", unix.SYS_CHROOT, 0)
	raw("become root", unix.SYS_SETUID, 0)
	raw("capabilities", unix.SYS_CAPSET, 0, 0)
	raw("raise limits", unix.SYS_PRLIMIT64, 0, unix.RLIMIT_AS, 0, 0)
	raw("read the caller's memory", unix.SYS_PROCESS_VM_READV, uintptr(in.Peer), 0, 0, 0, 0, 0)
	raw("bpf", unix.SYS_BPF, 0, 0, 0)
	raw("keys", unix.SYS_KEYCTL, 0, 0, 0, 0, 0)
	raw("io_uring", unix.SYS_IO_URING_SETUP, 1, 0)
	raw("userfaultfd", unix.SYS_USERFAULTFD, 0)
	raw("memfd", unix.SYS_MEMFD_CREATE, 0, 0)
	raw("perf", unix.SYS_PERF_EVENT_OPEN, 0, 0, 0, 0, 0)
	raw("a pidfd", unix.SYS_PIDFD_OPEN, uintptr(in.Peer), 0)
	raw("send descriptors", unix.SYS_SENDMSG, 1, 0, 0)
	raw("another seccomp filter", unix.SYS_SECCOMP, 1, 0, 0)
	raw("dumpable", unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 1)
	raw("shared memory", unix.SYS_MMAP, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
	raw("memory with programs", unix.SYS_MMAP, 0, 1<<20, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
	raw("a signal to another process", unix.SYS_TGKILL, uintptr(in.Peer), uintptr(in.Peer), 0)
	var size [4]uint16
	raw("ioctl of a terminal", unix.SYS_IOCTL, 0, unix.TIOCGWINSZ, uintptr(unsafe.Pointer(&size)))
	raw("flags of a pipe", unix.SYS_FCNTL, 1, unix.F_SETFL, unix.O_NONBLOCK)
	raw("the size of a pipe", unix.SYS_FCNTL, 1, unix.F_SETPIPE_SZ, 1<<20)
	for _, f := range c.Files {
		raw("flags of a given file", unix.SYS_FCNTL, f.Fd(), unix.F_SETFL, unix.O_NONBLOCK|unix.O_NOATIME)
		raw("a lock of a given file", unix.SYS_FCNTL, f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
		_, err := f.Write([]byte("x"))
		try("write to a given file", err)
		try("change the mode of a given file", f.Chmod(0o777))
	}
	for _, fd := range []int{3 + len(c.Files), 20, 50} {
		_, err := unix.Read(fd, make([]byte, 1))
		try(fmt.Sprintf("read descriptor %d", fd), err)
	}
	for name := range map[string]bool{"PATH": true, "HOME": true} {
		if os.Getenv(name) != "" {
			try("variable "+name, nil)
		}
	}
	return nil
}

// misuse does something that a limit should stop.
func misuse(c *confine.Child) error {
	var what string
	if err := c.Request(&what); err != nil {
		return err
	}
	switch what {
	case "memory":
		var hold [][]byte
		for {
			b := make([]byte, 8<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			hold = append(hold, b)
			runtime.KeepAlive(hold)
		}
	case "small objects": // like a parser
		var hold []map[string]string
		for i := 0; ; i++ {
			hold = append(hold, map[string]string{strings.Repeat("x", 100): fmt.Sprint(i)})
			runtime.KeepAlive(hold)
		}
	case "cpu":
		for i := 0; ; i++ {
			runtime.KeepAlive(i)
		}
	case "hang":
		_, err := io.ReadAll(os.Stdin) // the caller keeps it open
		return err
	case "close and hang":
		if err := os.Stdout.Close(); err != nil {
			return err
		}
		_, err := io.ReadAll(os.Stdin) // the caller keeps it open
		return err
	case "panic":
		panic("on purpose")
	case "nil":
		return (*confine.Child)(nil).Request(nil)
	case "exit":
		os.Exit(7)
	case "signal":
		return unix.Kill(os.Getpid(), unix.SIGKILL)
	case "flood of answers":
		for {
			if err := c.Answer("x"); err != nil {
				return err
			}
		}
	case "long answer":
		return c.Answer(strings.Repeat("x", 2<<20))
	case "many bytes":
		for {
			if err := c.Answer(strings.Repeat("x", 60<<10)); err != nil {
				return err
			}
		}
	case "huge length":
		_, err := os.Stdout.Write([]byte{'a', 255, 255, 255, 255})
		return err
	case "no message":
		_, err := os.Stdout.Write(bytes.Repeat([]byte("nonsense"), 1000))
		return err
	case "unknown kind":
		_, err := os.Stdout.Write([]byte{'z', 0, 0, 0, 0})
		return err
	case "half a message":
		_, err := os.Stdout.Write([]byte{'a', 100, 0, 0, 0, 'x'})
		return err
	case "flood of errors":
		for {
			if _, err := os.Stderr.Write(make([]byte, 64<<10)); err != nil {
				return err
			}
		}
	case "threads":
		never := make(chan struct{})
		for range 200 {
			go func() {
				runtime.LockOSThread()
				<-never
			}()
		}
		for range never {
		}
	case "refuse":
		return core.Errorf(core.Invalid, core.CodeInvalidField, "it is refused: %s", strings.Repeat("y", 10_000))
	}
	return nil
}

func wait(c *confine.Child) error {
	if err := c.Answer("here"); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, c.Files[0])
	return err
}

// tree makes files in its directory, and tries to leave it.
func tree(c *confine.Child) error {
	root, err := os.OpenRoot(confine.TreeDir)
	if err != nil {
		return err
	}
	if err := root.WriteFile("made", []byte("made"), 0o600); err != nil {
		return err
	}
	if err := root.Chown("made", 1234, 5678); err != nil {
		return err
	}
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	at := int(dir.Fd())
	if err := unix.Mknodat(at, "zero", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))); err != nil {
		return err
	}
	try := func(what string, err error) error {
		a := attempt{What: what}
		if err != nil {
			a.Err = err.Error()
		}
		return c.Answer(a)
	}
	open := func(path string) error {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err == nil {
			err = f.Close()
		}
		return err
	}
	out := errors.Join(try("open a file of the host", open("/etc/passwd")), try("open a file above its root", open("../../../../etc/passwd")),
		try("open a device node", open(confine.TreeDir+"/zero")), try("leave the tree", open(confine.TreeDir+"/../etc/passwd")), try("a file beside the tree", os.WriteFile("/beside", nil, 0o600)))
	big, err := root.Create("big")
	if err != nil {
		return err
	}
	_, err = big.Write(make([]byte, 2<<20))
	return errors.Join(out, try("a file that is too big", err))
}

// parent starts a helper that waits, reports that, and waits itself, to be killed.
func parent(dir string) {
	r, _, err := os.Pipe()
	if err != nil {
		panic(err)
	}
	err = confine.Run(context.Background(), spec(taskWait, nil, r), func(json.RawMessage) error {
		return os.WriteFile(dir+"/started", []byte(fmt.Sprint(os.Getpid())), 0o600)
	})
	fmt.Fprintln(os.Stderr, "the helper ended:", err)
	os.Exit(1)
}

var limits = confine.Limits{Memory: 256 << 20, CPU: 20 * time.Second, Time: time.Minute, Frame: 64 << 10, Answers: 1000, Bytes: 1 << 20}

func spec(task string, request any, files ...*os.File) confine.Spec {
	return confine.Spec{Task: task, Limits: limits, Request: request, Files: files}
}

// contained is a program under the filter of a container engine, which forbids pivot_root. It reports what its helpers
// could do.
func contained(dir string) {
	err := seccomp.LoadFilter(seccomp.Filter{NoNewPrivs: true, Flag: seccomp.FilterFlagTSync, Policy: seccomp.Policy{
		DefaultAction: seccomp.ActionAllow, Syscalls: []seccomp.SyscallGroup{{Action: seccomp.ActionErrno, Names: []string{"pivot_root"}}},
	}})
	var got []attempt
	if err == nil {
		err = confine.Run(context.Background(), spec(taskProbe, map[string]int{"Peer": os.Getpid()}), collect(&got))
	}
	for _, a := range got {
		if a.Err == "" {
			err = errors.Join(err, fmt.Errorf("a helper can: %s", a.What))
		}
	}
	if len(got) < 40 {
		err = errors.Join(err, fmt.Errorf("only %d attempts were made", len(got)))
	}
	s := spec(taskTree, nil)
	s.Dir, s.Caps, s.Limits.FileBytes = dir, []uint8{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_MKNOD}, 1<<20
	got = nil
	err = errors.Join(err, confine.Run(context.Background(), s, collect(&got)))
	for _, a := range got {
		if a.Err == "" {
			err = errors.Join(err, fmt.Errorf("a helper with a directory can: %s", a.What))
		}
	}
	if b, readErr := os.ReadFile(dir + "/made"); len(got) < 6 || string(b) != "made" {
		err = errors.Join(err, readErr, fmt.Errorf("a helper with a directory made %q and %d attempts", b, len(got)))
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}
