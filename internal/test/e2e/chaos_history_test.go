package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

var chaosHistory = flag.String("chaos-history", "", "a file for what TestChaos did and was told, one JSON object a line; the deployment's name is put before its last dot")

// nemesis is who does bad things.
const nemesis = "nemesis"

// healed is what it does last.
const healed = "heal"

// event is one thing that was done, and what came of it.
type event struct {
	AtMS    int64  `json:"at_ms"` // when it was known, since the beginning
	Who     string `json:"who"`
	What    string `json:"what"`
	Object  string `json:"object,omitempty"`
	Key     string `json:"key,omitempty"` // of idempotency
	Outcome string `json:"outcome,omitempty"`
}

// history is what happened in a run, in the order in which it became known.
type history struct {
	name  string
	begun time.Time

	record struct {
		mu   sync.Mutex      // guards seen
		seen []coppice.Event // the system's own record, as it came
		end  context.CancelFunc
		done chan struct{}
	}

	mu     sync.Mutex // guards events
	events []event
}

func (h *history) note(e event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e.AtMS, e.Outcome = time.Since(h.begun).Milliseconds(), strings.ReplaceAll(e.Outcome, "\n", " ")
	h.events = append(h.events, e)
}

// summary says what was done, and keeps the history when it was asked for or something is wrong.
func (x *chaos) summary() {
	x.t.Helper()
	x.history.mu.Lock()
	defer x.history.mu.Unlock()
	faults, operations := map[string]int{}, 0
	for _, e := range x.events {
		switch {
		case e.Who != nemesis:
			operations++
		case e.What != healed && !strings.HasPrefix(e.What, "about to "):
			faults[e.What]++
		}
	}
	for _, tr := range x.trees {
		if tr == nil {
			continue
		}
		x.t.Logf("%s: %d forks, %d steps, %d checkpoints, %d restores in place, %d requests hung up on and repeated, %d machines lost with cause; in the end %d checkpoints and %d workspaces were looked into",
			tr.name, tr.forks, tr.steps, tr.checkpoints, tr.restores, tr.repeats, tr.lost, len(tr.nodes), len(tr.branches))
	}
	leaks := 0
	if x.deployment != nil {
		for _, host := range x.hosts {
			found, err := host.find()
			if err != nil {
				x.t.Error(err)
			}
			for _, list := range found {
				leaks += len(list)
			}
		}
	}
	x.t.Logf("%s: seed %d, %s, %d operations, faults %v, at rest %.1f s after the heal, %d leaks", x.name, x.seed, x.duration, operations, faults, x.took.Seconds(), leaks)
	x.keep()
}

func (x *chaos) keep() {
	var b strings.Builder
	for _, e := range x.events {
		line, err := json.Marshal(e)
		if err != nil {
			x.t.Fatal(err)
		}
		b.Write(append(line, '\n'))
	}
	switch {
	case *chaosHistory != "":
		path := *chaosHistory
		if dot := strings.LastIndexByte(path, '.'); dot > 0 {
			path = path[:dot] + "-" + x.name + path[dot:]
		}
		if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
			x.t.Error(err)
		}
	case x.t.Failed():
		x.t.Logf("the history:\n%s", b.String())
	}
}

// record follows the system's own record of all changes from the beginning on, through every fault.
func (x *chaos) record() {
	ctx, end := context.WithCancel(x.t.Context())
	x.history.record.end, x.history.record.done = end, make(chan struct{})
	x.t.Cleanup(func() {
		end()
		<-x.history.record.done
	})
	go func() {
		defer close(x.history.record.done)
		for e, err := range x.clients[0].Events(ctx, coppice.EventFilter{After: "0"}) {
			if err != nil {
				if ctx.Err() == nil {
					x.t.Errorf("the record of events broke off: %v", err)
				}
				return
			}
			x.history.record.mu.Lock()
			x.history.record.seen = append(x.history.record.seen, e)
			x.history.record.mu.Unlock()
		}
	}()
}

// watch looks at the whole every now and then, as any user can.
func (x *chaos) watch(ctx context.Context) {
	done := make(chan struct{})
	x.t.Cleanup(func() { <-done })
	go func() {
		defer close(done)
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		epochs := map[coppice.WorkspaceID]int64{}
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			short, cancel := context.WithTimeout(ctx, 5*time.Second)
			ready, err := coppice.Collect(x.clients[i%len(x.clients)].Workspaces(short, coppice.WorkspaceFilter{States: []coppice.WorkspaceState{coppice.WorkspaceReady}}))
			cancel()
			if err != nil {
				continue
			}
			x.checkUnique(ready)
			for _, w := range ready {
				if w.Epoch < epochs[w.ID] {
					x.t.Errorf("the epoch of %s was %d and is %d", w.Name, epochs[w.ID], w.Epoch)
				}
				epochs[w.ID] = w.Epoch
			}
		}
	}()
}

