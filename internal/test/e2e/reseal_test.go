package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// stream is what guestprobe's spin and draw say: 8-byte values of getrandom, and when each was drawn.
type stream struct {
	Count  uint64   `json:"count"`
	Thaw   uint64   `json:"thaw"`
	First  uint64   `json:"first"`
	TimeNS []int64  `json:"time_ns"`
	Values []uint64 `json:"values"`
}

const (
	// draws is how many values each process draws after the thaw.
	draws = 4096
	// room bounds how many a spinning process can draw in all; at some 10,000 a second under TCG, 20 seconds' worth.
	room = 1 << 18
	// oldEnough: a younger kernel reseeds itself every max(1 s, uptime/2), and would heal before anybody looks. From here on
	// it does so once a minute.
	oldEnough = 120
	// window is how long after the thaw the unsealed fork is judged: the minute's reseed heals it some time later.
	window = 2 * time.Second
)

// sample is what one process drew after its thaw.
type sample struct {
	name   string
	values map[uint64]time.Duration // when, from the first one on
}

// from takes the turns of a stream from a turn on.
func (s stream) from(name string, turn uint64) sample {
	out := sample{name: name, values: map[uint64]time.Duration{}}
	for i, v := range s.Values {
		if s.First+uint64(i) >= turn {
			if len(out.values) == draws {
				break
			}
			out.values[v] = time.Duration(s.TimeNS[i] - s.TimeNS[0])
		}
	}
	return out
}

// overlap counts the values that two samples share within a time of their beginnings, and the size of the smaller one.
func overlap(a, b sample, within time.Duration) (shared, of int) {
	count := func(s sample) (n int) {
		for _, at := range s.values {
			if at <= within {
				n++
			}
		}
		return n
	}
	for v, at := range a.values {
		if bt, ok := b.values[v]; ok && at <= within && bt <= within {
			shared++
		}
	}
	return shared, min(count(a), count(b))
}

// checkDistinct is the assertion: no two samples share a value. It returns a sentence per pair that does. TestUnsealedFork
// shows that it fails where it must.
func checkDistinct(samples []sample) (faults []string) {
	for i, a := range samples {
		if len(a.values) < draws {
			faults = append(faults, fmt.Sprintf("%s drew %d values, want %d different ones", a.name, len(a.values), draws))
		}
		for _, b := range samples[:i] {
			if shared, of := overlap(a, b, time.Hour); shared > 0 {
				faults = append(faults, fmt.Sprintf("%s and %s share %d of %d values", b.name, a.name, shared, of))
			}
		}
	}
	return faults
}

// spinner is a process that was started before a checkpoint and draws without end.
type spinner struct {
	nonce []byte
	out   string
	pid   string
}

func spin(t *testing.T, s *stack, ws coppice.WorkspaceID) spinner {
	t.Helper()
	p := spinner{nonce: make([]byte, 32), out: "/root/stream"}
	if _, err := rand.Read(p.nonce); err != nil {
		t.Fatal(err)
	}
	p.out += hex.EncodeToString(p.nonce[:4])
	begin(t, s, ws, "spin", hex.EncodeToString(p.nonce), fmt.Sprint(room), fmt.Sprint(draws), p.out)
	p.pid = strings.TrimSpace(execute(t, s, ws, probePath, "await", p.out+".pid"))
	return p
}

// countIn reads the number of the turn in which the spinner was when a checkpoint was taken, out of the captured memory.
func (p spinner) countIn(t *testing.T, s *stack, ckpt coppice.CheckpointID) uint64 {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(s.data, "*", "checkpoints", ckpt, "memory.delta"))
	if more, err2 := filepath.Glob(filepath.Join(s.data, "*", "*", "checkpoints", ckpt, "memory.delta")); err == nil && err2 == nil {
		found = append(found, more...)
	}
	if err != nil || len(found) != 1 {
		t.Fatalf("the checkpoint's memory is in %q, %v", found, err)
	}
	b, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	mark := make([]byte, len(p.nonce))
	for i, c := range p.nonce {
		mark[i] = ^c
	}
	at := bytes.Index(b, mark)
	if at < 0 || bytes.Contains(b[at+1:], mark) {
		t.Fatalf("the process's memory is not exactly once in the checkpoint's (at %d of %d)", at, len(b))
	}
	return binary.NativeEndian.Uint64(b[at+len(mark):])
}

