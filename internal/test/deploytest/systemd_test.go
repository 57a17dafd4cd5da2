package deploytest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
)

const systemd = root + "/deploy/systemd"

// unit is a unit file's settings in order.
type unit [][2]string

func readUnit(t *testing.T, name string) unit {
	t.Helper()
	var u unit
	for line := range strings.Lines(readFile(t, filepath.Join(systemd, name))) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if ok && !strings.HasPrefix(key, "#") {
			u = append(u, [2]string{key, value})
		}
	}
	return u
}

func (u unit) all(key string) (values []string) {
	for _, s := range u {
		if s[0] == key {
			values = append(values, s[1])
		}
	}
	return values
}

// starts is what the unit runs, with the environment file that is shipped for it.
func (u unit) starts(t *testing.T, name, envFile string) start {
	t.Helper()
	command, env := strings.Fields(u.all("ExecStart")[0]), map[string]string{}
	if command[0] != "/usr/local/bin/coppice" {
		t.Errorf("%s runs %v", name, command)
	}
	lines := u.all("Environment")
	for line := range strings.Lines(readFile(t, filepath.Join(systemd, envFile))) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	for _, line := range lines {
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			t.Errorf("%s: %q sets nothing", name, line)
		}
		env[key] = value
	}
	return start{name, command[1:], env}
}

func TestUnitsStartCoppice(t *testing.T) {
	t.Parallel()
	controller := readUnit(t, "coppice-controller.service").starts(t, "coppice-controller.service", "controller.env")
	controller.known(t)
	controller.refused(t, map[string]string{"COPPICE_DATABASE": unreachable, "COPPICE_DATABASE_WAIT": "1ms"}, "the database (PostgreSQL) cannot be reached")
	runner := readUnit(t, "coppice-runner.service").starts(t, "coppice-runner.service", "runner.env")
	runner.known(t)
	runner.refused(t, map[string]string{"COPPICE_DATA_DIR": t.TempDir(), "COPPICE_ACCEL": "tcg"}, needsToken())
}

// systemdAnalyze is a requirement of that name.
func systemdAnalyze(t *testing.T) string {
	t.Helper()
	return require.Program(t, "systemd-analyze", "systemd")
}

// TestUnitsAreUnderstood has systemd read the units: it knows every setting and value in them.
func TestUnitsAreUnderstood(t *testing.T) {
	t.Parallel()
	analyze := systemdAnalyze(t)
	dir := t.TempDir()
	for _, name := range []string{"coppice-controller.service", "coppice-runner.service"} {
		here := strings.ReplaceAll(readFile(t, filepath.Join(systemd, name)), "/usr/local/bin/coppice", coppice(t))
		if err := os.WriteFile(filepath.Join(dir, name), []byte(here), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), analyze, "verify", "--man=no", "--recursive-errors=no", filepath.Join(dir, name)).CombinedOutput()
		if err != nil || strings.Contains(string(out), name) {
			t.Errorf("systemd-analyze verify %s: %v\n%s", name, err, out)
		}
	}
	bad := filepath.Join(dir, "coppice-bad.service")
	if err := os.WriteFile(bad, []byte("[Service]\nExecStart="+coppice(t)+"\nProtectSystm=yes\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, _ := exec.CommandContext(t.Context(), analyze, "verify", "--man=no", "--recursive-errors=no", bad).CombinedOutput(); !strings.Contains(string(out), "ProtectSystm") {
		t.Errorf("a setting that does not exist goes unnoticed: %s", out)
	}
}

// TestRunnerUnitKeepsVMs guards what a restart of the runner must not do to its VMs, which internal/test/e2e shows on a real systemd.
func TestRunnerUnitKeepsVMs(t *testing.T) {
	t.Parallel()
	u := readUnit(t, "coppice-runner.service")
	for key, want := range map[string]string{"KillMode": "process", "UMask": "0022", "StateDirectoryMode": "0711"} {
		if got := u.all(key); !slices.Equal(got, []string{want}) {
			t.Errorf("%s is %v, want %s", key, got, want)
		}
	}
	// Each of these gives a unit a mount namespace of its own, or makes clone3() fail.
	forbidden := regexp.MustCompile(`^(Protect(System|Home|KernelTunables|KernelModules|KernelLogs|ControlGroups|Proc|Hostname)|ProcSubset|Private(Tmp|Devices|Mounts|Users|IPC|Network)|(ReadWrite|ReadOnly|Inaccessible|Exec|NoExec)Paths|Bind(ReadOnly)?Paths|TemporaryFileSystem|RootDirectory|RootImage|MountFlags|DynamicUser|RuntimeDirectory|RestrictNamespaces|MemoryDenyWriteExecute)$`)
	for _, s := range u {
		if forbidden.MatchString(s[0]) {
			t.Errorf("the runner's unit sets %s=%s", s[0], s[1])
		}
	}
	var caps []string
	for c := range strings.FieldsSeq(u.all("CapabilityBoundingSet")[0]) {
		caps = append(caps, strings.TrimPrefix(c, "CAP_"))
	}
	slices.Sort(caps)
	if !slices.Equal(caps, capabilities) {
		t.Errorf("the runner's capabilities are %v, want %v", caps, capabilities)
	}
}

var score = regexp.MustCompile(`Overall exposure level for \S+: ([0-9.]+)`)

// TestExposure keeps docs/OPERATIONS.md from naming better scores than the units have.
func TestExposure(t *testing.T) {
	t.Parallel()
	analyze := systemdAnalyze(t)
	for name, worst := range map[string]string{"coppice-controller.service": "1.5", "coppice-runner.service": "6.9"} {
		out, err := exec.CommandContext(t.Context(), analyze, "security", "--offline=true", "--no-pager", filepath.Join(systemd, name)).CombinedOutput()
		m := score.FindSubmatch(out)
		if err != nil || m == nil {
			t.Errorf("systemd-analyze security %s: %v\n%s", name, err, out)
			continue
		}
		t.Logf("%s: %s", name, m[1])
		if len(m[1]) != len(worst) || string(m[1]) > worst {
			t.Errorf("the exposure of %s is %s, want at most %s", name, m[1], worst)
		}
	}
}
