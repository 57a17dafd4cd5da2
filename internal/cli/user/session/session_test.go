package session

import (
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestTables(t *testing.T) {
	t.Parallel()
	now := clitest.Dawn.Add(3 * time.Hour)
	var b strings.Builder
	code := 143
	b.WriteString("-- sessions\n")
	if err := printSessions(&b, now, []coppice.Session{
		{ID: clitest.ID("sess", 1), State: coppice.SessionRunning, PID: 17, StdoutBytes: 2048, StartedAt: clitest.Dawn, Command: []string{"sh", "-c", "make test 2>&1 | tail -n 5; echo 'all done, at long last, and then some'"}},
		{ID: clitest.ID("sess", 2), State: coppice.SessionExited, ExitCode: &code, TimedOut: true, StartedAt: clitest.Dawn, Command: []string{"sleep", ""}},
	}); err != nil {
		t.Error(err)
	}
	clitest.Golden(t, "tables.txt", b.String())
}
