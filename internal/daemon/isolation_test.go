package daemon

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/hostcheck"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
	"github.com/coppice-dev/coppice/runner"
)

// TestWeakHost opens the machines of a host whose VMs no control group bounds: that is refused, allowed by name, or warned of on a user's own
// machine. Whatever else this host has is found too.
func TestWeakHost(t *testing.T) {
	t.Parallel()
	const name = "cgroup-v2"
	for what, c := range map[string]struct {
		allow  []string
		warn   bool
		code   core.Code
		starts bool
	}{
		"nothing is allowed":    {nil, false, core.CodeIncompatibleHost, false},
		"something else is":     {[]string{"swap", "ksm"}, false, core.CodeIncompatibleHost, false},
		"something unknown is":  {[]string{"all"}, false, core.CodeInvalidField, false},
		"all of it is":          {hostcheck.IsolationNames(), false, "", true},
		"a user's own machine":  {nil, true, "", true},
		"the same, and a names": {[]string{name}, true, "", true},
	} {
		var log bytes.Buffer
		registry := prometheus.NewRegistry()
		h, rc := &Host{}, &runner.Config{}
		cfg := HostConfig{AllowWeak: c.allow, WarnWeak: c.warn, Registry: registry, Log: slog.New(slog.NewTextHandler(&log, nil))}
		err := h.judge(t.Context(), cfg, nil, rc)
		if (err == nil) != c.starts || err != nil && core.CodeOf(err) != c.code {
			t.Errorf("%s: got %v, want %s", what, err, c.code)
		}
		if c.code == core.CodeIncompatibleHost && (!strings.Contains(err.Error(), "--allow-weak-host=") || !strings.Contains(err.Error(), name)) {
			t.Errorf("%s: the refusal does not name the flag and %s: %v", what, name, err)
		}
		if c.starts != slices.Contains(rc.Weak, name) || c.starts != strings.Contains(log.String(), "check="+name) || len(h.Weak) != len(rc.Weak) {
			t.Errorf("%s: the runner says %v, the start says %v, the log says %s", what, rc.Weak, h.Weak, log.String())
		}
		if got := testmetrics.One(t, registry, "coppice_runner_host_weak "+name); got != 1 {
			t.Errorf("%s: the metric of %s is %v", what, name, got)
		}
		if got := testmetrics.One(t, registry, "coppice_runner_cgroup_controller pids"); got != 0 {
			t.Errorf("%s: the metric of pids is %v", what, got)
		}
	}
}

// TestWeakHostWithSandboxes: a runner that finds its sandboxes running starts on a host that it would refuse, and warns. What is left of an
// earlier boot, or of a machine that nobody uses, is no reason.
func TestWeakHostWithSandboxes(t *testing.T) {
	t.Parallel()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	this := strings.TrimSpace(string(boot))
	for what, c := range map[string]struct {
		journal string
		allow   []string
		starts  bool
	}{
		"a sandbox":                      {`{"version":1,"boot":"` + this + `","handle":{},"sandbox":{}}`, nil, true},
		"one of an earlier boot":         {`{"version":1,"boot":"earlier","handle":{},"sandbox":{}}`, nil, false},
		"a machine that nobody uses":     {`{"version":1,"boot":"` + this + `","handle":{}}`, nil, false},
		"a journal that is not readable": {`{"ver`, nil, true},
		"a flag that is wrong":           {`{"version":1,"boot":"` + this + `","handle":{},"sandbox":{}}`, []string{"all"}, false},
	} {
		var log bytes.Buffer
		h, rc := &Host{RunDir: t.TempDir()}, &runner.Config{}
		dir := filepath.Join(h.RunDir, vmDir, "sbx_x")
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, "journal.json"), []byte(c.journal), 0o600)); err != nil {
			t.Fatal(err)
		}
		err := h.judge(t.Context(), HostConfig{AllowWeak: c.allow, Log: slog.New(slog.NewTextHandler(&log, nil))}, nil, rc)
		if (err == nil) != c.starts || c.starts != strings.Contains(log.String(), "sandboxes run here already") || c.starts != slices.Contains(rc.Weak, "cgroup-v2") {
			t.Errorf("%s: %v, and the log says %s", what, err, log.String())
		}
	}
}
