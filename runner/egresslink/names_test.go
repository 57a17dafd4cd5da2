package egresslink

import (
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testegress"
)

// TestNamesOfOpen: of a sandbox that may reach everything the process serves the resolver alone, which asks the name servers of the host; its
// successor does so again.
func TestNamesOfOpen(t *testing.T) {
	t.Parallel()
	r := newRig(t) // its process has a name server that nobody is
	g := r.list(nil)
	g.SetFirst(core.EgressAllowAll, rulesOf(0))
	if err := g.Serve(t.Context()); err != nil {
		t.Fatal(err)
	}
	answer := func() (int, error) {
		m, _, err := (&dns.Client{Net: "tcp", Timeout: time.Minute}).Exchange(new(dns.Msg).SetQuestion("a.test.", dns.TypeA), g.sockets.Resolver())
		if err != nil {
			return 0, err
		}
		return m.Rcode, nil
	}
	if code, err := answer(); err != nil || code != dns.RcodeServerFailure { // a resolver that follows rules says that there is no such name
		t.Errorf("the resolver answers %s, %v", dns.RcodeToString[code], err)
	}
	testegress.Want(t, g.sockets.Proxy(), "a.test", 0)
	if err := g.SetRules(t.Context(), rulesOf(3)); err != nil {
		t.Error(err)
	}
	if list, err := r.process().List(t.Context()); err != nil || len(list) != 1 || list[0].Version != 3 {
		t.Errorf("the process serves %v, %v", list, err)
	}
	if err := syscall.Kill(testegress.Hello(t, r.process()).PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "another process answers", func() bool {
		code, err := answer()
		return err == nil && code == dns.RcodeServerFailure
	})
	g.End(t.Context())
	if _, err := answer(); err == nil {
		t.Error("the resolver answers after the end of the sandbox")
	}
}

// TestNoProcessForOpen: without a process, such a sandbox is made all the same.
func TestNoProcessForOpen(t *testing.T) {
	t.Parallel()
	l := New(Config{})
	if l.serves(core.EgressAllowAll) || l.serves(core.EgressDenyAll) {
		t.Error("a process is wanted, and there is none")
	}
}
