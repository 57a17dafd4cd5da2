package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/netns"
)

// egressLink is the way to the egress process of this host, which carries what sandboxes under deny-all send out, as far as their rules go.
// Sandboxes are handed to it as sockets, and to its successor when it ends.
type egressLink struct {
	r *Runner

	mu     sync.Mutex     // guards what follows
	client *egress.Client // nil: there is none at this moment
	key    []byte         // of it, that grants are sealed for
	news   chan struct{}  // closed when it is another

	ended, hung atomic.Int64 // processes that ended by themselves, or were killed because they hung

	patience time.Duration // for rules to be taken, however long who gives them waits
}

func newEgressLink(r *Runner) *egressLink {
	return &egressLink{r: r, news: make(chan struct{}), patience: egressCallTime}
}

// egressCallTime is longer than the bound of the egress client for a call, whose error says more.
const egressCallTime = 20 * time.Second

// How often what did not work is tried again.
const (
	firstEgressPause = 20 * time.Millisecond
	lastEgressPause  = time.Second
)

// egressPatience is how long a sandbox that is being made waits for the process.
const egressPatience = 10 * time.Second

// openedWith is what the namespace of a sandbox with a policy is opened with.
func (r *Runner) openedWith(p core.EgressPolicy) core.EgressPolicy {
	if p == core.EgressDenyAll && r.cfg.Egress != nil {
		return core.EgressProxied
	}
	return p
}

// checkRules refuses what this runner could not enforce.
func (r *Runner) checkRules(opened core.EgressPolicy, rules runnerapi.EgressRules) error {
	if opened != core.EgressProxied && len(rules.Allow)+len(rules.Grants) > 0 && opened != core.EgressAllowAll {
		return core.Errorf(core.Invalid, core.CodeUnsupported,
			"this runner has no egress process, or had none when the sandbox was made, so nothing leaves it and network.allow must be empty; start the runner without --egress off")
	}
	_, err := policy.Parse("egress_rules.allow", rules.Allow)
	return err
}

// set makes a client, by the key of its process, the one to use; nil for none. The controllers are told soon: grants are sealed for a key.
func (e *egressLink) set(c *egress.Client, key []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.client, e.key = c, key
	close(e.news)
	e.news = make(chan struct{})
	e.r.wake()
}

// reach is what controllers seal grants for, and where guests find base URLs; nothing while there is no process.
func (e *egressLink) reach() (key []byte, url string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	gateway, _ := e.r.cfg.Network.Gateway()
	if e.client == nil || !gateway.IsValid() {
		return nil, ""
	}
	return e.key, proxyURL(gateway)
}

func proxyURL(gateway netip.Addr) string {
	return "http://" + netip.AddrPortFrom(gateway, netns.PortProxy).String()
}

func (e *egressLink) current() (*egress.Client, <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.client, e.news
}

// await waits for a process.
func (e *egressLink) await(ctx context.Context) (*egress.Client, error) {
	for {
		c, news := e.current()
		if c != nil {
			return c, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, errors.Join(egress.ErrGone, context.Cause(ctx))
		}
	}
}

// start makes sure that a process runs.
func (e *egressLink) start(ctx context.Context) error {
	c, hello, err := egress.Ensure(ctx, *e.r.cfg.Egress)
	if err != nil {
		return err
	}
	e.set(c, hello.Key)
	e.r.cfg.Log.InfoContext(ctx, "egress process is there", "pid", hello.PID, "instance", hello.Instance)
	return nil
}

// run keeps a process running, with all sandboxes, until ctx ends.
func (e *egressLink) run(ctx context.Context) {
	if e.r.cfg.Egress == nil {
		return
	}
	wait := firstEgressPause
	for ctx.Err() == nil {
		c, _ := e.current()
		if c == nil {
			err := e.start(ctx)
			if err == nil || ctx.Err() != nil {
				wait = firstEgressPause
				continue
			}
			e.r.cfg.Log.ErrorContext(ctx, "no egress process was started, and nothing leaves the sandboxes", "again_ms", core.Milliseconds(wait), "err", err)
			pause(ctx, wait)
			wait = min(2*wait, lastEgressPause)
			continue
		}
		err := e.attend(ctx, c)
		if ctx.Err() == nil {
			e.set(nil, nil)
			if errors.Is(err, egress.ErrHung) {
				e.hung.Add(1)
			} else {
				e.ended.Add(1)
			}
			e.r.cfg.Log.ErrorContext(ctx, "the egress process has ended; nothing leaves the sandboxes until another has them", "err", err)
		}
	}
}

