package devstack

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// busy are workspaces that refuse some requests before one succeeds.
type busy struct {
	mu      sync.Mutex
	refuse  map[core.WorkspaceID][]error // the answers before the good one
	ended   []core.WorkspaceID
	late    core.WorkspaceID // appears when the first has ended
	refused chan struct{}    // gets a value for each refusal, if it has room
}

func (b *busy) list(context.Context) (all []controller.Workspace, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id := range b.refuse {
		if !slices.Contains(b.ended, id) && (id != b.late || len(b.ended) > 0) {
			all = append(all, controller.Workspace{ID: id})
		}
	}
	return all, nil
}

func (b *busy) act(_ context.Context, _ core.ProjectID, id core.WorkspaceID, _ time.Duration) (controller.Answer, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if left := b.refuse[id]; len(left) > 0 {
		b.refuse[id] = left[1:]
		select {
		case b.refused <- struct{}{}:
		default:
		}
		return controller.Answer{}, left[0]
	}
	b.ended = append(b.ended, id)
	return controller.Answer{Done: true}, nil
}

func (b *busy) settling(said *[]string) *settling {
	return &settling{
		list: b.list, act: b.act, doing: "suspending", done: "suspended", log: slog.New(slog.DiscardHandler), over: map[core.WorkspaceID]bool{},
		report: func(format string, a ...any) { *said = append(*said, fmt.Sprintf(format, a...)) },
	}
}

// TestSettleBusyWorkspaces: a workspace that starts, has a checkpoint or appears late is suspended too. One that cannot be suspended is left.
func TestSettleBusyWorkspaces(t *testing.T) {
	t.Parallel()
	conflict := core.Errorf(core.Conflict, core.CodeStateConflict, "a checkpoint runs")
	early := core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "it starts")
	full := core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "no room")
	b := &busy{refuse: map[core.WorkspaceID][]error{"ready": nil, "checkpointing": {conflict, conflict}, "creating": {early}, "late": nil, "full": {full}}, late: "late"}
	var said []string
	b.settling(&said).run(t.Context())
	slices.Sort(b.ended)
	if want := []core.WorkspaceID{"checkpointing", "creating", "late", "ready"}; !slices.Equal(b.ended, want) {
		t.Errorf("%v were suspended, want %v", b.ended, want)
	}
	if last := said[len(said)-1]; last != "4 of 5 workspaces suspended" || !strings.Contains(said[0], "Ctrl-C again") {
		t.Errorf("%q", said)
	}
}

// TestSettleHurries: a workspace that stays busy does not keep somebody who hurries.
func TestSettleHurries(t *testing.T) {
	t.Parallel()
	conflict := core.Errorf(core.Conflict, core.CodeStateConflict, "a checkpoint runs")
	b := &busy{refuse: map[core.WorkspaceID][]error{"busy": slices.Repeat([]error{conflict}, 1_000_000)}, refused: make(chan struct{}, 1)}
	ctx, hurry := context.WithCancel(t.Context())
	go func() {
		<-b.refused
		hurry()
	}()
	var said []string
	b.settling(&said).run(ctx)
	if len(b.ended) != 0 || said[len(said)-1] != "0 of 1 workspace suspended" {
		t.Errorf("%v, %q", b.ended, said)
	}
}
