package steps

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// TestStreamsAreBounded: a controller has 1,024 streams of steps open, and a project 128 of them.
func TestStreamsAreBounded(t *testing.T) {
	t.Parallel()
	s := New(Uses{}, nil, slog.New(slog.DiscardHandler))
	project := func(i int) core.ProjectID { return core.ProjectID(fmt.Sprint("prj_", i)) }
	var leaves []func()
	for i := range maxStreams {
		leave, err := s.Enter(project(i / maxProjectStreams))
		if err != nil {
			t.Fatalf("stream %d: %v", i, err)
		}
		leaves = append(leaves, leave)
	}
	if _, err := s.Enter(project(maxStreams)); core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("of another project, beyond those of a controller: %v", err)
	}
	leaves[maxProjectStreams]()
	if _, err := s.Enter(project(0)); core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("beyond those of a project: %v", err)
	}
	for i, leave := range leaves {
		if i != maxProjectStreams {
			leave()
		}
	}
	if s.streams.total != 0 || len(s.streams.projects) != 0 {
		t.Errorf("%d streams, %d projects are left", s.streams.total, len(s.streams.projects))
	}
}

// TestPanicOfAnAction: it is an error of the action.
func TestPanicOfAnAction(t *testing.T) {
	t.Parallel()
	w := newWork(New(Uses{}, nil, slog.New(slog.DiscardHandler)), Step{Fork: func(context.Context, *Row, Note) error { panic("oh") }}, nil)
	if _, err := w.advance(t.Context(), &Row{Phase: Pending}, core.NewStopwatch()); core.CodeOf(err) != core.CodeInternal {
		t.Error(err)
	}
	if len(w.line) != 0 || w.trying != 0 || w.holding != 0 {
		t.Errorf("it is still in line, or counted: %d, %d look for room, %d have it", len(w.line), w.trying, w.holding)
	}
	if err := w.guarded(t.Context(), 0, func() error { panic("in its termination") }); core.CodeOf(err) != core.CodeInternal {
		t.Error(err)
	}
}

// TestScoreOfATail: the score is that of the last line, or there is none.
func TestScoreOfATail(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		stdout    string
		truncated bool
		want      any
	}{
		{"7\n", false, 7.0},
		{"7\n", true, nil}, // it may be the end of 17
		{"\n7 \n\n", true, 7.0},
		{"x\n" + `{"score":0.5}`, true, 0.5},
		{"x\n7x", false, nil},
		{"", false, nil},
		{"null", false, nil},
	} {
		var got any
		if score := scoreOf([]byte(c.stdout), c.truncated); score != nil {
			got = *score
		}
		if got != c.want {
			t.Errorf("%q, %v: %v, want %v", c.stdout, c.truncated, got, c.want)
		}
	}
}

// TestFewInLine: at most four actions of a step are in the line for room at the same time.
func TestFewInLine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var in atomic.Int64
		open := make(chan struct{})
		w := newWork(New(Uses{}, nil, slog.New(slog.DiscardHandler)), Step{Fork: func(context.Context, *Row, Note) error {
			in.Add(1)
			<-open
			return nil
		}}, nil)
		for i := range 10 {
			go func() { _, _ = w.fork(t.Context(), &Row{Index: i}) }()
		}
		synctest.Wait()
		if in.Load() != maxInLine || maxInLine != 4 {
			t.Errorf("%d are in line", in.Load())
		}
		close(open)
		synctest.Wait()
		if in.Load() != 10 || w.holding != 10 || w.trying != 0 {
			t.Errorf("%d were in line, %d have room, %d look for it", in.Load(), w.holding, w.trying)
		}
	})
}

// TestTerminateAfterAChange: a workspace that has changed while its termination began is terminated all the same.
func TestTerminateAfterAChange(t *testing.T) {
	t.Parallel()
	states := []core.WorkspaceState{core.WorkspaceSuspended, core.WorkspaceReady}
	tries := 0
	w := newWork(New(Uses{
		Terminate: func(context.Context, core.ProjectID, core.WorkspaceID, Note) (core.OperationID, error) {
			if tries++; tries <= len(states) {
				return "", core.Errorf(core.Conflict, core.CodeStateConflict, "it cannot become terminating now")
			}
			return "op", nil
		},
		Workspace: func(context.Context, core.ProjectID, core.WorkspaceID) (model.Workspace, error) {
			return model.Workspace{State: states[tries-1]}, nil
		},
		Await: func(context.Context, core.ProjectID, core.OperationID, time.Duration) (bool, error) { return true, nil },
	}, nil, slog.New(slog.DiscardHandler)), Step{}, nil)
	if err := w.end(t.Context(), &Row{Phase: Running, Workspace: "ws"}); err != nil || tries != len(states)+1 {
		t.Errorf("%v after %d tries", err, tries)
	}
}
