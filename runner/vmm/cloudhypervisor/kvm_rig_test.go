//go:build kvm

package cloudhypervisor

// What is in this file and in kvm_suite_test.go needs a cloud-hypervisor binary and a KVM that works: `make test-kvm` runs it in a
// machine of its own. These are the facts that the driver stands on, looked at on the binary itself.

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
)

const (
	rigUID   = 64003
	patience = time.Minute // everything is emulated, twice
)

// rig is what these tests have in common.
type rig struct {
	*Driver
	dir   string
	bases *memory.BaseStore
	guest testvm.Machine
	mib   int
	vcpus int
}

func newRig(t *testing.T, mib int) *rig {
	t.Helper()
	path := os.Getenv("COPPICE_CLOUD_HYPERVISOR")
	if path == "" {
		t.Fatal("COPPICE_CLOUD_HYPERVISOR names no binary")
	}
	dir, err := os.MkdirTemp("", "ch") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	r := &rig{Driver: New(Config{Binary: path}), dir: dir, guest: testvm.Guest(t), mib: mib, vcpus: 1}
	fp, err := r.Fingerprint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("fingerprint %+v, Landlock %d, written pages by %s", fp, landlockVersion(), memory.ScanMethod())
	if r.bases, err = memory.NewBaseStore(filepath.Join(dir, "bases"), false); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) open(t *testing.T, path string, flag int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flag, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// disk makes an empty disk, or one like another.
func (r *rig) disk(t *testing.T, like *os.File) *os.File {
	t.Helper()
	f := r.open(t, filepath.Join(r.dir, core.Short(core.NewID[core.SandboxID]())), os.O_RDWR|os.O_CREATE|os.O_EXCL)
	b := make([]byte, 1<<20)
	if like != nil {
		if _, err := like.ReadAt(b, 0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return f
}

// vm is a machine with its files.
type vm struct {
	*machine
	r    *rig
	base *memory.Base
	disk *os.File
}

func (r *rig) spawn(t *testing.T, base *memory.Base, disk *os.File, restore bool) *vm {
	t.Helper()
	id := core.NewID[core.SandboxID]()
	dir := filepath.Join(r.dir, core.Short(id))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	own := r.disk(t, disk)
	spec := vmm.Spec{
		ID: id, Cluster: "kvmtest", Dir: dir, VCPUs: r.vcpus, MemoryMiB: r.mib, Base: base.File(), MAC: "02:00:00:00:00:01", UID: rigUID, GID: rigUID, Restore: restore,
		Disks: []vmm.Disk{{File: r.disk(t, nil), ReadOnly: true, Serial: "root"}, {File: own, Serial: "own"}},
	}
	if !restore {
		spec.Kernel, spec.Initrd, spec.CommandLine = r.open(t, r.guest.Kernel, os.O_RDONLY), r.open(t, r.guest.Initrd, os.O_RDONLY), r.guest.CommandLine
	}
	m, err := r.Spawn(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	v := &vm{m.(*machine), r, base, own}
	t.Cleanup(func() { v.kill(t) })
	return v
}

func (v *vm) kill(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	if err := v.Kill(ctx); err != nil {
		t.Errorf("kill: %v", err)
	}
}

// boot boots a machine and waits for its program.
func (r *rig) boot(t *testing.T) *vm {
	t.Helper()
	zero, err := r.bases.Zero(int64(r.mib) << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = zero.Close() })
	v := r.spawn(t, zero, nil, false)
	start := time.Now()
	v.must(t, "boot", v.Boot)
	v.ask(t, "count")
	t.Logf("booted to the first answer in %s", time.Since(start).Round(time.Millisecond))
	return v
}

func (v *vm) must(t *testing.T, what string, do func(context.Context) error) time.Duration {
	t.Helper()
	start := time.Now()
	if err := do(t.Context()); err != nil {
		t.Fatalf("%s: %v; the console ends with %q", what, err, tail(v.Console()))
	}
	return time.Since(start)
}

func tail(s string) string { return s[max(0, len(s)-600):] }

// line is a connection to the program that was greeted.
type line struct {
	net.Conn
	r *bufio.Reader
}

func (v *vm) connect(t *testing.T) *line {
	t.Helper()
	begin := time.Now()
	for tries := 1; time.Since(begin) < patience; tries++ {
		c, err := v.DialAgent(t.Context())
		if err != nil {
			t.Fatalf("%v; the console ends with %q", err, tail(v.Console()))
		}
		l := &line{c, bufio.NewReader(c)}
		if got, err := l.ask(5*time.Second, "hi there"); err == nil && got == "hi there" {
			t.Cleanup(func() { _ = l.Close() })
			if tries > 1 {
				t.Logf("connected at the try number %d, after %s", tries, time.Since(begin).Round(time.Millisecond))
			}
			return l
		}
		_ = l.Close()
		select {
		case <-v.Done():
			t.Fatalf("the machine has ended: %+v", v.Exit())
		case <-time.After(20 * time.Millisecond): // a guest that refuses has not started yet, and nothing says when it has
		}
	}
	t.Fatalf("the guest does not answer; the console ends with %q", tail(v.Console()))
	return nil
}

func (l *line) ask(limit time.Duration, request string) (string, error) {
	if err := l.SetDeadline(time.Now().Add(limit)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(l, request); err != nil {
		return "", err
	}
	answer, err := l.r.ReadString('\n')
	return strings.TrimSpace(answer), err
}

func (v *vm) ask(t *testing.T, request string) string {
	t.Helper()
	l := v.connect(t)
	defer l.Close()
	answer, err := l.ask(patience, request)
	if err != nil {
		t.Fatalf("%s: %v; the console ends with %q", request, err, tail(v.Console()))
	}
	return answer
}

func (v *vm) want(t *testing.T, answer, request string) {
	t.Helper()
	if got := v.ask(t, request); got != answer {
		t.Errorf("asked %q the guest answers %q, want %q", request, got, answer)
	}
}

// snapshot is a capture.
type snapshot struct {
	base  *memory.Base
	state []byte
	delta *memory.Delta
	disk  *os.File
}

// capture captures a machine, which stays paused if so wished.
func (v *vm) capture(t *testing.T, stay bool) *snapshot {
	t.Helper()
	region, err := v.Memory()
	if err != nil {
		t.Fatal(err)
	}
	c, err := memory.Prepare(region)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	paused := v.must(t, "pause", v.Pause)
	path := filepath.Join(v.r.dir, core.Short(core.NewID[core.SandboxID]()))
	to := v.r.open(t, path, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	saved := v.must(t, "save", func(ctx context.Context) error { return v.SaveState(ctx, to) })
	start := time.Now()
	if err := c.Copy(); err != nil {
		t.Fatal(err)
	}
	copied := time.Since(start)
	s := &snapshot{base: v.base, delta: c.Delta(), disk: v.r.disk(t, v.disk)}
	var resumed time.Duration
	if !stay {
		resumed = v.must(t, "resume", v.Resume)
	}
	if s.state, err = os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
	t.Logf("captured: pause %s, state %s (%d bytes), memory %s (%d KiB), resume %s", paused, saved, len(s.state), copied, c.Bytes()>>10, resumed)
	return s
}

// restore starts a machine that is the snapshot, paused.
func (r *rig) restore(t *testing.T, s *snapshot) *vm {
	t.Helper()
	start := time.Now()
	v := r.spawn(t, s.base, s.disk, true)
	spawned := time.Since(start)
	state := r.open(t, filepath.Join(r.dir, core.Short(core.NewID[core.SandboxID]())), os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if _, err := state.Write(s.state); err != nil {
		t.Fatal(err)
	}
	spec := vmm.RestoreSpec{State: state}
	if s.delta != nil {
		spec.Inject = func(_ context.Context, region memory.Region) error { return s.delta.Inject(region) }
	}
	restored := v.must(t, "restore", func(ctx context.Context) error { return v.Restore(ctx, spec) })
	t.Logf("restored: start %s, restore with its delta %s", spawned, restored)
	return v
}

func (r *rig) fork(t *testing.T, s *snapshot) *vm {
	t.Helper()
	v := r.restore(t, s)
	v.must(t, "resume", v.Resume)
	return v
}

// rebased is the snapshot on a base that has its delta.
func (r *rig) rebased(t *testing.T, s *snapshot) *snapshot {
	t.Helper()
	base, err := r.bases.Rebase(s.base, s.delta)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = base.Close() })
	return &snapshot{base: base, state: s.state, disk: s.disk}
}

// ram reads the memory of a paused machine.
func (v *vm) ram(t *testing.T) []byte {
	t.Helper()
	region, err := v.Memory()
	if err != nil {
		t.Fatal(err)
	}
	mem := v.r.open(t, fmt.Sprintf("/proc/%d/mem", region.PID), os.O_RDONLY)
	out := make([]byte, region.Size)
	for _, p := range region.Parts {
		if _, err := mem.ReadAt(out[p.Offset:p.Offset+p.Size], int64(p.Addr)); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// anonymous is how much of the RAM is private to the VMM, by the kernel's own account.
func (v *vm) anonymous(t *testing.T) (kib int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", v.Proc.PID))
	if err != nil {
		t.Fatal(err)
	}
	inode, counts := strconv.FormatUint(v.Handle().BaseInode, 10), false
	for l := range strings.Lines(string(b)) {
		f := strings.Fields(l)
		if len(f) >= 5 && strings.Contains(f[0], "-") && !strings.HasSuffix(f[0], ":") {
			counts = f[4] == inode
		}
		if counts && len(f) == 3 && f[0] == "Anonymous:" {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			kib += n
		}
	}
	return kib
}
