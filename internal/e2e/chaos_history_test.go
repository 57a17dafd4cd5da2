package e2e

import (
	"encoding/json"
	"flag"
	"os"
	"strings"
	"sync"
	"time"
)

var chaosHistory = flag.String("chaos-history", "", "a file for what TestChaos did and was told, one JSON object a line")

// event is one thing that was done, and what came of it.
type event struct {
	AtMS    int64  `json:"at_ms"` // when it was known, since the beginning
	Who     string `json:"who"`
	What    string `json:"what"`
	Object  string `json:"object,omitempty"`
	Outcome string `json:"outcome,omitempty"`
}

// history is what happened in a run, in the order in which it became known.
type history struct {
	begun time.Time

	mu     sync.Mutex // guards events
	events []event
}

func (h *history) note(who, what, object, outcome string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event{time.Since(h.begun).Milliseconds(), who, what, object, strings.ReplaceAll(outcome, "\n", " ")})
}

// summary says what was done, and keeps the history when it was asked for or something is wrong.
func (x *chaos) summary(trees []*tree) {
	x.t.Helper()
	x.history.mu.Lock()
	defer x.history.mu.Unlock()
	faults := map[string]int{}
	for _, e := range x.events {
		if e.Who == "nemesis" {
			faults[e.What]++
		}
	}
	for _, tr := range trees {
		x.t.Logf("%s: %d forks, %d steps, %d checkpoints, %d restores in place, %d machines lost with cause; in the end %d checkpoints and %d workspaces were looked into",
			tr.name, tr.forks, tr.steps, tr.checkpoints, tr.restores, tr.lost, len(tr.nodes), len(tr.branches))
	}
	x.t.Logf("faults: %v", faults)
	var b strings.Builder
	for _, e := range x.events {
		line, err := json.Marshal(e)
		if err != nil {
			x.t.Fatal(err)
		}
		b.Write(append(line, '\n'))
	}
	if *chaosHistory != "" {
		if err := os.WriteFile(*chaosHistory, []byte(b.String()), 0o600); err != nil {
			x.t.Error(err)
		}
	} else if x.t.Failed() {
		x.t.Logf("the history:\n%s", b.String())
	}
}
