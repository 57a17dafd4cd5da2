package host

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/egress/proxy"
	"github.com/coppice-dev/coppice/egress/resolver"
	"github.com/coppice-dev/coppice/internal/sidecar"
)

// Config describes the egress process of a host. Fields without a note are required.
type Config struct {
	Listen *net.UnixListener // where the runner connects; the server closes it
	Spool  *os.Root          // directory of the records that are not acknowledged; only this process uses it
	Log    *slog.Logger

	UID      uint32         // the user whose processes may connect, as well as root's
	MaxSpool int64          // bytes; default 256 MiB
	Private  []netip.Prefix // networks that are not public and may be reached all the same
	Own      []netip.Prefix // networks of this installation; they may not be reached, nor may any address of this host
	Servers  []string       // names of other hosts of this installation; their addresses may not be reached
	Resolver proxy.Resolver // default: the host's
	NamesAt  []string       // name servers, host:port, that answer sandboxes that may reach everything; default: the host's
	Alone    time.Duration  // the process ends after this time without a runner; default 15 min
	Roots    *x509.CertPool // for the certificates of hosts with grants; default: those of this machine
	Denied   time.Duration  // how long denied flows of one kind are counted together; default 1 min
}

// DefaultSpool is the default bound of waiting flows in bytes: enough for two minutes at 3000 requests a second.
const DefaultSpool = 256 << 20

// DefaultAlone exceeds the time after which an absent runner has lost its leases, 10 min 15 s by default. The runner's
// sandboxes have been given up by then.
const DefaultAlone = 15 * time.Minute

// Server is an egress process.
type Server struct {
	cfg    Config
	id     string
	keys   *grant.Keys
	reach  *reach
	spool  *spool
	denied *denials
	proxy  *proxy.Server
	names  func() []string // the name servers for sandboxes that may reach everything
	stats  counters
	alone  *alone
	stop   context.CancelFunc
	done   context.Context //nolint:containedctx // ends with the server

	mu        sync.Mutex // guards sandboxes; held while put adds one
	sandboxes map[core.SandboxID]*sandbox
}

// New returns a process that does not serve any sandbox yet.
func New(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.MaxSpool == 0 {
		cfg.MaxSpool = DefaultSpool
	}
	if cfg.Alone == 0 {
		cfg.Alone = DefaultAlone
	}
	if cfg.Denied == 0 {
		cfg.Denied = deniedEvery
	}
	if cfg.Resolver == nil {
		cfg.Resolver = net.DefaultResolver
	}
	s := &Server{cfg: cfg, id: rand.Text(), sandboxes: map[core.SandboxID]*sandbox{}, names: func() []string { return cfg.NamesAt }}
	if len(cfg.NamesAt) == 0 {
		s.names = resolver.HostServers("/etc/resolv.conf")
	}
	var err error
	if s.keys, err = grant.NewKeys(); err != nil {
		return nil, err
	}
	if s.spool, err = openSpool(cfg.Spool, cfg.MaxSpool, cfg.Log); err != nil {
		return nil, err
	}
	if s.reach, err = newReach(ctx, cfg); err != nil {
		return nil, errors.Join(err, s.spool.close())
	}
	s.denied = newDenials(s.spool, cfg.Denied)
	s.done, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	s.alone = newAlone(cfg.Alone, func() {
		s.cfg.Log.ErrorContext(s.done, "no runner was connected for so long that its leases have expired; the process ends and carries no more traffic", "alone_ms", core.Milliseconds(cfg.Alone))
		s.stop()
	})
	s.proxy = proxy.New(proxy.Config{Reach: s.reach.current, Resolver: cfg.Resolver, Journal: counted{s.denied, &s.stats}, Log: cfg.Log, Roots: cfg.Roots})
	return s, nil
}

// Run serves until ctx ends or the runner stops it.
func (s *Server) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, s.stop)()
	var wg sync.WaitGroup
	wg.Go(func() { s.reach.run(s.done) })
	wg.Go(func() { s.denied.run(s.done) })
	stopped := context.AfterFunc(s.done, func() { _ = s.cfg.Listen.Close() })
	defer stopped()
	var failed error
	for {
		c, err := s.cfg.Listen.AcceptUnix()
		if err != nil {
			if s.done.Err() == nil {
				failed = err
			}
			break
		}
		wg.Go(func() { s.converse(c) })
	}
	s.stop()
	s.alone.end()
	s.mu.Lock()
	sandboxes := s.sandboxes
	s.sandboxes = map[core.SandboxID]*sandbox{}
	s.mu.Unlock()
	errs := []error{failed, s.proxy.Close()}
	for _, b := range sandboxes {
		errs = append(errs, b.resolver.Close())
	}
	wg.Wait()
	s.denied.end("")
	return errors.Join(append(errs, s.spool.close())...)
}

// permitted refuses every peer except root and the runner.
func (s *Server) permitted(c *net.UnixConn) error {
	peer, err := sidecar.Peer(c)
	if err != nil {
		return err
	}
	if peer.Uid != 0 && peer.Uid != s.cfg.UID {
		return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "process %d of user %d is not this host's runner", peer.Pid, peer.Uid)
	}
	return nil
}