// checkRecord reads the system's record again, from its beginning. It must be what was seen while it was written, each event once
// and in its order, and a history that is allowed.
func (x *chaos) checkRecord() {
	x.t.Helper()
	read, err := coppice.Collect(x.clients[len(x.clients)-1].Events(x.t.Context(), coppice.EventFilter{After: "0", Present: true}))
	if err != nil {
		x.t.Errorf("read the record of events: %v", err)
		return
	}
	within(x.t, convergence, "the follower of events has seen all", func() (bool, error) {
		x.history.record.mu.Lock()
		defer x.history.record.mu.Unlock()
		return len(x.history.record.seen) >= len(read), nil
	})
	x.history.record.end()
	<-x.history.record.done
	for i, e := range x.history.record.seen {
		if i < len(read) && read[i].ID != e.ID {
			x.t.Errorf("event %d of the record is %s (%s), and its follower saw %s (%s)", i, read[i].ID, read[i].Type, e.ID, e.Type)
			break
		}
	}
	x.t.Logf("%d events were recorded", len(read))
	for _, fault := range checkHistory(read) {
		x.t.Error("by the record of events, " + fault)
	}
	x.checkAcknowledged(read)
	check, err := x.clients[0].CheckAudit(x.t.Context(), "")
	if err != nil || !check.Intact {
		x.t.Errorf("the audit log does not hold: %+v, %v", check, err)
	}
}

// checkHistory returns what is not allowed in a history.
func checkHistory(events []coppice.Event) (faults []string) {
	bad := func(format string, a ...any) { faults = append(faults, fmt.Sprintf(format, a...)) }
	states, ended, names := map[string]string{}, map[string]bool{}, map[string]string{}
	epochs := map[coppice.WorkspaceID]int64{}
	for _, e := range events {
		kind, to, _ := strings.Cut(e.Type, ".")
		var id string
		var legal bool
		switch kind {
		case "workspace":
			id, legal = e.WorkspaceID, core.WorkspaceState(e.Data.From).CanBecome(core.WorkspaceState(to))
			if e.Data.Epoch < epochs[id] {
				bad("the epoch of %s went from %d to %d", id, epochs[id], e.Data.Epoch)
			}
			epochs[id] = e.Data.Epoch
			if e.Data.From == "" {
				if other, taken := names[e.Data.Name]; taken {
					bad("%s and %s were both made as %s, of one request", other, id, e.Data.Name)
				}
				names[e.Data.Name] = id
			}
		case "checkpoint":
			id, legal = e.CheckpointID, core.CheckpointState(e.Data.From).CanBecome(core.CheckpointState(to))
		case "operation":
			if ended[e.OperationID] {
				bad("operation %s ended twice", e.OperationID)
			}
			ended[e.OperationID] = true
			continue
		default:
			continue
		}
		if e.Data.From != states[id] {
			bad("%s became %s from %q, and was %q", id, to, e.Data.From, states[id])
		}
		if e.Data.From != "" && !legal {
			bad("%s became %s from %s, which cannot be", id, to, e.Data.From)
		}
		states[id] = to
	}
	return faults
}

// checkAcknowledged wants no checkpoint that somebody was told of to have become anything but what it was, unless it was to be deleted.
func (x *chaos) checkAcknowledged(events []coppice.Event) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, e := range events {
		state, is := strings.CutPrefix(e.Type, "checkpoint.")
		if is && x.acked[e.CheckpointID] && (state == string(core.CheckpointFailed) || state == string(core.CheckpointDeleted)) {
			x.t.Errorf("checkpoint %s was acknowledged, and has become %s", e.CheckpointID, state)
		}
	}
	there := map[coppice.CheckpointID]bool{}
	for c, err := range x.clients[0].Checkpoints(x.t.Context(), coppice.CheckpointFilter{}) {
		if err != nil {
			x.t.Errorf("list the checkpoints: %v", err)
			return
		}
		there[c.ID] = c.State == coppice.CheckpointCaptured || c.State == coppice.CheckpointSealed
	}
	kept := 0
	for _, id := range slices.Sorted(maps.Keys(x.acked)) {
		if x.acked[id] {
			kept++
			if !there[id] {
				x.t.Errorf("checkpoint %s was acknowledged, and is not there", id)
			}
		}
	}
	x.t.Logf("%d acknowledged checkpoints are there", kept)
}

// TestCheckHistory shows that a history that cannot be is found.
func TestCheckHistory(t *testing.T) {
	t.Parallel()
	ws := func(from, to string, epoch int64) coppice.Event {
		return coppice.Event{Type: "workspace." + to, WorkspaceID: "ws", Data: coppice.EventData{From: from, Epoch: epoch, Name: "w"}}
	}
	whole := []coppice.Event{ws("", "restoring", 1), ws("restoring", "ready", 1), ws("ready", "lost", 2), ws("lost", "terminated", 2)}
	if faults := checkHistory(whole); len(faults) > 0 {
		t.Errorf("a good history: %q", faults)
	}
	end := coppice.Event{Type: "operation.succeeded", OperationID: "op"}
	for name, events := range map[string][]coppice.Event{
		"epochs went back":       {whole[0], ws("restoring", "ready", 0)},
		"a gap":                  {whole[0], whole[2]},
		"from the dead":          {whole[0], whole[1], whole[2], ws("lost", "ready", 2)},
		"made twice":             {whole[0], {Type: "workspace.restoring", WorkspaceID: "other", Data: coppice.EventData{Epoch: 1, Name: "w"}}},
		"ended twice":            {end, end},
		"a checkpoint came back": {{Type: "checkpoint.capturing", CheckpointID: "c"}, {Type: "checkpoint.failed", CheckpointID: "c", Data: coppice.EventData{From: "capturing"}}, {Type: "checkpoint.captured", CheckpointID: "c", Data: coppice.EventData{From: "failed"}}},
	} {
		if faults := checkHistory(events); len(faults) != 1 {
			t.Errorf("%s: %q, want one fault", name, faults)
		}
	}
}
