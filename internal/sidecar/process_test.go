package sidecar_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/require"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/cgroup"
)

// TestCgroup: a process is in the group that it is given, whatever group this one is in, also where it can gain no privileges.
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
		p := sidecar.Process{
			Name: "helper", Dir: dir, Command: []string{"/bin/cp", "/proc/self/cgroup", filepath.Join(dir, "group")}, Confine: confine,
			Cgroup: func() (*os.File, error) { return tree.Beside("helper") },
		}
		var said string
		if err := p.Start(t.Context(), func(context.Context) error {
			b, err := os.ReadFile(filepath.Join(dir, "group"))
			if said = string(b); err == nil && !strings.HasSuffix(said, "\n") {
				err = errors.New("it has not written all yet")
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("0::/coppice-sidecar-%d.helper\n", os.Getpid()); !strings.Contains(said, want) {
			t.Errorf("it is in %q, want %q", said, want)
		}
	}
	p := sidecar.Process{Name: "helper", Dir: t.TempDir(), Command: []string{"/bin/true"}, Cgroup: func() (*os.File, error) { return nil, os.ErrPermission }}
	if err := p.Start(t.Context(), func(context.Context) error { return nil }); !errors.Is(err, os.ErrPermission) {
		t.Errorf("a group that cannot be made: %v", err)
	}
}
