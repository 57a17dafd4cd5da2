package egresslink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/hostlimit"
	"github.com/coppice-dev/coppice/runner/netns"
)

// Namespace is the network of one sandbox, as netns.Namespace implements it.
type Namespace interface {
	Assign(ctx context.Context, id core.Identity) error
	Open(ctx context.Context, policy core.EgressPolicy) error
	// EgressSockets opens the sockets that the egress process serves for a namespace under core.EgressProxied or core.EgressAllowAll.
	EgressSockets(ctx context.Context) (netns.EgressSockets, error)
	// Check compares the rules in the kernel with those that were applied. If they differ, it cuts the guest off until Open and returns
	// netns.ErrRulesDiffer.
	Check(ctx context.Context) error
}

// SandboxConfig says what the link needs of a sandbox. Every field is required.
type SandboxConfig struct {
	ID          core.SandboxID
	WorkspaceID core.WorkspaceID
	Epoch       int64 // of its workspace
	Identity    core.Identity
	Namespace   Namespace
	// Record writes rules into the journal of the sandbox.
	Record func(runnerapi.EgressRules) error
	// Open reports whether its network should be open: it was released, and has not ended.
	Open func() bool
	// Try begins an operation on the sandbox, unless another one is under way or the sandbox has ended. release ends it.
	Try func() (release func(), ok bool)
}

// Sandbox has the egress rules of one sandbox, and what the egress process has of them. It is safe for concurrent use.
type Sandbox struct {
	cfg  SandboxConfig
	link *Link
	id   core.SandboxID

	mu        sync.Mutex            // held while the sandbox is given to the process, or its rules change; guards what follows
	made      bool                  // SetFirst has set the next two
	opened    core.EgressPolicy     // what its namespace is opened with
	rules     runnerapi.EgressRules // the newest; those in its journal, unless unwritten
	served    bool                  // the process serves it, or will do so as soon as one runs again
	acked     acked                 // what the process is known to have of its rules
	cut       bool                  // its network rules were not those that were applied: no traffic passes until they are again
	unwritten bool                  // its rules are newer than those in the file of the journal
}

// Sandbox returns the part of a sandbox that the link works with. The link does nothing with it before Serve or Adopt.
func (l *Link) Sandbox(cfg SandboxConfig) *Sandbox { return &Sandbox{cfg: cfg, link: l, id: cfg.ID} }

// SetFirst sets what the journal of the sandbox has: the policy that its namespace is opened with (OpenedWith), and its rules. SetRules works from
// then on.
func (s *Sandbox) SetFirst(opened core.EgressPolicy, rules runnerapi.EgressRules) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.made, s.opened, s.rules = true, opened, rules
}

// Serve makes the process serve the sandbox until End. It waits for a process for a while. It does nothing if the process has nothing to serve for it.
func (s *Sandbox) Serve(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, serveTime)
	defer cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.link.serves(s.opened) {
		return nil
	}
	s.link.give(s) // first: a process that comes meanwhile must not miss it
	err := s.serve(ctx)
	if s.served = err == nil; err != nil {
		s.link.takeBack(s)
		return fmt.Errorf("hand sandbox %s to the egress process: %w", s.id, err)
	}
	return nil
}

// serveTime is how long a sandbox that is being made waits for the process.
const serveTime = 10 * time.Second

// serve gives the sandbox to the process that runs, or comes. The caller holds mu.
func (s *Sandbox) serve(ctx context.Context) error {
	for {
		c, err := s.link.await(ctx)
		if err != nil {
			return err
		}
		err = s.put(ctx, c, s.rules)
		if err == nil {
			return nil
		}
		if !errors.Is(err, egress.ErrGone) {
			return errors.Join(err, ignoreGone(c.Remove(ctx, s.id)))
		}
		_ = pace.Pause(ctx, firstPause) // Run notices it too, and starts another process
	}
}

// Adopt makes the process serve a sandbox of an earlier runner, if it has something to serve for it. The process may serve it already.
func (s *Sandbox) Adopt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link.serves(s.opened) {
		s.served = true
		s.link.give(s)
	}
}

// End stops serving the sandbox. If this fails, the sandbox's namespace is still in use, so it is deleted and not recycled.
func (s *Sandbox) End(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(ctx)
}

// end is End for a caller that holds mu.
func (s *Sandbox) end(ctx context.Context) {
	if !s.served {
		return
	}
	s.served, s.acked = false, acked{}
	s.link.takeBack(s)
	if c, _ := s.link.current(); c != nil {
		if err := ignoreGone(c.Remove(ctx, s.id)); err != nil {
			s.link.cfg.Log.WarnContext(ctx, "the egress process was not told of the end of a sandbox", "sandbox_id", s.id, "err", err)
		}
	}
}

