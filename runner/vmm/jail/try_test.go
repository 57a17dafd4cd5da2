package jail

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
)

// inside makes this test program try a jail and print the result, in the environment that a test has made for it.
const inside = "COPPICE_TEST_TRY_A_JAIL"

func TestTry(t *testing.T) {
	require.Root(t)
	err := Try(t.Context())
	if os.Getenv(inside) == "" {
		if err != nil {
			t.Error(err)
		}
		return
	}
	if errors.Is(err, ErrChroot) {
		t.Log("it would see the files outside")
	}
	t.Logf("result: %v", err)
}

// TestTryInChroot: in a chroot a jail would be the files outside of it. That is noticed before anything is started, whether or not the new root
// is a mount.
func TestTryInChroot(t *testing.T) {
	t.Parallel()
	require.Root(t)
	for name, mounted := range map[string]string{"a directory": "", "a mount": "mount --bind $root $root;"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			if err := os.Link(os.Args[0], filepath.Join(root, "test")); err != nil {
				if out, err := exec.CommandContext(t.Context(), "cp", os.Args[0], filepath.Join(root, "test")).CombinedOutput(); err != nil {
					t.Fatal(err, string(out))
				}
			}
			script := "set -e; root=" + root + "; mount --make-rprivate /; " + mounted +
				"for d in usr lib lib64 etc proc dev tmp; do [ -e /$d ] || continue; mkdir -p $root/$d; mount --rbind /$d $root/$d; done; exec chroot $root /test -test.v -test.run '^TestTry$'"
			cmd := exec.CommandContext(t.Context(), "unshare", "-m", "sh", "-c", script)
			cmd.Env = append(os.Environ(), inside+"=1")
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "it would see the files outside") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
