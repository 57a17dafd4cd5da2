package sealing

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// committer answers commits with what it has, in this order.
type committer struct {
	Controller
	answers []error
	asked   int
}

func (c *committer) CommitSeal(context.Context, core.CheckpointID, runnerapi.CommitSeal) error {
	c.asked++
	return c.answers[min(c.asked, len(c.answers))-1]
}

// TestCommitAgain: a commit is repeated while no controller answers, but not for ever, and not when one has refused it.
func TestCommitAgain(t *testing.T) {
	t.Parallel()
	away := core.Errorf(core.Unavailable, core.CodeControllerUnreachable, "away")
	for what, c := range map[string]struct {
		answers []error
		asked   int
		code    core.Code
	}{
		"it is back":      {[]error{away, context.DeadlineExceeded, nil}, 3, ""},
		"it stays away":   {[]error{away}, 4, core.CodeControllerUnreachable},
		"it refuses":      {[]error{core.Errorf(core.Conflict, core.CodeStateConflict, "replaced")}, 1, core.CodeStateConflict},
		"the lease ended": {[]error{core.Errorf(core.Unavailable, core.CodeRunnerLost, "lost")}, 1, core.CodeRunnerLost},
	} {
		synctest.Test(t, func(t *testing.T) {
			to := &committer{answers: c.answers}
			s := &Sealer{cfg: Config{Log: slog.New(slog.DiscardHandler)}}
			if err := s.commit(t.Context(), to, "ckpt_x", runnerapi.CommitSeal{}); core.CodeOf(err) != c.code || to.asked != c.asked {
				t.Errorf("%s: %v after %d commits", what, err, to.asked)
			}
		})
	}
}
