package runner

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
)

// waited is how long a prepared machine waits for its fork. It is much longer than to prepare it and to ask its child for the time.
const waited = 12 * time.Second

// uptime reads what /proc/uptime says.
func uptime(t *testing.T, text string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(strings.Fields(text)[0] + "s")
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestPreparedVM forks a real checkpoint with a running program, without and with prepared machines. The children differ in everything that
// makes a machine, none has anything of the identity that prepared machines have, the program of each goes on exactly where it was captured, and
// the clock of a machine stands still while it waits.
// The timings are logged.
func TestPreparedVM(t *testing.T) { //nolint:paralleltest // its machines take both CPUs
	registry := prometheus.NewRegistry()
	r := newRig(t, func(c *Config) { c.Prepare.Max, c.Warm, c.Metrics = 1, 1, registry })
	authority, err := selfSigned()
	if err != nil {
		t.Fatal(err)
	}
	fork := func(id core.CheckpointID) runnerapi.ChildResult {
		t.Helper()
		child := r.child()
		child.CA = authority
		f, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{child}})
		if err != nil {
			t.Fatal(err)
		}
		c := f.Children[0]
		if c.Problem != nil {
			t.Fatalf("fork: %+v", c.Problem)
		}
		if id := c.Sandbox.Identity; id != child.Identity || c.Reseal.Generation != id.Generation || !c.Reseal.Complete {
			t.Errorf("asked for %+v, got %+v", child.Identity, id)
		}
		return c
	}
	ready := func(c runnerapi.ChildResult) (total float64) {
		t.Helper()
		var stages []string
		for _, s := range c.Timings {
			if s.Stage != "queue" {
				total += s.DurationMS
			}
			stages = append(stages, fmt.Sprintf("%s %.1f", s.Stage, s.DurationMS))
		}
		t.Logf("READY after %.1f ms: %s", total, strings.Join(stages, ", "))
		began := time.Now()
		r.sh(c.SandboxID, "exit 0")
		t.Logf("  its first command took %.1f ms more; the guest's reseal %.1f ms", core.Milliseconds(time.Since(began)), c.Reseal.DurationMS)
		return total
	}
	parent := fork(r.template())
	// The program counts in memory, and answers the first question after a thaw with the number that it has before it goes on.
	r.sh(parent.SandboxID, `cat > /root/count.sh <<'X'
n=0
while :; do
	n=$((n+1))
	g=$(cat /run/coppice/generation)
	if [ "$g" != "$last" ]; then echo "$n $g" >> /root/seen; last=$g; fi
done
X
setsid sh /root/count.sh >/dev/null 2>&1 </dev/null &
while ! [ -s /root/seen ]; do :; done`)
	captured := uptime(t, r.sh(parent.SandboxID, "cat /proc/uptime"))
	ckpt := r.capture(parent.SandboxID)
	r.destroy(parent.SandboxID)
	var with, without float64
	identities := map[string]bool{}
	counted := map[string]bool{}
	for i := range 4 { // the last two are prepared
		if i < 2 {
			for _, c := range r.Checkpoints() { // what is not expected is not prepared
				r.prepared.Removed(c.ID)
			}
			r.prepared.Purge(t.Context())
			eventually.True(t, "a shell is warm", func() bool { return r.idle(ckpt.Base) == 1 })
		} else {
			eventually.True(t, "a machine is prepared", func() bool { return r.prepared.Ready(ckpt.ID) == 1 && r.idle(ckpt.Base) == 1 })
		}
		if i == 3 {
			_ = pace.Pause(t.Context(), waited)
		}
		c := fork(ckpt.ID)
		if ran := uptime(t, r.sh(c.SandboxID, "cat /proc/uptime")) - captured; ran > waited {
			t.Errorf("the clock of child %d has gone on for %s since the capture: it must stand still while a machine waits", i, ran)
		}
		stages := fmt.Sprint(c.Timings)
		if prepared := strings.Contains(stages, "{claim "); prepared != (i >= 2) || prepared == strings.Contains(stages, "{restore ") {
			t.Errorf("child %d has the stages %s", i, stages)
		}
		if total := ready(c); i < 2 {
			without += total / 2
		} else {
			with += total / 2
		}
		id := c.Sandbox.Identity
		// The program had no turn under another generation, and saw the new one right where it was captured. It is busy, so it ends here.
		var lines []string
		eventually.True(t, "the program sees its generation", func() bool {
			lines = strings.Split(strings.TrimSpace(r.sh(c.SandboxID, "cat /root/seen")), "\n")
			return len(lines) > 1
		})
		lines = strings.Split(strings.TrimSpace(r.sh(c.SandboxID, "pkill -f '[c]ount.sh'; cat /root/seen")), "\n")
		if len(lines) != 2 || !strings.HasSuffix(lines[1], " "+id.Generation) {
			t.Errorf("child %d: the program has seen %q", i, lines)
		}
		checks := []struct{ what, script, want string }{
			{"machine id", "cat /etc/machine-id", id.MachineID},
			{"hostname", "hostname", id.Hostname},
			{"hosts", "sed -n 's/^127.0.1.1\t//p' /etc/hosts", id.Hostname},
			{"generation", "cat /run/coppice/generation", id.Generation},
			{"MAC", "cat /sys/class/net/eth0/address", id.MAC},
			{"address", "ip -o -4 addr show dev eth0 | awk '{print $4}'", id.IP.String() + "/32"},
			{"default routes", "ip route show default | wc -l", "1"},
			{"what prepared machines are called", "grep -rls nobody- /etc /run/coppice /root /var/lib || true", ""},
			{"authorities", "grep -c 'coppice: begin' /etc/ssl/certs/ca-certificates.crt", "1"},
			{"boot id", "cat /proc/sys/kernel/random/boot_id", ""},
			{"random", "head -c 32 /dev/urandom | sha256sum", ""},
		}
		// In one command: to start each of them takes most of its time.
		var script strings.Builder
		for _, check := range checks {
			fmt.Fprintf(&script, "{ %s; }; echo =\n", check.script)
		}
		answers := strings.Split(r.sh(c.SandboxID, script.String()), "=\n")
		if len(answers) != len(checks)+1 {
			t.Fatalf("child %d: %d answers to %d checks: %q", i, len(answers)-1, len(checks), answers)
		}
		for n, check := range checks {
			got := strings.TrimSpace(answers[n])
			if own := check.what + " " + got; check.what == "boot id" || check.what == "random" {
				if identities[own] || got == "" {
					t.Errorf("two children have %s", own)
				}
				identities[own] = true
			} else if got != check.want {
				t.Errorf("child %d: %s: %q, want %q", i, check.what, got, check.want)
			}
		}
		counted[strings.Fields(lines[1])[0]] = true
		r.destroy(c.SandboxID)
	}
	if len(counted) > 2 { // a turn may have been under way at the capture: before or after its read
		t.Errorf("the program had counted to %v in four children", counted)
	}
	for key, n := range testmetrics.Of(t, registry) {
		if strings.Contains(key, "_prepared") {
			t.Logf("%s %.2f", key, n)
		}
	}
	t.Logf("READY in the mean: %.1f ms without a prepared machine, %.1f ms with one", without, with)
	r.stop()
}
