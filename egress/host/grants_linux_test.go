package host

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/ca"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

// granting is a process that serves one sandbox, with the authority of a project.
type granting struct {
	*Server
	t        *testing.T
	explicit string
	root     ca.Authority
	trust    *x509.CertPool
}

func newGranting(t *testing.T) *granting {
	t.Helper()
	spool, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	x := &granting{t: t, trust: x509.NewCertPool()}
	if x.Server, err = New(t.Context(), Config{Listen: l, Spool: spool, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- x.Run(t.Context()) }()
	t.Cleanup(func() {
		x.stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	if x.root, err = ca.NewRoot("prj_1", time.Now()); err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(x.root.Certificate)
	if err != nil {
		t.Fatal(err)
	}
	x.trust.AddCert(cert)
	return x
}

// rules returns rules with a grant for one host, encrypted for a key.
func (x *granting) rules(version int64, key []byte, id core.SandboxID, change ...func(*grant.Bundle)) runnerapi.EgressRules {
	x.t.Helper()
	h, err := policy.ParseHost("api.example")
	if err != nil {
		x.t.Fatal(err)
	}
	issuer, err := x.root.Issuer([]string{"api.example"}, time.Now(), time.Now().Add(time.Hour))
	if err != nil {
		x.t.Fatal(err)
	}
	bundle := grant.Bundle{Issuer: &issuer, Grants: []grant.Grant{{
		ID: "api", Mode: grant.ModeHeader, Placeholder: grant.NewPlaceholder(), Secret: grant.NewSecret("0123456789"), Header: "Authorization",
		Targets: []grant.Target{{Host: h, Port: 443}},
	}}}
	for _, c := range change {
		c(&bundle)
	}
	encrypted, err := grant.Encrypt(key, id, version, bundle)
	if err != nil {
		x.t.Fatal(err)
	}
	return runnerapi.EgressRules{Version: version, Allow: []string{"api.example"}, Grants: encrypted, Key: key, Held: []string{"api.example:443"}}
}

func (x *granting) serve(id core.SandboxID, r runnerapi.EgressRules) error {
	x.t.Helper()
	var files []*os.File
	for range 3 {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			x.t.Fatal(err)
		}
		f, err := l.(*net.TCPListener).File()
		if err != nil {
			x.t.Fatal(err)
		}
		if len(files) == 0 {
			x.explicit = l.Addr().String()
		}
		_ = l.Close()
		files = append(files, f)
	}
	u, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		x.t.Fatal(err)
	}
	f, err := u.(*net.UDPConn).File()
	if err != nil {
		x.t.Fatal(err)
	}
	_ = u.Close()
	return x.put(egressapi.Sandbox{ID: id, Epoch: 1, Rules: r}, append(files, f))
}

// reads reports whether the process terminates the guest's TLS to the host.
func (x *granting) reads() bool {
	x.t.Helper()
	c, err := net.Dial("tcp4", x.explicit)
	if err != nil {
		x.t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, "CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		x.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		x.t.Fatal(resp.Status)
	}
	return tls.Client(c, &tls.Config{ServerName: "api.example", RootCAs: x.trust}).HandshakeContext(x.t.Context()) == nil
}

// TestGrants: the process serves only the grants that are encrypted for it, with the rules that they came with.
func TestGrants(t *testing.T) {
	t.Parallel()
	x := newGranting(t)
	other, err := grant.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	mine := x.keys.Public()
	for _, key := range [][]byte{mine, other.Public()} {
		if r, err := x.parse("sbx_1", x.rules(3, key, "sbx_1")); err != nil || len(r.Held) != 1 || r.Held[0].Port != 443 {
			t.Errorf("%+v, %v", r.Held, err)
		}
	}
	state := func(what string, version int64, reads, lacks bool) {
		t.Helper()
		got, _ := x.list("")
		if len(got) != 1 || got[0].Version != version || got[0].Lacks != lacks || x.reads() != reads {
			t.Errorf("%s: %+v, reads %v", what, got, !reads)
		}
	}
	if err := x.serve("sbx_1", x.rules(3, other.Public(), "sbx_1")); err != nil {
		t.Fatal(err)
	}
	state("encrypted for another", 3, false, true)
	again := x.rules(3, mine, "sbx_1")
	for _, c := range []struct {
		what         string
		rules        runnerapi.EgressRules
		version      int64
		reads, lacks bool
		fails        bool
	}{
		{"encrypted again", again, 3, true, false, false},
		{"the older bundle, late", x.rules(3, other.Public(), "sbx_1"), 3, true, false, false},
		{"older", runnerapi.EgressRules{Version: 2, Allow: []string{"api.example"}}, 3, true, false, false},
		{"of another sandbox", x.rules(4, mine, "sbx_2"), 3, true, false, true},
		{"of another version", runnerapi.EgressRules{Version: 4, Allow: again.Allow, Grants: again.Grants, Key: mine}, 3, true, false, true},
		{"newer, without", runnerapi.EgressRules{Version: 5, Allow: []string{"api.example"}}, 5, false, false, false},
		{"newer, with", x.rules(6, mine, "sbx_1"), 6, true, false, false},
		{"newer, without an authority", x.rules(7, mine, "sbx_1", func(b *grant.Bundle) { b.Issuer = nil }), 6, true, false, true},
		{"newer, for another", x.rules(7, other.Public(), "sbx_1"), 7, false, true, false},
	} {
		if err := x.setRules("sbx_1", c.rules); (err != nil) != c.fails {
			t.Errorf("%s: %v", c.what, err)
		}
		state(c.what, c.version, c.reads, c.lacks)
	}
	if err := x.serve("sbx_3", x.rules(1, mine, "sbx_1")); err == nil {
		t.Error("a sandbox was served with the grants of another")
	}
}
