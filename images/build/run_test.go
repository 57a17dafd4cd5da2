package build

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
)

// TestLeavesVolumes: a program that runs for minutes has no copy of the mount of a volume that is not its own.
func TestLeavesVolumes(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := t.TempDir()
	volume := func(name string) string {
		t.Helper()
		file, point := filepath.Join(dir, name+".ext4"), filepath.Join(dir, name)
		for _, command := range [][]string{
			{"truncate", "-s", "4M", file}, {require.Program(t, "mkfs.ext4", "e2fsprogs"), "-q", file}, {"mkdir", point}, {"mount", "-o", "loop", file, point},
		} {
			if out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %v: %s", command, err, out)
			}
		}
		t.Cleanup(func() {
			if out, err := exec.Command("umount", point).CombinedOutput(); err != nil {
				t.Errorf("unmount %s: %v: %s", point, err, out)
			}
		})
		return point
	}
	foreign, own := volume("foreign"), volume("own")
	for _, leaves := range []bool{false, true} {
		got, err := output(t.Context(), tool{name: "cat", args: []string{"/proc/self/mountinfo"}, leaves: leaves, needs: []string{filepath.Join(own, "tree")}})
		if err != nil {
			t.Fatal(err)
		}
		if has := strings.Contains(got, " "+foreign+" "); has == leaves || !strings.Contains(got, " "+own+" ") {
			t.Errorf("leaves %v: it has\n%s", leaves, got)
		}
	}
}