// converse answers one client until the client disconnects.
func (s *Server) converse(c *net.UnixConn) {
	ctx, cancel := context.WithCancel(s.done)
	defer cancel()
	defer c.Close()
	if err := s.permitted(c); err != nil {
		s.cfg.Log.Error("a client was refused", "err", err)
		return
	}
	defer s.alone.come()()
	requests := make(chan request)
	go func() { // when a client disconnects, its waiting requests end
		defer cancel()
		for {
			var r request
			var err error
			if r.files, err = sidecar.Receive(c, &r.Request); sidecar.IsFault(err) {
				r.fault = err // it gets an error as its answer, and the connection goes on
			} else if err != nil {
				if !errors.Is(err, io.EOF) && ctx.Err() == nil {
					s.cfg.Log.Warn("a client's message was not received", "err", err)
				}
				return
			}
			select {
			case requests <- r:
			case <-ctx.Done():
				sidecar.CloseAll(r.files)
				return
			}
		}
	}()
	for {
		var r request
		select {
		case r = <-requests:
		case <-ctx.Done():
			return
		}
		out, err := s.answer(ctx, r)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			out = egressapi.Response{Problem: problemOf(err)}
		}
		err = sidecar.Send(c, out)
		if sidecar.IsFault(err) {
			s.stats.tooLong.Add(1)
			s.cfg.Log.Error("an answer was not sent", "op", core.Clip(string(r.Op)), "err", err)
			err = sidecar.Send(c, egressapi.Response{Problem: problemOf(sidecar.Fault(err))})
		}
		if r.Op == egressapi.OpStop {
			s.stop()
		}
		if err != nil {
			return
		}
	}
}

type request struct {
	egressapi.Request
	files []*os.File
	fault error // the reason why no request was read
}

func problemOf(err error) *runnerapi.Problem {
	p := runnerapi.ProblemOf(err)
	const most = 16 << 10 // a policy can have many errors
	p.Message = core.ClipText(p.Message, most)
	return p
}

// answer executes a request. It owns the request's descriptors.
func (s *Server) answer(ctx context.Context, r request) (out egressapi.Response, err error) {
	if r.fault != nil {
		return out, sidecar.Fault(r.fault)
	}
	if r.Op == egressapi.OpPut && r.Sandbox != nil && len(r.files) == egressapi.Sockets {
		return out, s.put(*r.Sandbox, r.files)
	}
	sidecar.CloseAll(r.files)
	switch r.Op {
	case egressapi.OpHello:
		return egressapi.Response{Hello: &egressapi.Hello{PID: os.Getpid(), Instance: s.id, Version: egressapi.Version, Key: s.keys.Public()}}, nil
	case egressapi.OpRules, egressapi.OpRemove:
		if r.Sandbox == nil {
			break
		}
		if r.Op == egressapi.OpRemove {
			return out, s.remove(r.Sandbox.ID)
		}
		return out, s.setRules(r.Sandbox.ID, r.Sandbox.Rules)
	case egressapi.OpList:
		list, more := s.list(r.From)
		return egressapi.Response{Served: list, More: more}, nil
	case egressapi.OpFlows:
		batch, err := s.spool.after(ctx, r.After)
		return egressapi.Response{Batch: &batch}, err
	case egressapi.OpStats:
		return egressapi.Response{Stats: s.measure()}, nil
	case egressapi.OpWatch:
		<-ctx.Done()
		return out, context.Cause(ctx)
	case egressapi.OpStop:
		return out, nil
	case egressapi.OpPut:
	}
	return out, core.Errorf(core.Invalid, core.CodeInvalidField, "the egress process does not know the request %q, or the request lacks its sandbox or its sockets", core.Clip(string(r.Op)))
}

// rules say what a sandbox may reach, and with which secrets.
type rules struct {
	proxy.Rules
	lacks bool // it has grants that were encrypted for another process
}

func (s *Server) parse(id core.SandboxID, r runnerapi.EgressRules) (out rules, err error) {
	if out.Policy, err = policy.Parse("allow", r.Allow); err != nil {
		return out, fmt.Errorf("rules of version %d: %w", r.Version, err)
	}
	for _, text := range r.Held {
		h, port, err := policy.ParseHostPort(text)
		if err != nil {
			return out, fmt.Errorf("rules of version %d: a host of the grants: %w", r.Version, err)
		}
		out.Held = append(out.Held, grant.Target{Host: h, Port: port})
	}
	if len(r.Grants) == 0 {
		return out, nil
	}
	if out.lacks = !bytes.Equal(r.Key, s.keys.Public()); out.lacks {
		s.cfg.Log.Warn("grants were encrypted for another egress process and are not served", "sandbox_id", id, "version", r.Version)
		return out, nil
	}
	out.Grants, err = s.keys.Decrypt(r.Grants, id, r.Version)
	return out, err
}
