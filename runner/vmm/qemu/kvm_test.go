package qemu

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

// ownCopy copies a file, so that the processes of this test can be recognized by its path.
func ownCopy(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "initrd")
	if err := os.WriteFile(to, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return to
}

// TestProbe probes with the accelerator that works everywhere.
func TestProbe(t *testing.T) {
	t.Parallel()
	d := real(t)
	guest := testvm.Guest(t)
	initrd := ownCopy(t, guest.Initrd)
	if err := d.probe(t.Context(), acceleratorTCG, guest.Kernel, initrd, time.Minute); err != nil {
		t.Errorf("a kernel that boots: %v", err)
	}
	for name, c := range map[string]struct {
		kernel string
		limit  time.Duration
		want   string
	}{
		"no time":   {guest.Kernel, 300 * time.Millisecond, "did not boot within 300ms"},
		"no kernel": {"/no/such/kernel", time.Minute, "qemu-system-x86_64 ended with exit status 1"},
		"no Linux":  {initrd, time.Minute, "qemu-system-x86_64 ended with"},
	} {
		start := time.Now()
		err := d.probe(t.Context(), acceleratorTCG, c.kernel, initrd, c.limit)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
		if took := time.Since(start); took > c.limit+11*time.Second {
			t.Errorf("%s: it took %s", name, took)
		}
		if left := processes(t, initrd); len(left) > 0 {
			t.Errorf("%s: the processes %v are left", name, left)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	if err := d.probe(ctx, acceleratorTCG, guest.Kernel, initrd, time.Minute); err == nil || !strings.Contains(err.Error(), "given up") {
		t.Errorf("given up: got %v", err)
	}
	if left := processes(t, initrd); len(left) > 0 {
		t.Errorf("the processes %v are left", left)
	}
}

// TestProbeFakes uses programs that behave like a QEMU under a broken KVM.
func TestProbeFakes(t *testing.T) {
	t.Parallel()
	const version = `[ "$1" = --version ] && { echo QEMU emulator version 8.2.1; exit; }` + "\n"
	for name, c := range map[string]struct {
		script string
		want   string // "" for success
		never  bool   // it ends only because its time is over
	}{
		"says it and hangs":      {"trap '' TERM; echo " + vmmproc.ProbeOK + "; while :; do sleep 100; done", "", false},
		"says it and ends":       {"printf 'noise\\n" + vmmproc.ProbeOK + "'", "", false},
		"says it and fails":      {"echo " + vmmproc.ProbeOK + "; exit 7", "", false},
		"prints without end":     {"while :; do echo 'KVM internal error. Suberror: 1'; done", "did not boot within", true},
		"ends":                   {"printf 'failed to initialize kvm: \\033[31mDevice or resource busy\\n' >&2; exit 1", "?[31mDevice or resource busy", false},
		"ends and says nothing":  {"kill -SEGV $$", "segmentation fault", false},
		"closes and hangs":       {"exec >/dev/null 2>&1; while :; do sleep 100; done", "it said nothing", true},
		"leaves a child with it": {"sleep 3 & echo gone; exit 3", "exit status 3", false},
	} {
		d := New(Config{Binary: program(t, version+c.script+"\n")})
		if _, err := d.installation(t.Context()); err != nil { // asking for the version takes its time too
			t.Fatal(err)
		}
		limit := time.Minute
		if c.never {
			limit = 500 * time.Millisecond
		}
		start := time.Now()
		err := d.probe(t.Context(), acceleratorTCG, "/no/kernel", "/no/initrd", limit)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("a program that %s: got %v, want %q", name, err, c.want)
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("a program that %s: it took %s", name, took)
		}
		if left := processes(t, d.cfg.Binary); len(left) > 0 {
			t.Errorf("a program that %s: the processes %v are left", name, left)
		}
	}
}

// TestProbeKVM probes this machine. Whatever it has, the answer comes in time, with a reason, and nothing is left. With
// COPPICE_ACCELERATOR=kvm the answer must be yes.
func TestProbeKVM(t *testing.T) {
	t.Parallel()
	real(t)
	guest := testvm.Guest(t)
	initrd := ownCopy(t, guest.Initrd)
	limit := 10 * time.Second
	demanded := os.Getenv("COPPICE_ACCELERATOR") == acceleratorKVM
	if demanded {
		limit = time.Minute // the host of this KVM may be emulated itself
	}
	start := time.Now()
	ok, why := New(Config{Binary: os.Getenv("COPPICE_QEMU")}).ProbeKVM(t.Context(), guest.Kernel, initrd, limit)
	t.Logf("kvm works: %v: %s", ok, why)
	if why == "" {
		t.Error("there is no reason")
	}
	if demanded && !ok {
		t.Errorf("KVM must work here: %s", why)
	}
	if took := time.Since(start); took > limit+10*time.Second {
		t.Errorf("it took %s", took)
	}
	if left := processes(t, initrd); len(left) > 0 {
		t.Errorf("the processes %v are left", left)
	}
}