// after gathers what the spinners of forks drew, which end by themselves.
func (p spinner) after(t *testing.T, s *stack, children []coppice.ForkChild) []stream {
	t.Helper()
	return gather[stream](t, s, children, "await", p.out)
}

// here makes the spinner of the parent write what it has drawn from the turn before the captured one on, with which it ends, and
// returns that.
func (p spinner) here(t *testing.T, s *stack, ws coppice.WorkspaceID, captured uint64) stream {
	t.Helper()
	shell(t, s, ws, fmt.Sprintf("echo %d > %s.from; kill -USR1 %s", captured-1, p.out, p.pid))
	return ask[stream](t, s, ws, "await", p.out)
}

// grownOld is a workspace whose kernel has run for long enough. It is one of the first that this binary makes, so most of the wait is
// over when it is asked for.
func grownOld(t *testing.T, s *stack) coppice.WorkspaceID {
	t.Helper()
	shared.mu.Lock()
	ws := shared.aged
	shared.mu.Unlock()
	waitUptime(t, s, ws)
	return ws
}

func waitUptime(t *testing.T, s *stack, ws coppice.WorkspaceID) {
	t.Helper()
	began := time.Now()
	at := ask[float64](t, s, ws, "uptime", fmt.Sprint(oldEnough))
	t.Logf("the guest's uptime is %.0f s after %.0f s of waiting", at, time.Since(began).Seconds())
	if at < oldEnough {
		t.Fatalf("the guest's uptime is %.0f s, want %d", at, oldEnough)
	}
}

// TestReseal forks one checkpoint of an old guest in which a process draws random numbers without end.
func TestReseal(t *testing.T) {
	s := theStack(t)
	ws := grownOld(t, s)
	shell(t, s, ws, `mkdir -p /etc/ssh && echo old > /etc/ssh/ssh_host_rsa_key && echo old > /etc/ssh/ssh_host_rsa_key.pub`)
	p := spin(t, s, ws)
	ckpt := checkpoint(t, s, ws)
	captured := p.countIn(t, s, ckpt.ID)
	parent := p.here(t, s, ws, captured)
	t.Logf("captured in turn %d; the parent has made %d; pause %.0f ms %s", captured, parent.Count, ckpt.PauseMS, stages(ckpt.Timings))

	// The parent is a clone too: nothing that it drew after the capture may be known to a fork. Turn captured+1 is the first that
	// began after the thaw for certain.
	samples := []sample{parent.from("the parent", captured+1)}
	t.Run("the parent stood still", func(t *testing.T) { checkParentGap(t, parent, captured, ckpt) })
	counts := []int{2, 8}
	if *long {
		counts = append(counts, 32)
	}
	for _, n := range counts {
		t.Run(fmt.Sprintf("%d forks", n), func(t *testing.T) {
			began := time.Now()
			children := fork(t, s, ckpt.ID, coppiceFork{count: n})
			t.Logf("%d forks in %.1f s; the last one's stages: %s", n, time.Since(began).Seconds(), stages(children[n-1].Timings))
			frozen := p.after(t, s, children)
			fresh := gather[stream](t, s, children, "draw", fmt.Sprint(draws))
			for i := range children {
				// The process was frozen in the turn that stands in the checkpoint, and its next sees the new generation.
				if got := frozen[i].Thaw; got != captured+1 && got != captured {
					t.Errorf("fork %d: the process had made %d turns when it saw its new generation; the checkpoint has it in turn %d", i, got-1, captured)
				}
				samples = append(samples,
					frozen[i].from(fmt.Sprintf("the frozen process of fork %d of %d", i, n), frozen[i].Thaw),
					fresh[i].from(fmt.Sprintf("a new process of fork %d of %d", i, n), 1))
			}
			for _, fault := range checkDistinct(samples) {
				t.Error(fault)
			}
			ids := gather[map[string]string](t, s, children, "identity")
			checkIdentities(t, children, ids)
			for i, c := range children {
				checkReport(t, c, ckpt.ID, fmt.Sprintf("fork %d", i))
			}
		})
	}
	// Of 64 bits each, the chance that any two of so many values agree by accident is below 1e-8.
	t.Logf("%d samples of %d values, pairwise distinct", len(samples), draws)
}

