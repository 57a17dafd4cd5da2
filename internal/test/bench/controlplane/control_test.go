package controlplane

import (
	"io"
	"os"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

// publicDir is a directory that the database's user can reach.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "coppice-bench") //nolint:usetesting // the server's user must reach it, and t.TempDir is private
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestControl measures a little of everything that `bench control` measures.
func TestControl(t *testing.T) {
	t.Parallel()
	_, err := pgcluster.Find(t.Context(), "")
	require.That(t, "postgres", err == nil, "apt-get install --no-install-recommends postgresql")
	dir := publicDir(t)
	r, err := measureControl(t.Context(), controlConfig{
		out: dir, warmups: 2, singles: 5, sustain: 100 * time.Millisecond, clients: 2, parallel: 5, wide: 2, deep: 20, reads: 3,
	}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if r.ForkOpMS.N != 5 || r.ForkOpMS.P50 <= 0 || r.ForkOpMS.P99 < r.ForkOpMS.P50 || r.ForkOpsPerS <= 0 || r.Parallel1000S <= 0 || r.LineageMS.P99 <= 0 || len(r.Aims) != 4 {
		t.Errorf("%+v", r)
	}
	if err := r.show(t.Output()); err != nil {
		t.Error(err)
	}
}
