package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/test/require"
)

// TestWeight: the share of processor time can be changed, where it can be limited.
func TestWeight(t *testing.T) {
	t.Parallel()
	for _, controllers := range [][]string{wanted, {"memory"}, nil} {
		dir := t.TempDir()
		tree := &Tree{dir: dir, controllers: controllers}
		file := filepath.Join(dir, "g", "cpu.weight")
		if err := os.Mkdir(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		g, err := tree.Make("g", Limits{})
		if err == nil {
			err = g.SetWeight(0)
		}
		if err != nil {
			t.Fatal(err)
		}
		g.Close()
		want := ""
		if slices.Contains(controllers, "cpu") {
			want = "1"
		}
		if b, err := os.ReadFile(file); err != nil || string(b) != want {
			t.Errorf("with %v: %q, %v", controllers, b, err)
		}
	}
	if err := (*Group)(nil).SetWeight(1); err != nil {
		t.Error(err)
	}
}

// TestLimitFiles writes into a directory with the files of a group, as the kernel would have made them.
func TestLimitFiles(t *testing.T) {
	t.Parallel()
	all := Limits{MemoryBytes: 64 << 20, Processes: 16, Weight: 200, CPUPercent: 150, IOBytes: 1 << 20, IOPS: 100}
	for name, c := range map[string]struct {
		controllers []string
		device      string
		limits      Limits
		absent      []string
		want        map[string]string
	}{
		"all": {wanted, "8:0", all, nil, map[string]string{
			"memory.max": "67108864", "memory.swap.max": "0", "pids.max": "16", "cpu.weight": "200", "cpu.max": "150000 100000",
			"io.weight": "default 200", "io.max": "8:0 rbps=1048576 wbps=1048576 riops=100 wiops=100",
		}},
		"no limits":        {wanted, "8:0", Limits{}, nil, map[string]string{}},
		"no controllers":   {nil, "8:0", all, nil, map[string]string{}},
		"memory only":      {[]string{"memory"}, "8:0", all, nil, map[string]string{"memory.max": "67108864", "memory.swap.max": "0"}},
		"no device":        {[]string{"io"}, "", all, nil, map[string]string{"io.weight": "default 200"}},
		"operations only":  {[]string{"io"}, "8:0", Limits{IOPS: 7}, nil, map[string]string{"io.max": "8:0 riops=7 wiops=7"}},
		"no swap":          {[]string{"memory"}, "", Limits{MemoryBytes: 4096}, []string{"memory.swap.max"}, map[string]string{"memory.max": "4096"}},
		"no weights of IO": {[]string{"io"}, "8:0", all, []string{"io.weight"}, map[string]string{"io.max": "8:0 rbps=1048576 wbps=1048576 riops=100 wiops=100"}},
		"too much weight":  {[]string{"cpu"}, "", Limits{Weight: 1 << 20}, nil, map[string]string{"cpu.weight": "10000"}},
	} {
		dir := t.TempDir()
		files := []string{"memory.max", "memory.swap.max", "pids.max", "cpu.weight", "cpu.max", "io.weight", "io.max"}
		for _, f := range files {
			if !slices.Contains(c.absent, f) {
				if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
		tree := &Tree{controllers: c.controllers, device: c.device}
		if err := tree.limit(dir, c.limits); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := map[string]string{}
		for _, f := range files {
			if b, err := os.ReadFile(filepath.Join(dir, f)); err == nil && len(b) > 0 {
				got[f] = string(b)
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	tree := &Tree{controllers: []string{"pids"}}
	if err := tree.limit(t.TempDir(), all); err == nil {
		t.Error("a limit that could not be written is no error")
	}
	if got := tree.Missing(); !slices.Equal(got, []string{"cpu", "io", "memory"}) {
		t.Errorf("missing %v", got)
	}
	if got := (*Tree)(nil).Missing(); !slices.Equal(got, wanted) {
		t.Errorf("missing on a host without cgroup v2: %v", got)
	}
}

// TestLimitsHold has a real group for processes that take as much as they can: a fork bomb, and one that computes without end.
func TestLimitsHold(t *testing.T) { //nolint:paralleltest // it looks at processor time
	require.Root(t)
	mount, err := Find()
	if err != nil {
		t.Fatal(err)
	}
	require.That(t, "cgroup2", mount != "", "mount cgroup v2: mount -t cgroup2 none /sys/fs/cgroup/unified")
	tree, err := Open(mount, fmt.Sprintf("coppice-limits-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(tree.Reconcile(context.WithoutCancel(t.Context()), nil), tree.Close()); err != nil {
			t.Error(err)
		}
	})
	if missing := tree.Missing(); len(missing) > 0 {
		if os.Getenv("COPPICE_TEST_CGROUPS") == "all" { // the lane of internal/test/kvmlane has every controller
			t.Fatalf("controllers missing: %v", missing)
		}
		if g, err := tree.Make("bomb", Limits{Processes: 20, Weight: 50}); err != nil || g == nil {
			t.Errorf("a group without controllers: %v, %v", g, err)
		}
		t.Logf("this host lacks the controllers %v: the group bounds nothing of them; `make test-kvm` has them all", missing)
		return
	}
	const most, percent = 20, 25
	g, err := tree.Make("bomb", Limits{Processes: most, MemoryBytes: 64 << 20, Weight: 50, CPUPercent: percent})
	if err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{"pids.max": "20", "memory.max": "67108864", "cpu.weight": "50", "cpu.max": "25000 100000"} {
		if got := read(t, g.dir, file); got != want {
			t.Errorf("%s is %q, want %q", file, got, want)
		}
	}
	// Each process starts two more for ever, and computes.
	bomb := exec.CommandContext(t.Context(), "sh", "-c", "f() { f & f & while :; do :; done; }; f 2>/dev/null")
	into(bomb, g)
	if err := bomb.Start(); err != nil {
		t.Fatal(err)
	}
	began, before := time.Now(), usage(t, g.dir)
	for refused := 0; refused == 0; {
		if t.Context().Err() != nil {
			t.Fatal("the bomb was never refused a process")
		}
		for line := range strings.Lines(read(t, g.dir, "pids.events")) {
			_, _ = fmt.Sscanf(line, "max %d", &refused)
		}
	}
	if now := len(strings.Fields(read(t, g.dir, "cgroup.procs"))); now > most {
		t.Errorf("there are %d processes, want at most %d", now, most)
	}
	<-time.After(2 * time.Second) // of processor time
	spent, passed := usage(t, g.dir)-before, time.Since(began)
	if most := passed * (percent + 15) / 100; spent > most {
		t.Errorf("it took %s of processor time in %s, want at most %s", spent, passed, most)
	}
	if err := g.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	_ = bomb.Wait() // it was killed
}

func read(t *testing.T, dir, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// usage is the processor time that a group has taken.
func usage(t *testing.T, dir string) time.Duration {
	t.Helper()
	var micros int64
	for line := range strings.Lines(read(t, dir, "cpu.stat")) {
		_, _ = fmt.Sscanf(line, "usage_usec %d", &micros)
	}
	return time.Duration(micros) * time.Microsecond
}

// into has a command start in a group.
func into(cmd *exec.Cmd, g *Group) {
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(g.FD().Fd())}
}
