package sidecar_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/cgroup"
)

// TestCgroup: a process is in the group that it was given, whatever the group of this process is, also when it cannot
// gain privileges.
func TestCgroup(t *testing.T) {
	require.Root(t)
	mount, err := cgroup.Find()
	if err != nil {
		t.Fatal(err)
	}
	require.That(t, "cgroup2", mount != "", "mount cgroup v2: mount -t cgroup2 none /sys/fs/cgroup/unified")
	tree, err := cgroup.Open(mount, fmt.Sprintf("coppice-sidecar-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tree.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, confine := range []bool{false, true} {
		dir := t.TempDir()
		group := filepath.Join(dir, "group")
		p := sidecar.Process{ // it lives as long as the file exists
			Name: "helper", Dir: dir, Command: []string{"/bin/sh", "-c", `cat /proc/self/cgroup >"$0"; while test -e "$0"; do sleep 0.05; done`, group},
			Confine: confine, Cgroup: func() (*os.File, error) { return tree.Beside("helper") },
		}
		var said string
		if err := p.Start(t.Context(), func(context.Context) error {
			b, err := os.ReadFile(group)
			if said = string(b); err == nil && !strings.HasSuffix(said, "\n") {
				err = errors.New("it has not written all yet")
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		ends(t, dirOf(mount), group)
		if want := fmt.Sprintf("0::/coppice-sidecar-%d.helper\n", os.Getpid()); !strings.Contains(said, want) {
			t.Errorf("it is in %q, want %q", said, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	p := sidecar.Process{Name: "helper", Dir: t.TempDir(), Command: []string{"/bin/sleep", "60"}, Cgroup: func() (*os.File, error) { return tree.Beside("helper") }}
	if err := p.Start(ctx, func(context.Context) error { cancel(); return errors.New("it does not answer") }); !errors.Is(err, context.Canceled) {
		t.Errorf("it is no longer wanted: %v", err)
	}
	if b, err := os.ReadFile(filepath.Join(dirOf(mount), "cgroup.procs")); err != nil || len(b) > 0 {
		t.Errorf("what was started in vain lives on: %q, %v", b, err)
	}
	p = sidecar.Process{Name: "helper", Dir: t.TempDir(), Command: []string{"/bin/true"}, Cgroup: func() (*os.File, error) { return nil, os.ErrPermission }}
	if err := p.Start(t.Context(), func(context.Context) error { return nil }); !errors.Is(err, os.ErrPermission) {
		t.Errorf("a group that cannot be made: %v", err)
	}
}

// dirOf returns the directory of the helpers' group.
func dirOf(mount string) string {
	return filepath.Join(mount, fmt.Sprintf("coppice-sidecar-%d.helper", os.Getpid()))
}

// ends tells a helper to end and waits until its group is empty.
func ends(t *testing.T, group, file string) {
	t.Helper()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the helper ends", func() bool {
		b, err := os.ReadFile(filepath.Join(group, "cgroup.procs"))
		return err == nil && len(b) == 0
	})
}
