//go:build kvm

package cloudhypervisor

// What is in this file and in kvm_suite_test.go needs a cloud-hypervisor binary and a KVM that works: `make test-kvm` runs it in a
// machine of its own. These are the facts that the driver stands on, looked at on the binary itself.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/testvm"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
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
		time.Sleep(20 * time.Millisecond)
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

// TestRealPlaceholder: a snapshot into a directory that has a memory-ranges fails with one chain of errors, after both JSON files are whole,
// and leaves the machine paused and able to go on.
func TestRealPlaceholder(t *testing.T) { //nolint:paralleltest // its machines take both CPUs
	r := newRig(t, 128)
	v := r.boot(t)
	v.want(t, "1", "inc")
	v.must(t, "pause", v.Pause)
	own := filepath.Join(v.Handle().Dir, ownDir)
	if err := os.WriteFile(filepath.Join(own, memoryFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	err := v.api.put(t.Context(), "vm.snapshot", map[string]string{"destination_url": "file://" + fdPath(ownFD)})
	t.Logf("vm.snapshot took %s", time.Since(start))
	refused, ok := errors.AsType[*refusal](err)
	if !ok {
		t.Fatalf("got %v", err)
	}
	t.Logf("status %d, chain %q", refused.status, refused.chain)
	if diff := cmp.Diff(chain("File exists (os error 17)", memoryFile), refused.chain); diff != "" || refused.status != 500 {
		t.Errorf("another chain of errors (-want +got):\n%s", diff)
	}
	for _, name := range []string{configFile, stateFile} {
		b, err := os.ReadFile(filepath.Join(own, name))
		if err != nil || !json.Valid(b) {
			t.Errorf("%s is not whole: %d bytes, %v", name, len(b), err)
		}
		t.Logf("%s has %d bytes", name, len(b))
	}
	if info, err := os.Stat(filepath.Join(own, memoryFile)); err != nil || info.Size() != 0 {
		t.Errorf("memory-ranges was written: %v, %v", info, err)
	}
	if now, err := v.ask2(t); err != nil || now != vmmproc.Paused {
		t.Errorf("the machine is %q (%v), want it paused", now, err)
	}
	v.must(t, "resume", v.Resume)
	v.want(t, "2", "inc")

	// Each of the others in the way is a failure that says which.
	for _, name := range []string{configFile, stateFile} {
		v.must(t, "pause", v.Pause)
		for _, n := range []string{configFile, stateFile, memoryFile} {
			_ = os.Remove(filepath.Join(own, n))
		}
		if err := os.WriteFile(filepath.Join(own, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		err := v.api.put(t.Context(), "vm.snapshot", map[string]string{"destination_url": "file://" + fdPath(ownFD)})
		t.Logf("with a %s there: %v", name, err)
		if err == nil || metPlaceholder(err) {
			t.Errorf("with a %s there: %v", name, err)
		}
		v.must(t, "resume", v.Resume)
	}
	v.must(t, "pause", v.Pause)
	to := r.open(t, filepath.Join(r.dir, "state"), os.O_WRONLY|os.O_CREATE)
	v.must(t, "save", func(ctx context.Context) error { return v.SaveState(ctx, to) })
	v.must(t, "resume", v.Resume)
	v.want(t, "3", "inc")
}

// ask2 asks the VMM for its state.
func (v *vm) ask2(t *testing.T) (vmmproc.State, error) {
	t.Helper()
	return v.machine.ask(t.Context())
}

// TestRealConfinement looks at the process from outside.
func TestRealConfinement(t *testing.T) { //nolint:paralleltest // as above
	r := newRig(t, 128)
	v := r.boot(t)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", v.Proc.PID))
	if err != nil {
		t.Fatal(err)
	}
	status := string(b)
	for _, want := range []string{`(?m)^Uid:\s+64003\s+64003\s+64003\s+64003$`, `(?m)^CapEff:\s+0+$`, `(?m)^CapBnd:\s+0+$`, `(?m)^NoNewPrivs:\s+1$`, `(?m)^CoreDumping:\s+0$`} {
		if !regexp.MustCompile(want).MatchString(status) {
			t.Errorf("the status has no %s:\n%s", want, status)
		}
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", v.Proc.PID))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range threads {
		s, err := os.ReadFile(filepath.Join(dir, "status"))
		if err != nil {
			continue // it has ended
		}
		name, _ := os.ReadFile(filepath.Join(dir, "comm"))
		filtered := strings.Contains(string(s), "Seccomp:\t2")
		t.Logf("thread %s: seccomp filter %t", strings.TrimSpace(string(name)), filtered)
		if main := filepath.Base(dir) == strconv.Itoa(v.Proc.PID); !filtered && !main {
			t.Errorf("the thread %s runs without a filter", name)
		}
	}
}

// TestRealOracle: a restore through the seam gives the memory that cloud-hypervisor's own restore of the same snapshot gives, and is as
// good a guest; right after it nothing of the base is private.
func TestRealOracle(t *testing.T) { //nolint:paralleltest // as above
	r := newRig(t, 128)
	v := r.boot(t)
	v.want(t, "1", "inc")
	v.ask(t, "fill 8")
	first := r.rebased(t, v.capture(t, false))
	v.kill(t)

	clean := r.restore(t, first)
	kib := clean.anonymous(t)
	t.Logf("private right after a restore without a delta: %d KiB of %d MiB", kib, r.mib)
	if kib > 256 {
		t.Errorf("%d KiB are private right after a restore", kib)
	}
	clean.must(t, "resume", clean.Resume)
	clean.want(t, "2", "inc")
	clean.ask(t, "fill 4")
	sum := clean.ask(t, "sum")
	s := clean.capture(t, true)
	truth := clean.ram(t)

	ours := r.restore(t, s)
	delta := int(s.delta.Bytes() >> 10)
	kib = ours.anonymous(t)
	t.Logf("private right after a restore with a delta of %d KiB: %d KiB", delta, kib)
	if kib < delta || kib > delta+256 {
		t.Errorf("%d KiB are private after a delta of %d", kib, delta)
	}
	theirs := r.plain(t, s, truth)
	a := differ(t, "our restore and the parent", truth, ours.ram(t))
	b := differ(t, "cloud-hypervisor's own restore and the parent", truth, theirs.ram(t))
	c := differ(t, "our restore and cloud-hypervisor's own", ours.ram(t), theirs.ram(t))
	// KVM itself writes the wall clock into the page that the guest has named for it, when that register is restored.
	const wallClock = 12
	if !slices.Equal(a, b) || len(a) > 1 || len(c) > 1 || len(c) == 1 && !slices.Equal(a, c) || len(a) == 1 && bytesDiffer(truth, ours.ram(t)) > wallClock {
		t.Errorf("the pages %v, %v and %v differ, want at most the one with the wall clock", a, b, c)
	}
	for name, m := range map[string]*vm{"ours": ours, "cloud-hypervisor's own": theirs.vm} {
		m.must(t, "resume "+name, m.Resume)
		if got := m.ask(t, "sum"); got != sum {
			t.Errorf("%s: the checksum is %s, the parent's was %s", name, got, sum)
		}
		m.want(t, "3", "inc")
	}
}

// differ compares memory, page by page.
func differ(t *testing.T, what string, a, b []byte) (pages []int) {
	t.Helper()
	for at := 0; at < len(a); at += memory.PageSize {
		if !bytes.Equal(a[at:at+memory.PageSize], b[at:at+memory.PageSize]) {
			pages = append(pages, at/memory.PageSize)
		}
	}
	t.Logf("%s: %d of %d pages differ %v", what, len(pages), len(a)/memory.PageSize, pages[:min(len(pages), 16)])
	return pages
}

func bytesDiffer(a, b []byte) (n int) {
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}

// plainVM is a machine that cloud-hypervisor has restored as its documentation says, from a whole image of memory.
type plainVM struct {
	*vm
	addr uint64
}

// plain makes the directory of an ordinary snapshot and restores it.
func (r *rig) plain(t *testing.T, s *snapshot, ram []byte) *plainVM {
	t.Helper()
	shell := r.spawn(t, s.base, s.disk, true) // for its directories and descriptors
	dir := filepath.Join(shell.Handle().Dir, restoreDir)
	b, err := os.ReadFile(filepath.Join(dir, configFile))
	if err != nil {
		t.Fatal(err)
	}
	var conf map[string]any
	if err := json.Unmarshal(b, &conf); err != nil {
		t.Fatal(err)
	}
	delete(conf["memory"].(map[string]any)["zones"].([]any)[0].(map[string]any), "file")
	if b, err = json.Marshal(conf); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, memoryFile)); err != nil { // a link to a descriptor of the VMM's
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{configFile: b, stateFile: s.state, memoryFile: ram} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now()
	if err := shell.api.put(t.Context(), "vm.restore", map[string]any{"source_url": "file://" + fdPath(restoreFD)}); err != nil {
		t.Fatal(err)
	}
	t.Logf("cloud-hypervisor's own restore of %d MiB took %s", r.mib, time.Since(start))
	shell.SetState(vmmproc.Paused)
	if err := shell.follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	return &plainVM{vm: shell, addr: anonymousMapping(t, shell.Proc.PID, int64(r.mib)<<20)}
}

func (p *plainVM) ram(t *testing.T) []byte {
	t.Helper()
	mem := p.r.open(t, fmt.Sprintf("/proc/%d/mem", p.Proc.PID), os.O_RDONLY)
	out := make([]byte, int64(p.r.mib)<<20)
	if _, err := mem.ReadAt(out, int64(p.addr)); err != nil {
		t.Fatal(err)
	}
	return out
}

// anonymousMapping finds the mapping of no file that has a size.
func anonymousMapping(t *testing.T, pid int, size int64) uint64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(b)) {
		f := strings.Fields(l)
		low, high, _ := strings.Cut(f[0], "-")
		start, _ := strconv.ParseUint(low, 16, 64)
		end, _ := strconv.ParseUint(high, 16, 64)
		if len(f) == 5 && f[4] == "0" && int64(end-start) == size {
			return start
		}
	}
	t.Fatalf("process %d has no mapping of %d bytes:\n%s", pid, size, b)
	return 0
}

// TestRealLarge has RAM on both sides of the hole below 4 GiB, and three generations of it.
func TestRealLarge(t *testing.T) { //nolint:paralleltest // as above
	const mib = 3584
	r := newRig(t, mib)
	v := r.boot(t)
	region, err := v.Memory()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("RAM is mapped as %+v", region.Parts)
	if len(region.Parts) < 2 {
		t.Log("the parts lie side by side")
	}
	var generations []*snapshot
	var sums []string
	for i := range 3 {
		v.want(t, strconv.Itoa(i+1), "inc")
		v.ask(t, "fill 3")
		sums = append(sums, v.ask(t, "sum"))
		generations = append(generations, v.capture(t, false))
		v.kill(t)
		v = r.fork(t, generations[i])
	}
	high := false
	for _, e := range generations[2].delta.Extents {
		high = high || e.Offset >= 3<<30
	}
	if !high {
		t.Error("nothing was written above 3 GiB: the test proves nothing of it")
	}
	for i, s := range generations {
		m := r.fork(t, s)
		m.want(t, strconv.Itoa(i+1), "count")
		m.want(t, sums[i], "sum")
		m.kill(t)
	}
}

// TestRealConnections has connections to the guest open across a capture: the parent's go on, the clone's are reset, and a new one to the
// clone is answered.
func TestRealConnections(t *testing.T) { //nolint:paralleltest // as above
	r := newRig(t, 128)
	v := r.boot(t)
	var open []*line
	for range 8 {
		open = append(open, v.connect(t))
	}
	s := v.capture(t, false)
	for i, l := range open {
		if got, err := l.ask(patience, "hi again"); err != nil || got != "hi again" {
			t.Errorf("connection %d of the parent: %q, %v", i, got, err)
		}
	}
	child := r.restore(t, s)
	early, err := child.DialAgent(t.Context()) // as a runner does: before the resume
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	child.must(t, "resume", child.Resume)
	l := &line{early, bufio.NewReader(early)}
	if got, err := l.ask(patience, "hi early"); err != nil || got != "hi early" {
		t.Errorf("the connection from before the resume: %q, %v", got, err)
	}
	t.Logf("a connection from before the resume was answered %s after it", time.Since(begin))
	_ = l.Close()
	child.want(t, "1", "inc")
	for i := range 20 {
		begin := time.Now()
		if got := child.ask(t, "hi "+strconv.Itoa(i)); got != "hi "+strconv.Itoa(i) {
			t.Errorf("connection %d of the child: %q", i, got)
		}
		if took := time.Since(begin); took > time.Second {
			t.Logf("connection %d of the child took %s", i, took)
		}
	}
	t.Logf("the child's console: %q", tail(child.Console()))
}

// TestRealDiskAgrees captures a guest that writes to its disk without end, and wants of every clone that disk and memory are of one instant: the
// guest counts in its memory, then writes the count to its disk.
func TestRealDiskAgrees(t *testing.T) { //nolint:paralleltest // as above
	r := newRig(t, 128)
	v := r.boot(t)
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		stopped <- func() error {
			c, err := v.DialAgent(t.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			l := &line{c, bufio.NewReader(c)}
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				n, err := l.ask(patience, "inc")
				if err == nil {
					_, err = l.ask(patience, "write 1 0 "+n)
				}
				if err != nil {
					return err
				}
			}
		}()
	}()
	var captured []*snapshot
	for range 8 {
		time.Sleep(200 * time.Millisecond)
		captured = append(captured, v.capture(t, false))
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	v.kill(t)
	for i, s := range captured {
		m := r.fork(t, s)
		count, err1 := strconv.Atoi(m.ask(t, "count"))
		disk, err2 := strconv.Atoi(m.ask(t, "read 1 0"))
		if errors.Join(err1, err2) != nil || count == 0 || disk != count && disk != count-1 {
			t.Errorf("capture %d: the guest has counted to %d and its disk has %d (%v, %v)", i, count, disk, err1, err2)
		}
		t.Logf("capture %d: counted to %d, on the disk %d", i, count, disk)
		m.kill(t)
	}
}

// TestRealManyForks grows sixteen at once from one snapshot, which all have its memory and nothing of each other's.
func TestRealManyForks(t *testing.T) { //nolint:paralleltest // as above
	const n = 16
	r := newRig(t, 128)
	v := r.boot(t)
	v.want(t, "1", "inc")
	v.ask(t, "fill 2")
	sum := v.ask(t, "sum")
	s := v.capture(t, false)
	v.kill(t)
	shells := make([]*vm, n)
	for i := range shells {
		shells[i] = r.spawn(t, s.base, s.disk, true)
	}
	state := r.open(t, filepath.Join(r.dir, "many"), os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if _, err := state.Write(s.state); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	took, errs := make([]time.Duration, n), make([]error, n)
	for i, m := range shells {
		wg.Go(func() {
			start := time.Now()
			errs[i] = m.Restore(t.Context(), vmm.RestoreSpec{State: state, Inject: func(_ context.Context, region memory.Region) error { return s.delta.Inject(region) }})
			if errs[i] == nil {
				errs[i] = m.Resume(t.Context())
			}
			took[i] = time.Since(start)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	slices.Sort(took)
	t.Logf("sixteen restores at once, to their resume: %s to %s", took[0], took[n-1])
	for i, m := range shells {
		m.want(t, sum, "sum")
		for k := range i + 1 {
			m.want(t, strconv.Itoa(k+2), "inc")
		}
	}
	for i, m := range shells {
		m.want(t, strconv.Itoa(i+2), "count")
	}
}

// TestRealKilled looks at what a VMM leaves that is killed: nothing but files of its own directories, and what it had can be had again.
func TestRealKilled(t *testing.T) { //nolint:paralleltest // as above
	r := newRig(t, 128)
	v := r.boot(t)
	s := v.capture(t, false)
	process, err := os.FindProcess(v.Proc.PID)
	if err != nil {
		t.Fatal(err)
	}
	if err := process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-v.Done()
	var left []string
	if err := filepath.WalkDir(v.Handle().Dir, func(path string, _ os.DirEntry, err error) error {
		left = append(left, strings.TrimPrefix(path, v.Handle().Dir))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("left: %q; exit %+v", left, v.Exit())
	if out, err := exec.CommandContext(t.Context(), "grep", "-c", filepath.Base(v.Handle().Dir), "/proc/net/unix").Output(); err == nil {
		t.Logf("sockets of it that the kernel knows: %s", out)
	}
	child := r.fork(t, s) // the disk's lock went with the process
	child.want(t, "1", "inc")
	if n, err := r.Reap(t.Context(), "kvmtest", []vmm.Handle{child.Handle()}); err != nil || n != 0 {
		t.Errorf("Reap found %d, %v", n, err)
	}
}

// TestRealCPUs measures what the number of vCPUs costs.
func TestRealCPUs(t *testing.T) { //nolint:paralleltest // as above
	for _, n := range []int{1, 2, 4} {
		r := newRig(t, 128)
		r.vcpus = n
		t.Logf("%d vCPUs", n)
		v := r.boot(t)
		for range 3 {
			v.capture(t, false)
		}
		r.fork(t, v.capture(t, false)).want(t, "0", "count")
		v.kill(t)
	}
}

// TestRealRefusesOtherState: a state that is damaged, or of another shape, ends in an error that says so, and no machine.
func TestRealRefusesOtherState(t *testing.T) { //nolint:paralleltest // as above
	r := newRig(t, 128)
	v := r.boot(t)
	s := v.capture(t, false)
	v.kill(t)
	for name, state := range map[string][]byte{
		"without CPUs":    bytes.Replace(s.state, []byte(`"cpu-manager"`), []byte(`"cpu-menager"`), 1),
		"of another zone": bytes.Replace(s.state, []byte(`zone_id\":\"mem0`), []byte(`zone_id\":\"mem9`), 1),
	} {
		if bytes.Equal(state, s.state) {
			t.Errorf("%s: the state has nothing to change", name)
		}
		m := r.spawn(t, s.base, s.disk, true)
		f := r.open(t, filepath.Join(r.dir, core.Short(core.NewID[core.SandboxID]())), os.O_RDWR|os.O_CREATE|os.O_EXCL)
		if _, err := io.Copy(f, bytes.NewReader(state)); err != nil {
			t.Fatal(err)
		}
		err := m.Restore(t.Context(), vmm.RestoreSpec{State: f, Inject: func(_ context.Context, region memory.Region) error { return s.delta.Inject(region) }})
		t.Logf("%s: %v", name, err)
		if err == nil {
			t.Errorf("%s: it was restored", name)
		}
	}
}
