//go:build kvm

package cloudhypervisor

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
	"github.com/coppice-dev/coppice/runner/vmm/vmmtest"
)

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
	vmmtest.CheckJail(t, vmmtest.Jailed{
		PID: v.Proc.PID, UID: rigUID,
		Visible: []string{"/lib", "/usr/lib", "/etc/ld.so.cache", "/dev/null", "/dev/urandom", "/dev/kvm", v.program(t)},
		Hidden:  []string{v.Handle().Dir},
	})
}

// program is the file that the VMM runs.
func (v *vm) program(t *testing.T) string {
	t.Helper()
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", v.Proc.PID))
	if err != nil {
		t.Fatal(err)
	}
	return path
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
	stop, stopped, written := make(chan struct{}), make(chan error, 1), make(chan struct{})
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
				case written <- struct{}{}:
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
		for range 3 {
			select {
			case <-written: // and the guest is in the middle of the next
			case err := <-stopped:
				t.Fatal(err)
			}
		}
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

// TestRealManyForks forks sixteen at once from one snapshot, which all have its memory and nothing of each other's.
func TestRealManyForks(t *testing.T) { //nolint:paralleltest // as above
	const n = 16
	r := newRig(t, 128)
	booted := r.boot(t)
	template := r.rebased(t, booted.capture(t, false)) // as a runner does: else each carried all that a boot writes
	booted.kill(t)
	v := r.fork(t, template)
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
