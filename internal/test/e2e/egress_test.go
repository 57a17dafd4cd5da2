package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"

	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/egress"
)

// TestEgressProcessIsConfined starts the process as a runner does and looks at what it may do: nothing but its work.
func TestEgressProcessIsConfined(t *testing.T) {
	require.Root(t)
	dir, err := os.MkdirTemp("", "egress") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	const uid = 700_000_123
	cfg := daemon.EgressConfig{Dir: filepath.Join(dir, "run"), Spool: filepath.Join(dir, "spool"), UID: uid}
	config, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("COPPICE_STORE_SECRET_KEY", "a secret of the runner's")
	process := egress.Process{Dir: cfg.Dir, Command: []string{program(t, "cmd/coppice"), "egress"}, Config: config}
	client, hello, err := egress.Ensure(t.Context(), process)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := client.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	proc := fmt.Sprintf("/proc/%d", hello.PID)
	threads, err := filepath.Glob(proc + "/task/*/status")
	if err != nil || len(threads) == 0 {
		t.Fatalf("%d threads, %v", len(threads), err)
	}
	for _, path := range threads {
		status, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		for _, want := range []string{
			fmt.Sprintf(`(?m)^Uid:\s+%d\s+%[1]d\s+%[1]d\s+%[1]d$`, uid), fmt.Sprintf(`(?m)^Gid:\s+%d\s+%[1]d\s+%[1]d\s+%[1]d$`, uid), `(?m)^Groups:\s*$`,
			`(?m)^CapInh:\s+0+$`, `(?m)^CapPrm:\s+0+$`, `(?m)^CapEff:\s+0+$`, `(?m)^CapAmb:\s+0+$`, `(?m)^NoNewPrivs:\s+1$`, `(?m)^CoreDumping:\s+0$`,
		} {
			if !regexp.MustCompile(want).Match(status) {
				t.Errorf("%s lacks %s:\n%s", path, want, status)
			}
		}
	}
	environ, err := os.ReadFile(proc + "/environ")
	if err != nil || len(environ) > 0 {
		t.Errorf("its environment is %q, %v", environ, err)
	}
	limits, err := os.ReadFile(proc + "/limits")
	if err != nil || !regexp.MustCompile(`(?m)^Max core file size\s+0\s+0\s`).Match(limits) {
		t.Errorf("its limits are %s, %v", limits, err)
	}
	if info, err := os.Stat(proc + "/environ"); err != nil || info.Sys().(*syscall.Stat_t).Uid != 0 { // that of a process that can be dumped is its user's
		t.Errorf("its environment is user %v's, %v", info, err)
	}
	if info, err := os.Stat(cfg.Spool); err != nil || info.Mode().Perm() != 0o700 || info.Sys().(*syscall.Stat_t).Uid != uid {
		t.Errorf("its spool is %v, %v", info, err)
	}
	files, err := os.ReadDir(proc + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		to, err := os.Readlink(filepath.Join(proc, "fd", f.Name()))
		if err == nil && !regexp.MustCompile(`^(socket:|pipe:|anon_inode:|/dev/null|/sys/fs/cgroup/|`+regexp.QuoteMeta(dir)+`/)`).MatchString(to) {
			t.Errorf("it has %s open", to)
		}
	}
	// A second one finds the first.
	if _, again, err := egress.Ensure(t.Context(), process); err != nil || again.Instance != hello.Instance {
		t.Errorf("a second start: %+v, %v", again, err)
	}
}