// checkParentGap wants the parent's process not to have run while it was reseeded: between the turn of the capture and the next
// lies at least the time that the reseed took.
func checkParentGap(t *testing.T, parent stream, captured uint64, ckpt coppice.Checkpoint) {
	t.Helper()
	if parent.First != captured-1 || len(parent.TimeNS) < 3 {
		t.Fatalf("the parent tells of %d turns from %d on, and was captured in turn %d", len(parent.TimeNS), parent.First, captured)
	}
	var reseed float64
	for _, s := range ckpt.ParentReseal {
		if s.Name == "entropy" && s.Status == coppice.ResealOK {
			reseed = s.DurationMS
		}
	}
	if reseed == 0 {
		t.Fatalf("the parent was not reseeded: %+v", ckpt.ParentReseal)
	}
	// The capture may have come between the look at the count and the draw of the same turn, or after it.
	before, in, behind := parent.TimeNS[0], parent.TimeNS[1], parent.TimeNS[2]
	gap := time.Duration(max(in-before, behind-in))
	if gap < time.Duration(reseed*float64(time.Millisecond)) {
		t.Errorf("the process of the parent stood still for %s, less than its reseed of %.1f ms", gap, reseed)
	}
}

func stages(list []coppice.Timing) string {
	var b strings.Builder
	for _, s := range list {
		fmt.Fprintf(&b, " %s %.1f", s.Stage, s.DurationMS)
	}
	return strings.TrimSpace(b.String())
}

// checkIdentities wants every machine to be another one, from within and as the API says.
func checkIdentities(t *testing.T, children []coppice.ForkChild, ids []map[string]string) {
	t.Helper()
	for _, key := range []string{"mac", "ip", "hostname", "machine_id", "boot_id", "generation", "token", "ssh_host_key", "uuid", "tfo_key"} {
		seen := map[string]int{}
		for i, id := range ids {
			if id[key] == "" {
				t.Errorf("fork %d has no %s", i, key)
			} else if other, ok := seen[id[key]]; ok {
				t.Errorf("forks %d and %d have the same %s, %q", other, i, key, id[key])
			}
			seen[id[key]] = i
		}
	}
	for i, c := range children {
		n := c.Workspace.Network
		want := map[string]string{
			"mac": n.MAC, "ip": n.IP + "/32", "hostname": n.Hostname, "hostname_file": n.Hostname, "machine_id": n.MachineID, "generation": n.Generation,
		}
		got := map[string]string{}
		for key := range want {
			got[key] = ids[i][key]
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("fork %d is another machine than the API says (-want +got):\n%s", i, diff)
		}
		if _, err := netip.ParseAddr(n.IP); err != nil {
			t.Errorf("fork %d: %v", i, err)
		}
	}
}

// steps are all that a reseal reports.
var steps = []string{
	"entropy", "clock", "boot_id", "machine_id", "hostname", "sockets", "network", "tcp_metrics", "conntrack", "tfo_key", "wireguard",
	"ssh_host_keys", "dhcp", "random_seed", "ca", "grow_disk", "timers", "journal", "agent_state", "generation", "hooks",
}

