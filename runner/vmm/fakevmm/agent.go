package fakevmm

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"log/slog"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/fakeguest"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/link"
)

// Agent is the guest of package fakeguest. Its state is in the machine's RAM.
func Agent(ctx context.Context, c *Computer) { serveAgent(ctx, c) }

// OldAgent is Agent with an agent that is too old for some features.
func OldAgent(lacks ...string) Guest {
	return func(ctx context.Context, c *Computer) { serveAgent(ctx, c, lacks...) }
}

func serveAgent(ctx context.Context, c *Computer, lacks ...string) {
	hook := func(ctx context.Context, step string) error { return c.Reach(ctx, Step(step)) }
	hosts := link.New(fakeguest.New(agentMemory{c, lacks}, hook), slog.New(slog.DiscardHandler))
	for {
		conn, err := c.Accept(ctx)
		if err != nil {
			return
		}
		if c.Reach(ctx, AgentStep("handshake")) == nil {
			_ = hosts.Serve(ctx, guestapi.NewChannel(conn)) // ends with the connection
		}
		_ = conn.Close() // closed before, or of a host that was not served
	}
}

// agentMemory is RAM as the memory of the Agent.
type agentMemory struct {
	c     *Computer
	lacks []string
}

// The form of RAM: a magic, the length of the rest, and the state as JSON.
const (
	agentMagic = "coppice fake agent 2\n"
	agentHead  = len(agentMagic) + 8
)

// agentOutput bounds the kept output of a stream: RAM is small, and every change writes the whole state.
const agentOutput = 64 << 10

var errMemoryFull = core.Errorf(core.Exhausted, core.CodeDiskFull, "the state of the fake guest does not fit into its RAM")

// Do implements fakeguest.Memory.
func (m agentMemory) Do(change bool, fn func(s *fakeguest.State) error) error {
	var err error
	gone := m.c.Do(func(ram []byte) {
		var s *fakeguest.State
		if s, err = m.load(ram); err != nil {
			return
		}
		s.Uptime = m.c.Uptime()
		if err = fn(s); err == nil && change {
			err = store(s, ram)
		}
	})
	if gone != nil {
		return gone
	}
	return err
}

// load reads the state; a machine that was just switched on has none.
func (m agentMemory) load(ram []byte) (*fakeguest.State, error) {
	if !bytes.HasPrefix(ram, []byte(agentMagic)) {
		s := fakeguest.NewState()
		s.OutputBytes, s.Lacks = agentOutput, m.lacks
		m.c.Print([]byte("fake guest " + s.BootNonce + " is up\n"))
		return s, nil
	}
	n := binary.LittleEndian.Uint64(ram[len(agentMagic):])
	if n > uint64(len(ram)-agentHead) {
		return nil, errors.New("the RAM of the fake guest is damaged")
	}
	s := &fakeguest.State{}
	return s, json.Unmarshal(ram[agentHead:agentHead+int(n)], s)
}

func store(s *fakeguest.State, ram []byte) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if len(b) > len(ram)-agentHead {
		return errMemoryFull
	}
	copy(ram, agentMagic)
	binary.LittleEndian.PutUint64(ram[len(agentMagic):], uint64(len(b)))
	copy(ram[agentHead:], b)
	return nil
}
