package runner

import (
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testegress"
	"github.com/coppice-dev/coppice/internal/test/testoutside"
)

// TestEgressVM: programs of a real guest, those that know of the proxy and those that do not, reach what its rules allow and nothing else.
func TestEgressVM(t *testing.T) {
	o := testoutside.New(t)
	r := newRig(t, func(c *Config) {
		c.Egress = testegress.Process(t, testegress.Settings{Names: o.Names, Private: []netip.Prefix{netip.MustParsePrefix(testoutside.Prefix)}})
	})
	from := r.template()
	child := r.child()
	child.Rules = rulesOf(1, "a.example.com", "*.many.test")
	f, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: from, Children: []runnerapi.Child{child}})
	if err != nil || f.Children[0].Problem != nil {
		t.Fatalf("fork: %+v, %v", f, err)
	}
	id := child.SandboxID
	r.sh(id, "cat > ca.pem <<END\n"+o.CA+"END\n")
	// sh runs a script with the outside's authority, and gives what it wrote with its status.
	sh := func(script string) string {
		t.Helper()
		return strings.TrimSpace(r.sh(id, "export CURL_CA_BUNDLE=/root/ca.pem SSL_CERT_FILE=/root/ca.pem; ("+script+") 2>&1 && echo ok || echo failed $?"))
	}
	wantSaid := func(script, want string) {
		t.Helper()
		if got := sh(script); !strings.Contains(got, want) {
			t.Errorf("%s\nsaid %q, want %q", script, got, want)
		}
	}
	const python = `python3 -c 'import sys,urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())' `
	const unaware = `unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; `
	for _, aware := range []string{"", unaware} {
		wantSaid(aware+"curl -sS -m 20 https://a.example.com/curl", "GET a.example.com/curl\nok")
		wantSaid(aware+"curl -sS -m 20 http://a.example.com/plain", "GET a.example.com/plain\nok")
		wantSaid(aware+python+"https://a.example.com/python", "GET a.example.com/python\n\nok")
	}
	wantSaid("env | grep -i _proxy | sort | cut -d= -f1 | tr '\\n' ' '", "HTTPS_PROXY HTTP_PROXY NO_PROXY http_proxy https_proxy no_proxy")

	// What is not allowed.
	before := o.Conns.Load()
	wantSaid("curl -sS -m 20 https://b.example.com/", "failed")
	wantSaid("curl -sS -m 20 http://b.example.com/", "does not allow")
	wantSaid(unaware+"curl -sS -m 20 https://b.example.com/", "failed 6") // there is no such name
	wantSaid(unaware+"curl -sSk -m 20 https://"+o.Addr+"/", "failed")
	wantSaid(unaware+"curl -sSk -m 20 --resolve b.example.com:443:"+o.Addr+" https://b.example.com/", "failed")
	wantSaid(unaware+"curl -sS -m 20 --resolve a.example.com:81:"+o.Addr+" http://a.example.com:81/", "does not allow")
	wantSaid(`python3 -c 'import socket; s=socket.create_connection(("`+o.Addr+`",443),9); s.sendall(b"SSH-2.0-x\r\n"); print(len(s.recv(9)))'`, "failed")
	wantSaid(`python3 -c 'import socket; s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); s.sendto(b"x",("`+o.Addr+`",53))'; true`, "ok")
	wantSaid(`python3 -c 'import socket; print(socket.gethostbyname("secret-data.b.example.com"))'`, "failed")
	if n := o.Conns.Load() - before; n != 0 {
		t.Errorf("%d connections arrived outside that no rule allows", n)
	}
	if n := o.Datagrams.Load(); n != 0 {
		t.Errorf("%d datagrams arrived outside", n)
	}
	for _, name := range o.Asked() {
		if name != "a.example.com." {
			t.Errorf("a name server was asked for %s", name)
		}
	}

	// New rules count at once, for what is under way as well.
	stream := func() {
		t.Helper()
		r.sh(id, "CURL_CA_BUNDLE=/root/ca.pem setsid curl -sS https://a.example.com/stream >/dev/null 2>&1 &")
		eventually.True(t, "a tunnel is open", func() bool { return o.Streams.Load() == 1 })
	}
	stream()
	began := time.Now()
	if err := r.SetEgressRules(t.Context(), id, rulesOf(2, "c.example.com")); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the tunnel has ended", func() bool { return o.Streams.Load() == 0 })
	t.Logf("a tunnel ended %s after its rule; load %s", time.Since(began), load()) // within what eventually waits: by itself it goes on for ever
	wantSaid("curl -sS -m 20 https://c.example.com/new", "GET c.example.com/new\nok")
	wantSaid("curl -sS -m 20 https://a.example.com/old", "failed")
	if err := r.SetEgressRules(t.Context(), id, rulesOf(3, "a.example.com")); err != nil {
		t.Fatal(err)
	}

	// Without the process nothing passes, and it is back soon.
	stream()
	client := testegress.Client(t, r.cfg.Egress)
	hello := testegress.Hello(t, client)
	if err := syscall.Kill(hello.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	eventually.True(t, "the tunnel has ended", func() bool { return o.Streams.Load() == 0 })
	eventually.True(t, "there is a process again that has the sandbox", func() bool {
		list, err := client.List(t.Context())
		return err == nil && len(list) == 1
	})
	t.Logf("the sandbox was served again %s after the process was killed; load %s", time.Since(killed), load())
	wantSaid("curl -sS -m 20 https://a.example.com/again", "GET a.example.com/again\nok")

	// A fork of it has rules of its own, and its programs too find the proxy.
	c := r.capture(id)
	fork := r.child()
	fork.Rules = rulesOf(1, "b.example.com")
	if f, err = r.Fork(t.Context(), runnerapi.Fork{CheckpointID: c.ID, Children: []runnerapi.Child{fork}}); err != nil || f.Children[0].Problem != nil {
		t.Fatalf("fork: %+v, %v", f, err)
	}
	wantSaid("curl -sS -m 20 https://a.example.com/parent", "GET a.example.com/parent\nok")
	id = fork.SandboxID
	wantSaid("curl -sS -m 20 https://b.example.com/fork", "GET b.example.com/fork\nok")
	wantSaid("curl -sS -m 20 https://a.example.com/fork", "failed")
	wantSaid(unaware+python+"https://b.example.com/fork", "GET b.example.com/fork\n\nok")

	// A sandbox that may reach everything has real addresses, from the name server that only the host reaches.
	free := r.child()
	free.Egress = core.EgressAllowAll
	if f, err = r.Fork(t.Context(), runnerapi.Fork{CheckpointID: c.ID, Children: []runnerapi.Child{free}}); err != nil || f.Children[0].Problem != nil {
		t.Fatalf("fork: %+v, %v", f, err)
	}
	id = free.SandboxID
	o.Point("open.example.com", "203.0.113.77")
	wantSaid("cat /etc/resolv.conf", "nameserver 10.83.0.1\nok")
	wantSaid(`python3 -c 'import socket; print(socket.gethostbyname("open.example.com"))'`, "203.0.113.77\nok")

	flows, _, err := r.Flows(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	by := map[core.SandboxID]int{}
	for _, f := range flows {
		by[f.SandboxID]++
	}
	if by[child.SandboxID] == 0 || by[fork.SandboxID] == 0 {
		t.Errorf("flows by sandbox: %v", by)
	}
}

// load is the load average of this machine.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}