func checkReport(t *testing.T, c coppice.ForkChild, from coppice.CheckpointID, where string) {
	t.Helper()
	r := c.ResealReport
	if r == nil || !r.Complete || r.Generation != c.Workspace.Network.Generation {
		t.Errorf("%s: its reseal report is %+v", where, r)
		return
	}
	var names []string
	for _, s := range r.Steps {
		names = append(names, s.Name)
		if s.Status == coppice.ResealFailed || s.Status == coppice.ResealOK && len(s.Evidence) == 0 {
			t.Errorf("%s: step %+v", where, s)
		}
	}
	slices.Sort(names)
	want := slices.Sorted(slices.Values(steps))
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("%s: steps (-want +got):\n%s", where, diff)
	}
	if c.Workspace.ParentCheckpointID != from {
		t.Errorf("%s: it was forked from %s, want %s", where, c.Workspace.ParentCheckpointID, from)
	}
}

// TestResealReportsAreKept reads a fork's report back, and that of its restore.
func TestResealReportsAreKept(t *testing.T) {
	s := theStack(t)
	child := fork(t, s, seed(t), coppiceFork{})[0]
	ws := child.Workspace.ID
	back, err := s.client.RestoreWorkspace(t.Context(), ws, seed(t))
	if err != nil {
		t.Fatal(err)
	}
	list, err := coppice.Collect(s.client.ResealReports(t.Context(), ws))
	if err != nil || len(list) != 2 {
		t.Fatalf("%d reports, %v; want 2", len(list), err)
	}
	for i, want := range []struct {
		epoch  int64
		report *coppice.ResealReport
	}{{2, back.ResealReport}, {1, child.ResealReport}} {
		if list[i].Epoch != want.epoch || list[i].CheckpointID != seed(t) {
			t.Errorf("report %d is of epoch %d and %s", i, list[i].Epoch, list[i].CheckpointID)
		}
		if diff := cmp.Diff(want.report, &list[i].Report); diff != "" {
			t.Errorf("report %d (-answered +kept):\n%s", i, diff)
		}
		attested(t, s, ws, want.epoch, want.report)
	}
}