// attend offers the sandboxes to a process and waits until it ends, or ctx does.
func (e *egressLink) attend(ctx context.Context, c *egress.Client) error {
	offering, stop := context.WithCancel(ctx)
	var offers sync.WaitGroup
	defer offers.Wait()
	defer stop()
	offers.Go(func() {
		for wait := firstEgressPause; offering.Err() == nil; wait = min(2*wait, lastEgressPause) {
			err := e.reconcile(offering, c)
			if err == nil {
				break
			}
			if offering.Err() == nil {
				e.r.cfg.Log.WarnContext(ctx, "the egress process has not taken every sandbox; they are offered again", "again_ms", core.Milliseconds(wait), "err", err)
			}
			pause(offering, wait)
		}
		for pause(offering, lessPause); offering.Err() == nil; pause(offering, lessPause) {
			e.restore(offering, c)
		}
	})
	return c.Attend(ctx)
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// reconcile has a process serve the sandboxes that it should, by their newest rules, and no other.
func (e *egressLink) reconcile(ctx context.Context, c *egress.Client) error {
	list, err := c.List(ctx)
	if err != nil {
		return err
	}
	served := make(map[core.SandboxID]egressapi.Served, len(list))
	var errs []error
	for _, s := range list {
		served[s.ID] = s
		if _, err := e.r.find(s.ID); core.CategoryOf(err) == core.NotFound {
			errs = append(errs, c.Remove(ctx, s.ID))
		}
	}
	for _, s := range e.r.all() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		was, there := served[s.info.ID]
		if err := e.offer(ctx, c, s, was, there); err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s: %w", s.info.ID, err))
		}
	}
	return errors.Join(errs...)
}

// offer has a process serve a sandbox, unless it does.
func (e *egressLink) offer(ctx context.Context, c *egress.Client, s *sandbox, was egressapi.Served, there bool) error {
	s.egressMu.Lock()
	defer s.egressMu.Unlock()
	rules := s.rules()
	switch {
	case !s.served:
		return nil
	case s.told.by == c: // it has taken it, maybe since it was asked for its list
		switch {
		case s.told.cut:
			return e.putOrLess(ctx, c, s)
		case s.told.has(c, rules):
			return nil
		case s.told.less && sameRules(s.told.rules, rules):
			e.again(ctx, c, s)
			return nil
		}
		return e.tellOrLess(ctx, c, s)
	case !there:
		return e.putOrLess(ctx, c, s)
	case was.Version < rules.Version || was.Lacks:
		return e.tellOrLess(ctx, c, s)
	}
	return nil
}

// tellOrLess is tell, and has the process enforce less where it does not take the rules, which the end of ctx by who gave it does not say. The caller
// holds its egressMu.
func (e *egressLink) tellOrLess(ctx context.Context, c *egress.Client, s *sandbox) error {
	err := e.tell(ctx, c, s)
	if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		err = e.reduce(ctx, c, s, err)
	}
	return err
}

// tell gives a process that serves a sandbox its rules. The caller holds its egressMu.
func (e *egressLink) tell(ctx context.Context, c *egress.Client, s *sandbox) error {
	rules := s.rules()
	err := c.SetRules(ctx, s.info.ID, rules)
	if err == nil {
		s.told = told{by: c, rules: rules}
	}
	return err
}

// told are rules that a process has acknowledged.
type told struct {
	by    *egress.Client // of one process: its successor has another
	rules runnerapi.EgressRules
	less  bool      // it has not taken these rules, and enforces less
	tried time.Time // of less: when they were given last
	cut   bool      // it has taken nothing, and serves the sandbox no more
}