// SetRules replaces the rules of a sandbox, unless the sandbox has newer ones. When it returns without an error, the rules are in the
// journal. The process that serves the sandbox has acknowledged them, so connections that are no longer allowed have ended; or this process has
// ended itself, and its successor begins with these rules. After an error the caller must give the same rules again: neither they nor the old
// ones are in force. If rules cannot be read, or the process does not accept them, the sandbox gets less (reduce).
func (s *Sandbox) SetRules(ctx context.Context, rules runnerapi.EgressRules) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.made {
		return core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "sandbox %s is being made; its rules can be changed in a moment", s.id)
	}
	unread := CheckRules(s.opened, rules)
	if unread != nil { // the old rules are no longer in force either
		rules = denyRules(rules)
	}
	// The journal is written first: whatever process ends from here on, nothing returns to the old rules. If the journal cannot be written, the
	// process is told anyway, because the removal of an entry must not wait for a disk.
	var unwritten error
	if is := s.rules; rules.Version > is.Version || rules.Version == is.Version && !sameRules(rules, is) || s.unwritten {
		if rules.Version >= is.Version {
			s.rules = rules
		}
		unwritten = s.cfg.Record(s.rules)
		if s.unwritten = unwritten != nil; s.unwritten {
			unwritten = notWritten(s.id, rules, unwritten)
		}
	}
	return errors.Join(unread, unwritten, s.enforce(ctx))
}

// notWritten is a fault of the host, not of the rules. The controller gives the rules again.
func notWritten(id core.SandboxID, rules runnerapi.EgressRules, err error) error {
	do := "read the log of the runner"
	if code, limit := hostlimit.Met(err); code != "" {
		do = limit
	}
	return core.Wrapf(err, core.Unavailable, core.CodeRulesNotWritten,
		"the rules of sandbox %s at version %d are in force, but could not be written to the runner's disk; they are given again: %s", id, rules.Version, do)
}

// enforce returns nil when the sandbox's traffic passes only by its rules: the process has acknowledged them, or will get them with the sandbox.
// If the caller stops waiting, this says nothing about the process and changes nothing. The caller holds mu.
func (s *Sandbox) enforce(ctx context.Context) error {
	c, _ := s.link.current()
	if !s.served || c == nil || s.acked.has(c, s.rules) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.link.patience)
	defer cancel()
	if s.acked.by == c && s.acked.cut {
		return s.putOrLess(ctx, c)
	}
	return s.sendOrLess(ctx, c)
}

// offer makes a process serve the sandbox, unless it does already.
func (s *Sandbox) offer(ctx context.Context, c *egress.Client, was egressapi.Served, there bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.served: // it has ended meanwhile
		return nil
	case s.acked.by == c: // it serves the sandbox, maybe only since it was asked for its list
		switch {
		case s.acked.cut:
			return s.putOrLess(ctx, c)
		case s.acked.has(c, s.rules):
			return nil
		case s.acked.less && sameRules(s.acked.rules, s.rules):
			s.again(ctx, c)
			return nil
		}
		return s.sendOrLess(ctx, c)
	case !there:
		return s.putOrLess(ctx, c)
	case was.Version < s.rules.Version || was.Lacks:
		return s.sendOrLess(ctx, c)
	}
	return nil
}

// sendOrLess is send. If the process does not accept the rules, it makes the process enforce less. The end of the caller's ctx is not such a
// refusal. The caller holds mu.
func (s *Sandbox) sendOrLess(ctx context.Context, c *egress.Client) error {
	err := s.send(ctx, c)
	if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		err = s.reduce(ctx, c, err)
	}
	return err
}

// send gives the sandbox's rules to the process that serves the sandbox. The caller holds mu.
func (s *Sandbox) send(ctx context.Context, c *egress.Client) error {
	err := c.SetRules(ctx, s.id, s.rules)
	if err == nil {
		s.acked = acked{by: c, rules: s.rules}
	}
	return err
}

// acked are rules that a process has acknowledged.
type acked struct {
	by    *egress.Client // the client of this process; its successor has another client
	rules runnerapi.EgressRules
	less  bool      // it has not accepted these rules, and enforces less
	tried time.Time // with less: when the rules were given last
	cut   bool      // it has accepted nothing, and no longer serves the sandbox
}

// has reports whether a process is known to have rules.
func (t acked) has(c *egress.Client, rules runnerapi.EgressRules) bool {
	return t.by == c && !t.less && !t.cut && sameRules(t.rules, rules)
}

// sameRules compares the rules that were given. Rules of the same version may have been encrypted again, for another process or with a changed
// secret.
func sameRules(a, b runnerapi.EgressRules) bool {
	return a.Version == b.Version && bytes.Equal(a.Grants, b.Grants)
}

// put opens the sockets of the sandbox and gives them to a process, with rules. The caller holds mu.
func (s *Sandbox) put(ctx context.Context, c *egress.Client, rules runnerapi.EgressRules) error {
	sockets, err := s.cfg.Namespace.EgressSockets(ctx)
	if err != nil {
		return err
	}
	s.acked = acked{}
	err = c.Put(ctx, egressapi.Sandbox{ID: s.id, Epoch: s.cfg.Epoch, Rules: rules, Names: s.opened == core.EgressAllowAll}, sockets.Files())
	if err == nil {
		s.acked = acked{by: c, rules: rules}
	}
	return errors.Join(err, sockets.Close())
}