// attested verifies the attestation of an epoch with the authority's certificate, and that it is of that report.
func attested(t *testing.T, s *stack, ws coppice.WorkspaceID, epoch int64, report *coppice.ResealReport) {
	t.Helper()
	authority, err := s.client.Authority(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode([]byte(authority.Certificate))
	if block == nil {
		t.Fatal("the authority is not PEM")
	}
	trust, err := attest.NewAuthority(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.client.Attestation(t.Context(), ws, epoch)
	if err != nil {
		t.Fatal(err)
	}
	v, err := trust.Verify(b)
	if err != nil {
		t.Fatal(err)
	}
	p := v.Statement.Predicate
	if string(p.WorkspaceID) != ws || p.Epoch != epoch || p.Generation != report.Generation || len(p.Steps) != len(report.Steps) || p.VMM.Version == "" {
		t.Errorf("the attestation of epoch %d says %+v", epoch, p)
	}
	for i, step := range report.Steps {
		evidence, err := attest.StepsOf([]core.ResealStep{{Evidence: step.Evidence}})
		if err != nil || p.Steps[i].Name != step.Name || p.Steps[i].Evidence != evidence[0].Evidence {
			t.Errorf("step %d of epoch %d: %+v is not of %+v, %v", i, epoch, p.Steps[i], step, err)
		}
	}
}

// TestNestedForks checkpoints a fork and forks it twice, and its first fork once more: seven machines of three generations, of which
// no two share anything.
func TestNestedForks(t *testing.T) {
	s := theStack(t)
	first := fork(t, s, seed(t), coppiceFork{count: 2})
	p := spin(t, s, first[0].Workspace.ID)
	middle := checkpoint(t, s, first[0].Workspace.ID)
	execute(t, s, first[0].Workspace.ID, "kill", "-KILL", p.pid)
	if middle.ParentID != seed(t) {
		t.Errorf("the checkpoint of a fork has the parent %s, want %s", middle.ParentID, seed(t))
	}
	second := fork(t, s, middle.ID, coppiceFork{count: 2})
	p.after(t, s, second)
	p2 := spin(t, s, second[0].Workspace.ID)
	inner := checkpoint(t, s, second[0].Workspace.ID)
	captured := p2.countIn(t, s, inner.ID)
	third := fork(t, s, inner.ID, coppiceFork{count: 2})
	frozen := p2.after(t, s, third)
	samples := []sample{p2.here(t, s, second[0].Workspace.ID, captured).from("the middle one", captured+1)}
	for i, f := range frozen {
		samples = append(samples, f.from(fmt.Sprintf("inner fork %d", i), f.Thaw))
	}
	for _, fault := range checkDistinct(samples) {
		t.Error(fault)
	}
	all := slices.Concat(first, second, third)
	ids := gather[map[string]string](t, s, all, "identity")
	for _, id := range ids {
		id["ssh_host_key"] = id["uuid"] // the seed has no SSH server
	}
	checkIdentities(t, all, ids)
	again := fork(t, s, middle.ID, coppiceFork{})
	if again[0].Workspace.Network.Generation == second[0].Workspace.Network.Generation {
		t.Error("a generation was given twice")
	}
}

// TestUnsealedFork is the negative control: the same checkpoint, the same process, the same assertion, and a reseal in which only
// one thing is missing: the kernel answers 0 to RNDADDENTROPY and RNDRESEEDCRNG and does neither (a seccomp filter in a doctored
// agent, whose evidence is forged as well, since the controller would find the siblings' equal draws). Everything else, from the
// runner to the thaw, is what every fork goes through; there is no other way to a running unsealed fork, because neither the
// runner nor the agent releases one.
//
// The kernel reseeds itself once a minute. If that falls into the window of one checkpoint it does not fall into that of another
// which is taken right after, so there is a second try, and never a third.
func TestUnsealedFork(t *testing.T) {
	s := theStack(t)
	ws := doctored(t, s)
	waitUptime(t, s, ws)
	if !inTwo(func() bool { return powerful(t, s, ws) }) {
		t.Error("less than 90 % of the values of two unsealed forks are the same: the assertion has no power")
	}
}

// TestDuplicateEntropy has the same kernel, and an agent that is honest about the result. Each fork by itself looks fine. The second
// shows the same numbers as the first, and fails for that.
func TestDuplicateEntropy(t *testing.T) {
	s := theStack(t)
	ws := doctored(t, s)
	waitUptime(t, s, ws)
	if !inTwo(func() bool { return duplicateFails(t, s, ws) }) {
		t.Error("a fork that shows the random numbers of its sibling is ready")
	}
}

// inTwo reports whether the first try succeeds, or else the second.
func inTwo(try func() bool) bool {
	if try() {
		return true
	}
	return try()
}

// duplicateFails reports whether the second of two forks that were not reseeded failed.
func duplicateFails(t *testing.T, s *stack, ws coppice.WorkspaceID) bool {
	t.Helper()
	from := checkpoint(t, s, ws)
	f := coppiceFork{env: coppice.Env{faultVariable: "deaf-kernel"}}
	fork(t, s, from.ID, f)
	res, err := s.client.ForkCheckpoint(t.Context(), from.ID, f.request())
	if err == nil {
		endWithTest(t, s, res.Children[0].Workspace.ID)
		return false
	}
	_ = wantCode(t, err, coppice.CodeForkFailed)
	failed, err := failures(t.Context(), s, from.ID)
	if err != nil || len(failed) != 1 || failed[0].Failure == nil || failed[0].Failure.Code != string(coppice.CodeResealFailed) || !strings.Contains(failed[0].Failure.Message, "entropy") {
		t.Errorf("%+v, %v", failed, err)
	}
	return true
}

// powerful reports whether two unsealed forks share what they must for the assertion to mean something.
func powerful(t *testing.T, s *stack, ws coppice.WorkspaceID) bool {
	t.Helper()
	p := spin(t, s, ws)
	ckpt := checkpoint(t, s, ws)
	execute(t, s, ws, "kill", "-KILL", p.pid)
	for _, fault := range checkDistinct(p.samples(t, s, fork(t, s, ckpt.ID, coppiceFork{count: 2}), "a sealed fork")) {
		t.Errorf("with the ioctls: %s", fault)
	}
	unsealed := p.samples(t, s, fork(t, s, ckpt.ID, coppiceFork{count: 2, env: coppice.Env{faultVariable: "forged-draws"}}), "an unsealed fork")
	enough := true
	for i := range 2 { // the process that was frozen, and the one that began afterwards
		a, b := unsealed[i], unsealed[i+2]
		n, of := overlap(a, b, window)
		t.Logf("%s and its sibling: %d of %d values of the first %s are the same", a.name, n, of, window)
		enough = enough && of > 0 && 10*n >= 9*of
	}
	faults := checkDistinct(unsealed)
	t.Logf("the assertion says: %q", faults)
	return enough && len(faults) > 0
}

// samples are those of the frozen process and of a new one, of each child.
func (p spinner) samples(t *testing.T, s *stack, children []coppice.ForkChild, name string) []sample {
	t.Helper()
	var out []sample
	frozen := p.after(t, s, children)
	fresh := gather[stream](t, s, children, "draw", fmt.Sprint(draws))
	for i := range children {
		out = append(out, frozen[i].from(name+"'s frozen process", frozen[i].Thaw), fresh[i].from(name+"'s new process", 1))
	}
	return out
}

// TestHooks runs the image's own part of a reseal: in order, before the thaw, with the identity in their environment.
func TestHooks(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	hook(t, s, ws, "10-first", `echo "first $COPPICE_GENERATION $COPPICE_HOSTNAME $COPPICE_IP $COPPICE_MACHINE_ID $(cat /run/coppice/generation)" > /root/hooks`)
	hook(t, s, ws, "20-second", `echo second >> /root/hooks; sleep 86400 </dev/null >/dev/null 2>&1 &`)
	hook(t, s, ws, "30-not", `echo not >> /root/hooks`)
	shell(t, s, ws, "chmod -x /etc/coppice/reseal.d/30-not")
	if _, err := s.client.StatFile(t.Context(), ws, "/root/hooks"); !errors.Is(err, coppice.CodeFileNotFound) {
		t.Errorf("before any fork: %v", err)
	}
	c := fork(t, s, checkpoint(t, s, ws).ID, coppiceFork{})[0]
	n := c.Workspace.Network
	want := fmt.Sprintf("first %s %s %s %s %s\nsecond\n", n.Generation, n.Hostname, n.IP, n.MachineID, n.Generation)
	if got := execute(t, s, c.Workspace.ID, "cat", "/root/hooks"); got != want {
		t.Errorf("the hooks wrote %q, want %q", got, want)
	}
	for _, p := range processes(t, s, c.Workspace.ID) {
		if p.Comm == "sleep" {
			t.Errorf("what a hook left running runs on: %+v", p)
		}
	}
}

func hook(t *testing.T, s *stack, ws coppice.WorkspaceID, name, script string) {
	t.Helper()
	_, err := s.client.WriteFile(t.Context(), ws, "/etc/coppice/reseal.d/"+name, strings.NewReader("#!/bin/sh\n"+script+"\n"), coppice.WriteOptions{Mode: "0755"})
	if err != nil {
		t.Fatal(err)
	}
}

// failures lists the workspaces that were to be grown from a checkpoint and failed, newest first.
func failures(ctx context.Context, s *stack, from coppice.CheckpointID) ([]coppice.Workspace, error) {
	return coppice.Collect(s.client.Workspaces(ctx, coppice.WorkspaceFilter{ParentCheckpointID: from, States: []coppice.WorkspaceState{coppice.WorkspaceFailed}}))
}
