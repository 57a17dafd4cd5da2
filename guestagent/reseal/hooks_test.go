//go:build linux

package reseal

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/internal/test/testprog"
)

func runHooks(ctx context.Context, t *testing.T, hooks map[string]string, timeout time.Duration) (core.ResealStep, *guesttest.Workload) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range hooks {
		path := filepath.Join(dir, name)
		testprog.Write(t, path, []byte("#!/bin/sh\n"+strings.ReplaceAll(script, "DIR", dir)))
		if strings.HasSuffix(name, ".txt") {
			if err := os.Chmod(path, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	w := &guesttest.Workload{}
	r := &Resealer{work: w}
	t.Cleanup(func() { // in a guest, the cgroup ends the processes that a hook leaves behind
		if b, err := os.ReadFile(filepath.Join(dir, "daemon.pid")); err == nil {
			if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || unix.Kill(pid, unix.SIGKILL) != nil {
				t.Errorf("the daemon %q was not killed: %v", b, err)
			}
		}
	})
	r.sys.hooksDir, r.sys.hookTimeout, r.sys.oom = dir, timeout, func(int) {}
	run := &Run{Resealer: r, req: guesttest.ResealRequest("gen-1"), received: time.Now()}
	return run.one(ctx, Step{Name: "hooks", Do: stepHooks}), w
}

func TestHooks(t *testing.T) {
	t.Parallel()
	got, w := runHooks(t.Context(), t, map[string]string{
		"20-second": "test -e DIR/first.done", "10-first": `test "$COPPICE_GENERATION $COPPICE_HOSTNAME $COPPICE_IP" = "gen-1 fork 10.0.0.1" && touch DIR/first.done`,
		".hidden": "exit 1", "notes.txt": "exit 1",
	}, 20*time.Second)
	if got.Status != core.ResealOK || len(got.Evidence) != 2 || w.HooksLeft != 1 {
		t.Errorf("step %+v; what hooks left was ended %d times", got, w.HooksLeft)
	}
}

func TestHookFailures(t *testing.T) {
	t.Parallel()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tc := range map[string]struct {
		script, want string
		ctx          context.Context
		timeout      time.Duration
	}{
		"exit status":    {"echo no license; exit 4", "10-x: exit status 4: no license", t.Context(), 20 * time.Second},
		"signal":         {"kill -9 $$", "killed", t.Context(), 20 * time.Second},
		"hangs":          {"echo stuck; sleep 1000", "it did not end within 3s: stuck", t.Context(), 3 * time.Second},
		"daemon holds":   {"sleep 1000 & echo $! > DIR/daemon.pid; exit 1", "exit status 1", t.Context(), 20 * time.Second},
		"host gave up":   {"sleep 1000", "canceled", cancelled, 20 * time.Second},
		"escape codes":   {`printf '\033[2Jx'; exit 1`, "?[2Jx", t.Context(), 20 * time.Second},
		"much to say":    {"yes | head -c 1000000; exit 1", "...", t.Context(), 20 * time.Second},
		"unreadable out": {"exec >&- 2>&-; exit 1", "exit status 1", t.Context(), 20 * time.Second},
	} {
		got, w := runHooks(tc.ctx, t, map[string]string{"10-x": tc.script, "20-y": "touch DIR/ran"}, tc.timeout)
		if got.Status != core.ResealFailed || !strings.Contains(got.Error, tc.want) || strings.ContainsRune(got.Error, 0x1b) || len(got.Error) > 130 {
			t.Errorf("%s: %+v, want an error with %q", name, got, tc.want)
		}
		if w.HooksLeft != 1 {
			t.Errorf("%s: what the hook left was not ended", name)
		}
	}
}
