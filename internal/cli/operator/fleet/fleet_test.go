package fleet

import (
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
)

func TestFleetCommands(t *testing.T) {
	t.Parallel()
	_, run := clitest.NewServer(t, NewCommand)
	for line, want := range map[string]string{
		"fleet ls":                              clitest.ID("rnr", 2) + "  host  draining  2/64       4/128  1024/4096  10.0 GiB ",
		"fleet ls ":                             "\n  qemu 10.0, tcg\n",
		"fleet drain " + clitest.ID("rnr", 3):   clitest.ID("rnr", 3) + " is draining, with 3 sandboxes\n",
		"fleet undrain " + clitest.ID("rnr", 3): clitest.ID("rnr", 3) + " is ready, with 3 sandboxes\n",
	} {
		if status, stdout, stderr := run(strings.Fields(line)...); status != 0 || !strings.Contains(stdout, want) {
			t.Errorf("%s: status %d\n%s%s", line, status, stdout, stderr)
		}
	}
}