// has reports whether a process is known to have rules.
func (t told) has(c *egress.Client, rules runnerapi.EgressRules) bool {
	return t.by == c && !t.less && !t.cut && sameRules(t.rules, rules)
}

// sameRules compares what was given: rules of one version may have been sealed anew, for another process or with what is a secret by now.
func sameRules(a, b runnerapi.EgressRules) bool {
	return a.Version == b.Version && bytes.Equal(a.Grants, b.Grants)
}

// put opens the sockets of a sandbox and hands them over. The caller holds its egressMu.
func (e *egressLink) put(ctx context.Context, c *egress.Client, s *sandbox) error {
	return e.putWith(ctx, c, s, s.rules())
}

func (e *egressLink) putWith(ctx context.Context, c *egress.Client, s *sandbox, rules runnerapi.EgressRules) error {
	sockets, err := s.ns.EgressSockets(ctx)
	if err != nil {
		return err
	}
	s.told = told{}
	err = c.Put(ctx, egressapi.Sandbox{ID: s.info.ID, Epoch: s.info.Epoch, Rules: rules}, sockets.Files())
	if err == nil {
		s.told = told{by: c, rules: rules}
	}
	return errors.Join(err, sockets.Close())
}

// begin has a sandbox served from here on, until end.
func (e *egressLink) begin(ctx context.Context, s *sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, egressPatience)
	defer cancel()
	s.egressMu.Lock()
	defer s.egressMu.Unlock()
	for {
		c, err := e.await(ctx)
		if err != nil {
			return fmt.Errorf("hand sandbox %s to the egress process: %w", s.info.ID, err)
		}
		err = e.put(ctx, c, s)
		if err == nil {
			s.served = true
			return nil
		}
		if !errors.Is(err, egress.ErrGone) {
			return fmt.Errorf("hand sandbox %s to the egress process: %w", s.info.ID, errors.Join(err, ignoreGone(c.Remove(ctx, s.info.ID))))
		}
		pause(ctx, firstEgressPause) // run finds it out, too, and starts another
	}
}

// end has a sandbox served no more. Where that fails its namespace, which is in use, is deleted and not recycled.
func (e *egressLink) end(ctx context.Context, s *sandbox) {
	s.egressMu.Lock()
	defer s.egressMu.Unlock()
	if !s.served {
		return
	}
	s.served, s.told = false, told{}
	if c, _ := e.current(); c != nil {
		if err := ignoreGone(c.Remove(ctx, s.info.ID)); err != nil {
			e.r.cfg.Log.WarnContext(ctx, "the egress process was not told of the end of a sandbox", "sandbox_id", s.info.ID, "err", err)
		}
	}
}

func ignoreGone(err error) error {
	if errors.Is(err, egress.ErrGone) {
		return nil
	}
	return err
}

// stop ends the egress process, which serves nobody any more. It also ends the process of an
// earlier runner, if this runner has not connected to it yet.
func (e *egressLink) stop(ctx context.Context) error {
	if e.r.cfg.Egress == nil {
		return nil
	}
	c, _ := e.current()
	if c == nil {
		c = egress.NewClient(egress.SocketPath(e.r.cfg.Egress.Dir))
	}
	if err := ignoreGone(c.Stop(ctx)); err != nil {
		return fmt.Errorf("stop the egress process: %w", err)
	}
	return nil
}

// rules are those of the journal.
func (s *sandbox) rules() runnerapi.EgressRules {
	s.journalMu.Lock()
	defer s.journalMu.Unlock()
	return s.Sandbox.Rules
}

