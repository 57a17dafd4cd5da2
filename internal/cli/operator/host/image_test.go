package host

import (
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
)

func TestTables(t *testing.T) {
	t.Parallel()
	now := clitest.Dawn.Add(3 * time.Hour)
	var b strings.Builder
	b.WriteString("-- images\n")
	if err := printImages(&b, now, []imageLine{{Name: "base", Digest: "sha256:0123456789abcdef0123", Source: "debian", KernelRelease: "6.1.0-cloud", SizeBytes: 512 << 20, CreatedAt: clitest.Dawn.Add(-100 * time.Hour)}}); err != nil {
		t.Error(err)
	}
	clitest.Golden(t, "tables.txt", b.String())
}
