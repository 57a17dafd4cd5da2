package host

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/proxy"
	"github.com/coppice-dev/coppice/egress/resolver"
)

// counters count the outcomes of flows and DNS questions.
type counters struct {
	tooLong atomic.Int64 // answers too long for a message

	mu      sync.Mutex // guards the fields below
	flows   map[core.Outcome]int64
	answers map[string]int64
}

func (c *counters) ended(o core.Outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flows == nil {
		c.flows = map[core.Outcome]int64{}
	}
	c.flows[o]++
}

func (c *counters) answered(a resolver.Answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.answers == nil {
		c.answers = map[string]int64{}
	}
	c.answers[string(a)]++
}

// counted is a journal that counts the outcomes of its flows.
type counted struct {
	proxy.Journal
	to *counters
}

// Begin counts a flow that is denied.
func (c counted) Begin(f core.Flow) error {
	err := c.Journal.Begin(f)
	if err == nil && f.Outcome == core.FlowDenied {
		c.to.ended(f.Outcome)
	}
	return err
}

// End counts a flow that has ended.
func (c counted) End(f core.Flow) {
	c.to.ended(f.Outcome)
	c.Journal.End(f)
}

func (s *Server) measure() *egressapi.Stats {
	out := &egressapi.Stats{SpoolMax: s.cfg.MaxSpool}
	s.mu.Lock()
	out.Sandboxes = len(s.sandboxes)
	s.mu.Unlock()
	s.stats.mu.Lock()
	out.Flows, out.Answers = maps.Clone(s.stats.flows), maps.Clone(s.stats.answers)
	s.stats.mu.Unlock()
	s.spool.mu.Lock()
	out.Open, out.SpoolBytes, out.Unrecorded = len(s.spool.open), s.spool.bytes, s.spool.unsaid
	out.SetAside, out.TooLong = maps.Clone(s.spool.aside.found), s.stats.tooLong.Load()
	s.spool.mu.Unlock()
	return out
}