// SetEgressRules replaces what a sandbox may reach, unless its rules are newer. When it returns without an error, they are in the journal, and
// the process that serves the sandbox has acknowledged them, so that what is not allowed any more has ended; or it has ended itself, and its
// successor begins with them. After an error the same rules are to be given again, and are not taken for in force; those of before are not
// either: rules that cannot be read, or that the process does not take, leave the sandbox with less (reduce).
func (r *Runner) SetEgressRules(ctx context.Context, id core.SandboxID, rules runnerapi.EgressRules) error {
	s, err := r.find(id)
	if err != nil {
		return err
	}
	s.egressMu.Lock()
	defer s.egressMu.Unlock()
	s.journalMu.Lock()
	j := s.Sandbox
	s.journalMu.Unlock()
	if j == nil {
		return core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "sandbox %s is being made; its rules can be changed in a moment", id)
	}
	unread := r.checkRules(j.Egress, rules)
	if unread != nil { // those of before are out of force all the same
		rules = denyRules(rules)
	}
	// The journal first: whatever ends from here on, nobody goes back to the rules of before. Where it cannot be written the process is told
	// all the same: what is taken away must not wait for a disk.
	var unwritten error
	if is := s.rules(); rules.Version > is.Version || rules.Version == is.Version && !sameRules(rules, is) || s.unwritten {
		unwritten = s.record(func(j *sandboxJournal) {
			if rules.Version >= j.Rules.Version {
				j.Rules = rules
			}
		})
		if s.unwritten = unwritten != nil; s.unwritten {
			unwritten = notWritten(id, rules, unwritten)
		}
	}
	return errors.Join(unread, unwritten, r.egress.enforce(ctx, s))
}

// notWritten is a fault of the host. It says nothing against the rules, which the controller gives again.
func notWritten(id core.SandboxID, rules runnerapi.EgressRules, err error) error {
	do := "read the log of the runner"
	if code, limit := limitMet(err); code != "" {
		do = limit
	}
	return core.Wrapf(err, core.Unavailable, core.CodeRulesNotWritten,
		"the rules of sandbox %s at version %d are in force, but could not be written to the runner's disk; they are given again: %s", id, rules.Version, do)
}

// enforce returns nil when nothing of a sandbox passes but by its rules: the process has acknowledged them, or gets them with the sandbox. That
// who asked gives up waiting says nothing of the process, and changes nothing. The caller holds its egressMu.
func (e *egressLink) enforce(ctx context.Context, s *sandbox) error {
	c, _ := e.current()
	if !s.served || c == nil || s.told.has(c, s.rules()) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.patience)
	defer cancel()
	if s.told.by == c && s.told.cut {
		return e.putOrLess(ctx, c, s)
	}
	return e.tellOrLess(ctx, c, s)
}

// Flows acknowledges what sandboxes have sent out, by the last number that was given, and waits for more. What was not acknowledged is given
// again.
func (r *Runner) Flows(ctx context.Context, after int64) (flows []core.Flow, last int64, err error) {
	for wait := firstEgressPause; ctx.Err() == nil; wait = min(2*wait, lastEgressPause) {
		c, err := r.egress.await(ctx)
		if err != nil {
			break
		}
		batch, err := c.Flows(ctx, after)
		if err == nil {
			return batch.Flows, batch.Last, nil
		}
		if !errors.Is(err, egress.ErrGone) {
			return nil, 0, err
		}
		pause(ctx, wait) // run finds it out, too
	}
	return nil, 0, context.Cause(ctx)
}

// trustBundle has what the guest trusts, with its project's authority.
const trustBundle = "/etc/ssl/certs/ca-certificates.crt"

// sessionEnv is the environment of a sandbox's sessions: its own, and where it is proxied how programs find the proxy, and what they trust if
// they bring a list of their own, unless it says so itself.
func sessionEnv(own map[string]string, opened core.EgressPolicy, gateway netip.Addr, trusts bool) map[string]string {
	out := maps.Clone(own)
	if out == nil {
		out = map[string]string{} // none, instead of what was captured
	}
	if opened != core.EgressProxied {
		return out
	}
	proxy := proxyURL(gateway)
	for name, value := range map[string]string{"http_proxy": proxy, "https_proxy": proxy, "no_proxy": "localhost,127.0.0.1,::1," + gateway.String()} {
		upper := strings.ToUpper(name)
		_, low := own[name]
		_, up := own[upper]
		if !low && !up {
			out[name], out[upper] = value, value
		}
	}
	for _, name := range []string{"NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE"} {
		if _, said := own[name]; trusts && !said {
			out[name] = trustBundle
		}
	}
	return out
}
