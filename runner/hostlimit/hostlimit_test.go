package hostlimit

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// TestExplain: an error that comes from a limit names it and says what to do. Other errors stay as they are.
func TestExplain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err  error
		code core.Code
		says string
	}{
		"disk":        {fmt.Errorf("clone the disk: %w", unix.ENOSPC), core.CodeDiskFull, "delete checkpoints"},
		"descriptors": {fmt.Errorf("open a socket: %w", unix.EMFILE), core.CodeCapacity, "LimitNOFILE="},
		"processes":   {&os.PathError{Op: "fork/exec", Path: "qemu", Err: unix.EAGAIN}, core.CodeCapacity, "TasksMax="},
	} {
		got := Explain(c.err, "it was not made")
		if core.CodeOf(got) != c.code || !strings.HasPrefix(core.MessageOf(got), "it was not made: ") || !strings.Contains(core.MessageOf(got), c.says) {
			t.Errorf("%s: %v", name, got)
		}
	}
	for _, err := range []error{errors.New("another"), &os.PathError{Op: "read", Path: "x", Err: unix.EAGAIN}} {
		if got := Explain(err, "it was not made"); got != err { //nolint:errorlint // the same error
			t.Errorf("%v became %v", err, got)
		}
	}
}
