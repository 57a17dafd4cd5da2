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
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/hostlimit"
	"github.com/coppice-dev/coppice/runner/netns"
)

// egressLink is the connection to the egress process of this host. That process proxies the traffic that the rules of sandboxes under deny-all
// allow. The link gives it the sockets of the sandboxes. When the process ends, the link gives them to its successor.
type egressLink struct {
	r *Runner

	mu     sync.Mutex     // guards what follows
	client *egress.Client // nil: no process runs at this moment
	key    []byte         // the key of the process; controllers encrypt grants for it
	news   chan struct{}  // closed when another client replaces client

	ended, hung atomic.Int64 // numbers of processes that ended by themselves, and that were killed because they hung

	patience time.Duration // how long the process may take to accept rules; the caller may give up earlier
}

func newEgressLink(r *Runner) *egressLink {
	return &egressLink{r: r, news: make(chan struct{}), patience: egressCallTime}
}

// egressCallTime is longer than the egress client's own bound for a call, because the client's error says more.
const egressCallTime = 20 * time.Second

// The waits before an attempt is repeated.
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

// checkRules refuses rules that this runner could not enforce.
func (r *Runner) checkRules(opened core.EgressPolicy, rules runnerapi.EgressRules) error {
	if opened != core.EgressProxied && len(rules.Allow)+len(rules.Grants) > 0 && opened != core.EgressAllowAll {
		return core.Errorf(core.Invalid, core.CodeUnsupported,
			"this runner has no egress process, or had none when the sandbox was made, so nothing leaves it and network.allow must be empty; start the runner without --egress off")
	}
	_, err := policy.Parse("egress_rules.allow", rules.Allow)
	return err
}

// set replaces the client in use and the key of its process; nil: there is none. The controllers are told soon, because they encrypt grants for
// this key.
func (e *egressLink) set(c *egress.Client, key []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.client, e.key = c, key
	close(e.news)
	e.news = make(chan struct{})
	e.r.wake()
}

// reach returns the key that controllers encrypt grants for, and the address of base URLs for guests. Both are empty while no process runs.
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
			e.r.cfg.Log.ErrorContext(ctx, "no egress process was started, so no traffic leaves the sandboxes", "again_ms", core.Milliseconds(wait), "err", err)
			_ = pace.Pause(ctx, wait)
			wait = min(2*wait, lastEgressPause)
			continue
		}
		err := e.attend(ctx, c)
		if ctx.Err() == nil {
			e.set(nil, nil)
			if errors.Is(err, sidecar.ErrHung) {
				e.hung.Add(1)
			} else {
				e.ended.Add(1)
			}
			e.r.cfg.Log.ErrorContext(ctx, "the egress process has ended; no traffic leaves the sandboxes until another process serves them", "err", err)
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
				e.r.cfg.Log.WarnContext(ctx, "the egress process has not accepted every sandbox; they are offered again", "again_ms", core.Milliseconds(wait), "err", err)
			}
			_ = pace.Pause(offering, wait)
		}
		for pace.Pause(offering, lessPause) == nil {
			e.restore(offering, c)
		}
	})
	return c.Attend(ctx)
}

// reconcile makes a process serve exactly the sandboxes that it should, by their newest rules.
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

// offer makes a process serve a sandbox, unless it does already.
func (e *egressLink) offer(ctx context.Context, c *egress.Client, s *sandbox, was egressapi.Served, there bool) error {
	s.egressMu.Lock()
	defer s.egressMu.Unlock()
	if !s.served { // maybe it is being made and has no rules yet
		return nil
	}
	rules := s.rules()
	switch {
	case s.told.by == c: // it serves the sandbox, maybe only since it was asked for its list
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

// tellOrLess is tell. If the process does not accept the rules, it makes the process enforce less. The end of the caller's ctx is not such a
// refusal. The caller holds the sandbox's egressMu.
func (e *egressLink) tellOrLess(ctx context.Context, c *egress.Client, s *sandbox) error {
	err := e.tell(ctx, c, s)
	if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		err = e.reduce(ctx, c, s, err)
	}
	return err
}

// tell gives a sandbox's rules to the process that serves the sandbox. The caller holds the sandbox's egressMu.
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
	by    *egress.Client // the client of this process; its successor has another client
	rules runnerapi.EgressRules
	less  bool      // it has not accepted these rules, and enforces less
	tried time.Time // with less: when the rules were given last
	cut   bool      // it has accepted nothing, and no longer serves the sandbox
}

// has reports whether a process is known to have rules.
func (t told) has(c *egress.Client, rules runnerapi.EgressRules) bool {
	return t.by == c && !t.less && !t.cut && sameRules(t.rules, rules)
}

// sameRules compares the rules that were given. Rules of the same version may have been encrypted again, for another process or with a changed
// secret.
func sameRules(a, b runnerapi.EgressRules) bool {
	return a.Version == b.Version && bytes.Equal(a.Grants, b.Grants)
}

// put opens the sockets of a sandbox and gives them to a process. The caller holds the sandbox's egressMu.
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

// begin makes the process serve a sandbox until end.
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
		_ = pace.Pause(ctx, firstEgressPause) // run notices it too, and starts another process
	}
}

// end stops serving a sandbox. If this fails, the sandbox's namespace is still in use, so it is deleted and not recycled.
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

// stop ends the egress process, which no longer serves any sandbox. It also ends the process of an
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

// rules are the rules in the sandbox's journal. A sandbox that is being made has no journal yet; one that is served has.
func (s *sandbox) rules() runnerapi.EgressRules {
	s.journalMu.Lock()
	defer s.journalMu.Unlock()
	return s.Sandbox.Rules
}

// SetEgressRules replaces the rules of a sandbox, unless the sandbox has newer ones. When it returns without an error, the rules are in the
// journal. The process that serves the sandbox has acknowledged them, so connections that are no longer allowed have ended; or this process has
// ended itself, and its successor begins with these rules. After an error the caller must give the same rules again: neither they nor the old
// ones are in force. If rules cannot be read, or the process does not accept them, the sandbox gets less (reduce).
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
	if unread != nil { // the old rules are no longer in force either
		rules = denyRules(rules)
	}
	// The journal is written first: whatever process ends from here on, nothing returns to the old rules. If the journal cannot be written, the
	// process is told anyway, because the removal of an entry must not wait for a disk.
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
// If the caller stops waiting, this says nothing about the process and changes nothing. The caller holds the sandbox's egressMu.
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

// Flows acknowledges records of flows up to a number and waits for more. Records that were not acknowledged are returned again.
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
		_ = pace.Pause(ctx, wait) // run notices it too
	}
	return nil, 0, context.Cause(ctx)
}

// trustBundle has the certificates that the guest trusts, including its project's authority.
const trustBundle = "/etc/ssl/certs/ca-certificates.crt"

// sessionEnv is the environment of a sandbox's sessions: the sandbox's own variables. If the sandbox is proxied, it also has the address of the
// proxy and the list of certificates for programs that have a list of their own, unless the sandbox's own variables name them.
func sessionEnv(own map[string]string, opened core.EgressPolicy, gateway netip.Addr, trusts bool) map[string]string {
	out := maps.Clone(own)
	if out == nil {
		out = map[string]string{} // empty: it replaces the captured environment
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
