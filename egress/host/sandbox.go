package host

import (
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/egress/proxy"
	"github.com/coppice-dev/coppice/egress/resolver"
)

// sandbox is one that the process serves.
type sandbox struct {
	epoch    int64
	names    bool // only its resolver is served
	resolver *resolver.Server
	policy   atomic.Pointer[policy.Policy]

	mu      sync.Mutex // held while rules change, so changes happen one after the other
	version int64
	lacks   bool
}

// sockets are the sockets of a sandbox, opened for use.
type sockets struct {
	explicit, transparent, tcp net.Listener
	udp                        net.PacketConn
}

// open makes sockets from the descriptors. It closes the descriptors: the sockets use copies.
func open(files []*os.File) (out sockets, err error) {
	var opened []func() error
	listener := func(f *os.File) net.Listener {
		l, failed := net.FileListener(f)
		if failed == nil {
			opened = append(opened, l.Close)
		}
		err = errors.Join(err, failed, f.Close())
		return l
	}
	out.explicit, out.transparent, out.tcp = listener(files[0]), listener(files[1]), listener(files[2])
	udp, failed := net.FilePacketConn(files[3])
	if failed == nil {
		opened = append(opened, udp.Close)
	}
	out.udp, err = udp, errors.Join(err, failed, files[3].Close())
	if err != nil {
		for _, undo := range opened {
			err = errors.Join(err, undo())
		}
	}
	return out, err
}

// put begins to serve a sandbox.
func (s *Server) put(sb egressapi.Sandbox, files []*os.File) error {
	on, err := open(files)
	if err != nil {
		return err
	}
	r, err := s.parse(sb.ID, sb.Rules)
	if err == nil && (sb.ID == "" || len(sb.ID) > core.MaxFlowID) {
		err = core.Errorf(core.Invalid, core.CodeInvalidField, "a sandbox id must have 1 to %d bytes, and this one has %d", core.MaxFlowID, len(sb.ID))
	}
	if err != nil {
		return errors.Join(err, on.explicit.Close(), on.transparent.Close(), on.tcp.Close(), on.udp.Close())
	}
	if err := s.remove(sb.ID); err != nil {
		s.cfg.Log.Warn("the sandbox that was replaced did not end cleanly", "sandbox_id", sb.ID, "err", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b := &sandbox{epoch: sb.Epoch, names: sb.Names, version: sb.Rules.Version, lacks: r.lacks}
	b.policy.Store(&r.Policy)
	cfg := resolver.Config{Policy: func() policy.Policy { return *b.policy.Load() }, Log: s.cfg.Log.With("sandbox_id", sb.ID), Count: s.stats.answered}
	if sb.Names {
		if err := errors.Join(on.explicit.Close(), on.transparent.Close()); err != nil {
			return errors.Join(err, on.tcp.Close(), on.udp.Close())
		}
		cfg.Servers = s.names
		b.resolver = resolver.Serve(cfg, on.udp, on.tcp)
		s.sandboxes[sb.ID] = b
		return nil
	}
	b.resolver = resolver.Serve(cfg, on.udp, on.tcp)
	if err := s.proxy.Add(proxy.Sandbox{ID: sb.ID, Epoch: sb.Epoch, Rules: r.Rules, Alias: resolver.Host}, on.explicit, on.transparent); err != nil {
		return errors.Join(err, b.resolver.Close())
	}
	s.sandboxes[sb.ID] = b
	return nil
}

func (s *Server) sandbox(id core.SandboxID) *sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sandboxes[id]
}

// setRules replaces a sandbox's rules, unless the new ones are older. Grants of the same version may come again with a
// new encryption. When it returns, all traffic that the rules do not allow has ended.
func (s *Server) setRules(id core.SandboxID, rules runnerapi.EgressRules) error {
	b := s.sandbox(id)
	if b == nil {
		return core.Errorf(core.NotFound, core.CodeSandboxNotFound, "sandbox %s is not served", id)
	}
	r, err := s.parse(id, rules)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if rules.Version < b.version || rules.Version == b.version && r.lacks && !b.lacks {
		return nil
	}
	if !b.names {
		if _, err := s.proxy.SetRules(id, r.Rules); err != nil {
			return err // the old rules are in force, of the old version
		}
	}
	b.policy.Store(&r.Policy) // afterwards: no name resolves that the proxy does not allow yet
	b.version, b.lacks = rules.Version, r.lacks
	return nil
}

// remove ends a sandbox and everything that it has open.
func (s *Server) remove(id core.SandboxID) error {
	s.mu.Lock()
	b := s.sandboxes[id]
	delete(s.sandboxes, id)
	s.mu.Unlock()
	if b == nil {
		return nil
	}
	s.proxy.Remove(id)
	s.denied.end(id)
	return b.resolver.Close()
}

// maxListed is the number of sandboxes in one list. A message has room for that many, with ids of any length.
const maxListed = 256

// list returns the sandboxes whose ids come after the given one, in order, and reports whether there are more.
func (s *Server) list(after core.SandboxID) (out []egressapi.Served, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make([]core.SandboxID, 0, len(s.sandboxes))
	for id := range s.sandboxes {
		if id > after {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	for _, id := range ids[:min(len(ids), maxListed)] {
		b := s.sandboxes[id]
		b.mu.Lock()
		out = append(out, egressapi.Served{ID: id, Epoch: b.epoch, Version: b.version, Lacks: b.lacks})
		b.mu.Unlock()
	}
	return out, len(ids) > maxListed
}
