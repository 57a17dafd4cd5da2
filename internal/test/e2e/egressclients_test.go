package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/testoutside"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// egressClient is a program that people run in sandboxes. Its script says "it worked", and nothing else on standard output, when it got what it
// asked HOST for. WAY is another word for each way in which it is run.
type egressClient struct {
	name   string
	script string
}

var egressClients = []egressClient{
	{"curl, https", `curl -sS -m 30 -f https://HOST/x | grep -qx 'GET HOST/x'`},
	{"curl, http", `curl -sS -m 30 -f http://HOST/x | grep -qx 'GET HOST/x'`},
	{"git clone", `rm -rf /root/clone; GIT_TERMINAL_PROMPT=0 git clone -q https://HOST/repo.git /root/clone; grep -qx cloned /root/clone/README`},
	{"python urllib", `python3 -c 'import urllib.request as u; assert u.urlopen("https://HOST/x", timeout=30).read() == b"GET HOST/x\n"'`},
	{"apt-get, http", aptScript("http")},
	{"apt-get, https", aptScript("https")},
}

// longClients need what the base image does not ship.
var longClients = []egressClient{
	{"python requests", `python3 -c 'import requests; assert requests.get("https://HOST/x", timeout=30).text == "GET HOST/x\n"'`},
	{"pip install", `rm -rf /root/lib; pip install -q --no-cache-dir --disable-pip-version-check --retries 0 --target /root/lib --index-url https://HOST/simple/ coppice-demo
PYTHONPATH=/root/lib python3 -c 'import coppice_demo; assert coppice_demo.said == "installed"'`},
	{"node fetch", `NODE_EXTRA_CA_CERTS=/root/ca.pem node -e 'fetch("https://HOST/x").then(r => r.text()).then(s => process.exit(s == "GET HOST/x\n" ? 0 : 1), e => { console.error(e); process.exit(1) })'`},
}

func aptScript(scheme string) string {
	return fmt.Sprintf(`echo 'deb [trusted=yes] %s://HOST/debian/ ./' > /root/list; rm -rf /root/lists; mkdir -p /root/lists/partial
apt() { apt-get -qq -o Dir::Etc::SourceList=/root/list -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists=/root/lists -o APT::Update::Error-Mode=any -o Acquire::Retries=0 -o Acquire::Languages=none "$@" >&2; }
apt update
apt install -y --no-install-recommends demo-%[1]s-WAY
grep -qx installed /usr/share/demo-%[1]s-WAY`, scheme)
}

// hostOf is the host that a client asks.
func (c egressClient) hostOf(allowed bool) string {
	if !allowed {
		return "refused.example.com"
	}
	switch {
	case strings.HasPrefix(c.name, "git"):
		return "git.example.com"
	case strings.HasPrefix(c.name, "apt"):
		return "deb.example.com"
	case strings.HasPrefix(c.name, "pip"):
		return "py.example.com"
	}
	return "www.example.com"
}

// TestEgressClients runs the programs that people use, as the image ships them: with the variables that name the proxy, and without, which sends
// their connections there all the same. What the policy allows they get; what it does not they do not, and no server hears of it.
func TestEgressClients(t *testing.T) {
	o := testoutside.New(t)
	var debs []string
	for _, way := range []string{"told", "untold"} {
		debs = append(debs, "demo-http-"+way, "demo-https-"+way)
	}
	git, deb, py := gitServer(t), debMirror(t, debs...), pyIndex(t)
	o.Serve("git.example.com", git)
	o.Serve("deb.example.com", deb)
	o.Serve("py.example.com", py)
	clients, from := egressClients, baseImage(t)
	if *long {
		clients = append(slices.Clip(clients), longClients...)
		from = image(t, "e2e-clients", guestAgent, "nodejs", "python3-pip", "python3-requests")
	}
	s := newStack(t, "--egress-allow-private", testoutside.Prefix, "--egress-resolver", o.Names)
	ws, err := s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Image: string(from), Resources: coppice.ResourcesRequest{MemoryMiB: new(512)},
		Network: coppice.NetworkRequest{Allow: &[]string{"git.example.com", "deb.example.com", "py.example.com", "www.example.com"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	// The authority of this test's world is one of those that everybody trusts.
	shell(t, s, ws.ID, "cat > /root/ca.pem <<END\n"+o.CA+`END
cat /root/ca.pem >> /etc/ssl/certs/ca-certificates.crt
ln -s /root/ca.pem /etc/ssl/certs/$(openssl x509 -in /root/ca.pem -noout -subject_hash).0
chmod 755 /root`)
	refused := 0 // programs that were told of the proxy
	for _, allowed := range []bool{true, false} {
		before := o.Conns.Load()
		for i, c := range clients {
			for _, way := range []string{"told", "untold"} {
				// Without -long each program runs twice, once allowed and once refused, and every other one the other way around. Of
				// apt-get one is allowed and one is refused: the first takes 20 seconds, the second five.
				apt := strings.HasPrefix(c.name, "apt-get")
				switch {
				case *long:
				case apt && ((c.name == "apt-get, https") != allowed || (way == "untold") != allowed):
					continue
				case !apt && (way == "told") != (allowed == (i%2 == 0)):
					continue
				}
				script := strings.NewReplacer("HOST", c.hostOf(allowed), "WAY", way).Replace(c.script)
				if way == "untold" {
					script = "unset HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy\n" + script
				} else {
					script = "test -n \"$HTTPS_PROXY\"\n" + script
				}
				if !allowed && way == "told" {
					refused++
				}
				began := time.Now()
				res, err := s.client.Exec(t.Context(), ws.ID, coppice.ExecRequest{Command: []string{"/bin/sh", "-ec", script + "\necho it worked"}})
				if err != nil {
					t.Fatal(err)
				}
				if got := res.Stdout == "it worked\n" && res.ExitCode == 0; got != allowed {
					t.Errorf("%s, %s of the proxy, to %s: exit status %d\n%s%s", c.name, way, c.hostOf(allowed), res.ExitCode, res.Stdout, res.Stderr)
				}
				t.Logf("%s, %s of the proxy, to %s: %.1f s", c.name, way, c.hostOf(allowed), time.Since(began).Seconds())
			}
		}
		if n := o.Conns.Load() - before; (n > 0) != allowed {
			t.Errorf("%d connections came to the servers, where %v is what is allowed", n, allowed)
		}
	}
	for _, name := range o.Asked() {
		if strings.Contains(name, "refused") {
			t.Errorf("the world's name server was asked for %q", name)
		}
	}
	denied := map[string]int{}
	for f, err := range s.client.Egress(t.Context(), ws.ID, coppice.EgressFilter{}) {
		if err != nil {
			t.Fatal(err)
		}
		if f.Outcome == coppice.FlowDenied {
			denied[f.Host]++
		}
	}
	t.Logf("denied: %v", denied)
	if len(denied) != 1 || denied["refused.example.com"] < refused { // without the proxy the name has no address, so there is nothing to deny
		t.Errorf("the journal has %v as denied, want refused.example.com alone, for each of %d clients", denied, refused)
	}
}
