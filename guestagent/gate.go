//go:build linux

package guestagent

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

// gate decides what the agent may do now. Its state survives the agent, so that an agent that is restarted in a frozen
// or quarantined guest keeps it frozen or quarantined.
type gate struct {
	path string

	control sync.Mutex // held during a control call, so they run one at a time
	file    int        // descriptor of the state file, once it is open; guarded by control

	mu     sync.Mutex // guards the fields below
	s      gateState
	change chan struct{} // closed at the next change of state
}

// gateState is the state that is kept across a restart of the agent.
type gateState struct {
	State      guestapi.State
	Generation string
	CaptureID  string
	Resealed   bool     // quarantined, and every step of the reseal succeeded
	Reseeded   bool     // frozen, and reseeded: the machine may go on
	Rehearsed  bool     // frozen, and provisionally resealed: only another reseal is possible
	Used       []string // every generation before this one, oldest first

	quiesced guestapi.QuiesceResponse
}

// maxGenerations bounds how many generations of a lineage are remembered. Beyond it, the oldest are forgotten.
// Generations are random, so the host does not reuse one by accident.
const maxGenerations = 4096

func loadGate(path, bootNonce string) *gate {
	g := &gate{path: path, change: make(chan struct{})}
	g.s = gateState{State: guestapi.StateReleased, Generation: "boot-" + bootNonce}
	b, err := smallfile.Read(path)
	if err != nil {
		return g
	}
	s, ok := parseState(string(b))
	if !ok {
		// The state file exists and cannot be read: whatever the state was, it is not safe to let anything run.
		g.s.State = guestapi.StateQuarantined
		return g
	}
	g.s = s
	return g
}

// stateEnd is the last line of a state that was written completely.
const stateEnd = "end"

// String encodes the state: one line for each field, then one for each earlier generation. (JSON would be a tenth of
// all code that a reseal executes.)
func (s gateState) String() string {
	flag := func(b bool) string {
		if b {
			return "yes"
		}
		return "no"
	}
	lines := append([]string{string(s.State), s.Generation, s.CaptureID, flag(s.Resealed), flag(s.Reseeded), flag(s.Rehearsed)}, s.Used...)
	return strings.Join(lines, "\n") + "\n" + stateEnd + "\n"
}

// parseState reads what String wrote. ok is false for anything else.
func parseState(text string) (s gateState, ok bool) {
	text, _, whole := strings.Cut(text, "\n"+stateEnd+"\n") // the rest is left over from a longer state
	f := strings.Split(text, "\n")
	if !whole || len(f) < 6 || f[1] == "" {
		return s, false
	}
	s = gateState{
		State: guestapi.State(f[0]), Generation: f[1], CaptureID: f[2], Resealed: f[3] == "yes", Reseeded: f[4] == "yes", Rehearsed: f[5] == "yes", Used: f[6:],
	}
	return s, s.State == guestapi.StateReleased || s.State == guestapi.StateFrozen || s.State == guestapi.StateQuarantined
}

// get returns the state.
func (g *gate) get() gateState {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.s
	s.Used = slices.Clone(s.Used)
	return s
}

// set changes the state. The caller holds control.
func (g *gate) set(s gateState) error {
	if over := len(s.Used) - maxGenerations; over > 0 {
		s.Used = s.Used[over:]
	}
	if err := g.keep(s); err != nil {
		return core.Wrapf(err, core.Internal, core.CodeInternal, "the agent's state cannot be saved: %v", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.s = s
	close(g.change)
	g.change = make(chan struct{})
	return nil
}

// keep writes the state in place, with one call. A later agent reads all of it, or, if this agent was killed during the
// call, a text without an end. (A new file and a rename take several times as long as all other bookkeeping of a
// reseal.)
func (g *gate) keep(s gateState) error {
	if g.file == 0 {
		fd, err := smallfile.Open(g.path, unix.O_WRONLY|unix.O_CREAT, 0o600)
		if err != nil {
			return smallfile.PathError("open", g.path, err)
		}
		g.file = fd
	}
	b := []byte(s.String())
	if n, err := unix.Pwrite(g.file, b, 0); err != nil || n < len(b) {
		return smallfile.PathError("write", g.path, errors.Join(err, io.ErrShortWrite))
	}
	return nil
}

// pass lets a public request through when the workload runs. It waits while the guest is frozen for a capture.
func (g *gate) pass(ctx context.Context) error {
	for {
		g.mu.Lock()
		state, change := g.s.State, g.change
		g.mu.Unlock()
		switch state {
		case guestapi.StateReleased:
			return nil
		case guestapi.StateQuarantined:
			return core.Errorf(core.FailedPrecondition, guestapi.CodeQuarantined, "the sandbox is quarantined: nothing may run in it until it is released")
		case guestapi.StateFrozen:
		}
		select {
		case <-change:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// used reports whether this guest has or had a generation.
func (s gateState) used(generation string) bool {
	return generation == s.Generation || slices.Contains(s.Used, generation)
}
