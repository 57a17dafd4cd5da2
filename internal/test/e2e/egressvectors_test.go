package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/coppice-dev/coppice/internal/test/testoutside"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// guestVector is what guestprobe tries; see there.
type guestVector struct {
	ID      string   `json:"id"`
	To      string   `json:"to"`
	Send    [][]byte `json:"send"`
	Connect bool     `json:"connect"`
	Parts   []part   `json:"parts,omitempty"`
	Name    string   `json:"name,omitempty"`
	Type    uint16   `json:"type,omitempty"`
	TCP     bool     `json:"tcp,omitempty"`
}

// part is a text and how many times the guest sends it.
type part struct {
	Text  []byte `json:"text"`
	Times int    `json:"times"`
}

type guestAnswer struct {
	Got     []byte   `json:"got"`
	End     string   `json:"end"`
	Tunnel  bool     `json:"tunnel"`
	RCode   int      `json:"rcode"`
	Records []string `json:"records"`
}

// carried reports whether somebody answered whom the proxy does not stand for; refused, whether the proxy said no, in whatever words.
func (a guestAnswer) carried() bool {
	return bytes.HasPrefix(a.Got, []byte("HTTP/1.1 2")) || bytes.HasPrefix(a.Got, []byte{22})
}

func (a guestAnswer) refused() bool {
	const alert = 21
	switch {
	case bytes.HasPrefix(a.Got, []byte("HTTP/1.1 4")), bytes.HasPrefix(a.Got, []byte{alert}):
		return true
	}
	return len(a.Got) == 0 && (a.End == "eof" || a.End == "reset")
}

// vectors is a guest, on a host of its own, that tries everything.
type vectors struct {
	t     *testing.T
	world *testoutside.Network
	host  *testoutside.Host
	s     *stack
	ws    coppice.WorkspaceID
	proxy string // host:port, as the guest knows it

	sibling coppice.WorkspaceID
}

// somewhere is an address that a guest's program without a proxy may dial; which one is no matter.
const somewhere = "203.0.113.250"

// TestEgressVectors tries every row of the table of addresses and names that a sandbox must not reach, from inside a guest as root, on a host whose
// only way out is a link that is watched. Directly: TCP, UDP, ICMP, packets with headers of their own, forged senders, other MACs, frames of every
// kind. Through the proxy: CONNECT, absolute form, without knowing of it, and the path of base URLs. What a policy allows by name is tried with names
// that are at these addresses. All of it is refused and counted, and nothing crosses the link.
func TestEgressVectors(t *testing.T) {
	v := newVectors(t)
	v.control()
	v.host.Seen()
	v.world.Forget()
	conns := v.world.Conns.Load()
	rows := append(addressRows(), v.ownRow(), v.siblingRow())
	rows = append(rows, nameRows(t)...)
	var list []guestVector
	for i, r := range rows {
		list = append(list, v.of(i, r)...)
	}
	before, bad := v.denied(), 0
	answers := v.say(list)
	for _, x := range list {
		if a := answers[x.ID]; !a.refused() {
			t.Errorf("%s: %q, %s", x.ID, a.Got, a.End)
		}
	}
	v.silent(conns)
	if !v.counted(before, len(list)) { // say some that are not
		const enough = 3
		for _, x := range list {
			before := v.denied()
			v.say([]guestVector{x})
			if n := v.denied() - before; n != 1 {
				t.Errorf("%s was counted %d times", x.ID, n)
				if bad++; bad == enough {
					break
				}
			}
		}
	}
	v.direct(rows)
	v.questions()
	v.silent(conns)
	if n := v.world.Datagrams.Load(); n != 0 {
		t.Errorf("%d datagrams came to the world's port 53", n)
	}
	for _, port := range []string{"80", "443"} {
		if heard := execute(t, v.s, v.sibling, "cat", "/root/heard"+port); strings.TrimSpace(heard) != "[]" {
			t.Errorf("another sandbox heard %s at port %s", heard, port)
		}
	}
	v.control()
	v.journaled()
	t.Logf("%d rows, %d ways through the proxy", len(rows), len(list))
}

// silent wants nothing to have left the host, and the world to have had so many connections.
func (v *vectors) silent(conns int64) {
	v.t.Helper()
	seen := slices.DeleteFunc(v.host.Seen(), func(p testoutside.Packet) bool { // the end of what was allowed before
		return p.Later && p.To.Addr().String() == v.world.Addr
	})
	if len(seen) != 0 || v.world.Conns.Load() != conns {
		v.t.Errorf("%d packets left the host: %v; %d connections came to the world", len(seen), seen, v.world.Conns.Load()-conns)
	}
}

func newVectors(t *testing.T) *vectors {
	t.Helper()
	v := &vectors{t: t, world: testoutside.New(t)}
	v.host = v.world.NewHost(t)
	// The operator's leave opens neither the guests' networks nor what is no network of his.
	v.s = newStackOn(t, v.host, "--egress-allow-private", testoutside.Prefix, "--egress-allow-private", "10.83.0.0/16", "--egress-resolver", v.world.Names, "--metrics-listen", "127.0.0.1:9464")
	ws, err := v.s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Image: string(baseImage(t)), Resources: small(), Network: coppice.NetworkRequest{Allow: &[]string{goodHost, "*.points.example.com"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	v.ws = ws.ID
	upload(t, v.s, v.ws)
	proxy, err := url.Parse(strings.TrimSpace(shell(t, v.s, v.ws, `echo "$HTTPS_PROXY"`)))
	if err != nil || proxy.Host == "" {
		t.Fatalf("the guest's proxy is %v, %v", proxy, err)
	}
	v.proxy = proxy.Host
	return v
}

// ownRow are the host's own addresses. Somebody listens on each at the ports that rules allow.
func (v *vectors) ownRow() vectorRow {
	v.t.Helper()
	r := vectorRow{name: "the host's own addresses"}
	var lc net.ListenConfig
	var listeners []net.Listener
	if err := v.host.Do(func() error {
		list, err := net.InterfaceAddrs()
		if err != nil {
			return err
		}
		for _, a := range list {
			p, err := netip.ParsePrefix(a.String())
			if err != nil || p.Addr().IsLoopback() || p.Addr().IsLinkLocalUnicast() {
				continue
			}
			r.addrs = append(r.addrs, p.Addr().String())
		}
		for _, port := range []string{":80", ":443"} {
			l, err := lc.Listen(v.t.Context(), "tcp", port)
			if err != nil {
				return err
			}
			listeners = append(listeners, l)
		}
		return nil
	}); err != nil {
		v.t.Fatal(err)
	}
	for _, l := range listeners {
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				v.t.Errorf("%s came to the host at %s", c.RemoteAddr(), c.LocalAddr())
				_ = c.Close()
			}
		}()
		v.t.Cleanup(func() {
			_ = l.Close()
			<-done
		})
	}
	if len(r.addrs) < 2 {
		v.t.Fatalf("the host has the addresses %q", r.addrs)
	}
	_, port, err := net.SplitHostPort(strings.TrimPrefix(v.s.server, "http://"))
	if err != nil {
		v.t.Fatal(err)
	}
	for _, a := range r.addrs { // also where the API is
		r.forms = append(r.forms, strings.Trim("["+a+"]", map[bool]string{true: "[]"}[!strings.Contains(a, ":")]))
		r.said = append(r.said, fmt.Appendf(nil, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", net.JoinHostPort(a, port)))
	}
	return r
}

// siblingRow is another sandbox, which listens.
func (v *vectors) siblingRow() vectorRow {
	v.t.Helper()
	child := fork(v.t, v.s, checkpoint(v.t, v.s, v.ws).ID, coppiceFork{})[0].Workspace
	for _, port := range []string{"80", "443"} {
		heard := "/root/heard" + port
		begin(v.t, v.s, child.ID, "listen", port, heard)
		execute(v.t, v.s, child.ID, probePath, "await", heard)
	}
	v.sibling = child.ID
	return vectorRow{name: "other sandboxes", forms: []string{child.Network.IP}, addrs: []string{child.Network.IP}}
}

// of are all ways through the proxy to what a row has.
func (v *vectors) of(i int, r vectorRow) (out []guestVector) {
	add := func(way, to string, connect bool, send ...[]byte) {
		out = append(out, guestVector{ID: fmt.Sprintf("%s | %s | %d", r.name, way, len(out)), To: to, Send: send, Connect: connect})
	}
	web, secure := somewhere+":80", somewhere+":443"
	hello := clientHello(v.t, goodHost)
	connect := func(host string) []byte {
		return fmt.Appendf(nil, "CONNECT %s:443 HTTP/1.1\r\nHost: %[1]s:443\r\n\r\n", host)
	}
	get := func(target, host string) []byte {
		return fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, host)
	}
	for _, f := range r.forms {
		add("CONNECT", v.proxy, true, connect(f), hello)
		add("absolute form", v.proxy, false, get("http://"+f+"/", f))
		add("transparent", web, false, get("/", f))
		add("origin form to the proxy", v.proxy, false, get("/", f))
		add("base URL", v.proxy, false, get("/grant/x/", f))
	}
	for n, a := range r.addrs {
		name := fmt.Sprintf("v%d-%d.points.example.com", i, n)
		v.world.Point(name, a)
		hello := clientHello(v.t, name)
		add("CONNECT by name", v.proxy, true, connect(name), hello)
		add("absolute form by name", v.proxy, false, get("http://"+name+"/", name))
		add("transparent TLS by name", secure, false, hello)
		add("transparent by name", web, false, get("/", name))
	}
	for _, b := range r.said {
		add("said", v.proxy, false, b)
	}
	for _, b := range r.tunnels {
		add("CONNECT", v.proxy, true, connect(goodHost), b)
		if !bytes.Contains(b, []byte(goodHost)) || bytes.Count(b, []byte("example.com")) != 1 || len(b) > 4096 {
			add("transparent TLS", secure, false, b)
		}
	}
	return out
}

func (v *vectors) say(list []guestVector) map[string]guestAnswer {
	v.t.Helper()
	out := map[string]guestAnswer{}
	for some := range slices.Chunk(list, 100) {
		args := []string{"say"}
		for _, x := range some {
			b, err := json.Marshal(x)
			if err != nil {
				v.t.Fatal(err)
			}
			args = append(args, string(b))
		}
		maps.Copy(out, ask[map[string]guestAnswer](v.t, v.s, v.ws, args...))
	}
	if len(out) != len(list) {
		v.t.Errorf("%d of %d were tried", len(out), len(list))
	}
	return out
}

// denied is how many flows the process says it has denied.
func (v *vectors) denied() int {
	v.t.Helper()
	return v.metric(`coppice_egress_flows_total\{outcome="denied"\}`)
}

func (v *vectors) metric(pattern string) int {
	v.t.Helper()
	c := &http.Client{Transport: &http.Transport{DialContext: v.host.DialContext, DisableKeepAlives: true}}
	resp, err := c.Get("http://127.0.0.1:9464/metrics")
	if err != nil {
		v.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		v.t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^` + pattern + ` (\S+)$`).FindSubmatch(b)
	if m == nil {
		return 0
	}
	n, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		v.t.Fatal(err)
	}
	return int(n)
}

// counted wants each refusal in the process's metrics.
func (v *vectors) counted(before, refused int) bool {
	v.t.Helper()
	if n := v.denied() - before; n != refused {
		v.t.Errorf("the metrics have %d refusals, want %d", n, refused)
		return false
	}
	return true
}

// journaled wants each refusal of the process's metrics in the workspace's journal, and no other. Denied flows beyond the first few of
// a minute are counted, and told at its end, or when the workspace ends, which is sooner.
func (v *vectors) journaled() {
	v.t.Helper()
	const tally = time.Minute
	if !*long {
		terminate(v.t, v.s, v.ws)
	}
	within(v.t, 3*tally, "the journal has as many refusals as the metrics", func() (bool, error) {
		n := 0
		for f, err := range v.s.client.Egress(v.t.Context(), v.ws, coppice.EgressFilter{}) {
			if err != nil {
				return false, err
			}
			if f.Outcome == coppice.FlowDenied {
				n += int(f.Count)
			}
		}
		want := v.denied()
		return n == want && n > 0, nil
	})
}

// control shows that what is allowed crosses the link, and that the capture sees it. Names have forms that are one name.
func (v *vectors) control() {
	v.t.Helper()
	v.host.Seen()
	hello := clientHello(v.t, goodHost)
	var slow [][]byte
	for part := range slices.Chunk(hello, len(hello)/20+1) {
		slow = append(slow, part)
	}
	list := []guestVector{
		{ID: "fragmented ClientHello over 20 TCP segments", To: somewhere + ":443", Send: slow},
		{ID: "transparent", To: somewhere + ":80", Send: [][]byte{[]byte("GET / HTTP/1.1\r\nHost: " + goodHost + "\r\n\r\n")}},
	}
	for _, form := range []string{goodHost, goodHost + ".", strings.ToUpper(goodHost)} {
		list = append(list,
			guestVector{ID: "CONNECT " + form, To: v.proxy, Connect: true, Send: [][]byte{fmt.Appendf(nil, "CONNECT %s:443 HTTP/1.1\r\nHost: %[1]s:443\r\n\r\n", form), hello}},
			guestVector{ID: "absolute form " + form, To: v.proxy, Send: [][]byte{fmt.Appendf(nil, "GET http://%s/ HTTP/1.1\r\nHost: %[1]s\r\n\r\n", form)}})
	}
	for id, a := range v.say(list) {
		if !a.carried() {
			v.t.Errorf("%s, which is allowed: %q, %s", id, a.Got, a.End)
		}
	}
	ports := map[uint16]bool{}
	for _, p := range v.host.Seen() {
		if p.Proto != "tcp" || p.To.Addr().String() != v.world.Addr {
			v.t.Errorf("%s left the host", p)
		}
		ports[p.To.Port()] = true
	}
	if !ports[80] || !ports[443] {
		v.t.Errorf("the capture saw nothing but %v of what was allowed", ports)
	}
}

// direct tries the addresses without any proxy, with every protocol there is, as the guest and as others.
func (v *vectors) direct(rows []vectorRow) {
	v.t.Helper()
	var targets []string
	for _, r := range rows {
		for _, a := range r.addrs {
			for _, port := range []string{"53", "80", "443"} {
				targets = append(targets, "tcp:"+net.JoinHostPort(a, port), "udp:"+net.JoinHostPort(a, port))
			}
			targets = append(targets, "icmp:"+a, "raw:"+a)
			if !strings.Contains(a, ":") {
				targets = append(targets, "forged:10.9.8.7>"+a, "forged:127.0.0.1>"+a)
			}
		}
	}
	// A guest's root gives itself an address and a router of IPv6.
	nic := strings.TrimSpace(shell(v.t, v.s, v.ws, `ls /sys/class/net | grep -v -x lo | head -n 1`))
	shell(v.t, v.s, v.ws, fmt.Sprintf(`echo 0 > /proc/sys/net/ipv6/conf/%[1]s/disable_ipv6; ip -6 addr add 2001:db8:9::2/64 dev %[1]s nodad; ip -6 route add default via 2001:db8:9::1 dev %[1]s
ip -6 neigh add 2001:db8:9::1 lladdr 02:00:00:00:00:01 nud permanent dev %[1]s`, nic))
	m := v.s.mustMachine(v.t, v.ws)
	from := framesFrom(v.t, m)
	dropped := allDropped(v.t, m)
	guestsOwn := regexp.MustCompile(`^(tcp|udp|icmp):(127\.0\.0\.1|0\.0\.0\.0|\[?::1?\]?|::ffff:[0-9.]+)(:|$)`) // its own loopback
	got := ask[map[string]string](v.t, v.s, v.ws, append([]string{"reach"}, targets...)...)
	for _, target := range targets {
		switch result := got[target]; {
		case guestsOwn.MatchString(target):
		case result == "silence", result == "no route", strings.Contains(result, "not permitted"), strings.Contains(result, "denied"), strings.Contains(result, "invalid argument"):
		case result == "hung up" && strings.HasPrefix(target, "tcp:"): // by the proxy, which takes it and carries nothing
		case result == "sent" && (strings.HasPrefix(target, "raw:") || strings.HasPrefix(target, "forged:")):
		default:
			v.t.Errorf("%s: %q", target, result)
		}
	}
	execute(v.t, v.s, v.ws, probePath, "flood", "1")
	if n := framesFrom(v.t, m) - from; n < 500 {
		v.t.Errorf("%d frames came from the guest: that is no flood", n)
	}
	after := allDropped(v.t, m)
	for _, name := range []string{"drop_spoof", "drop_v6", "drop_type", "drop_special", "drop_forward"} {
		if after[name] <= dropped[name] {
			v.t.Errorf("%s has counted nothing: %v, then %v", name, dropped, after)
		}
	}
}

// questions asks the guest's resolver for what is allowed and for what is not: no question leaves the host.
func (v *vectors) questions() {
	v.t.Helper()
	before := v.world.Asked()
	at := net.JoinHostPort(strings.Split(v.proxy, ":")[0], "53")
	var list []guestVector
	wants := map[string]bool{} // whether there is an answer
	for _, name := range []string{goodHost, strings.ToUpper(goodHost), "c2VjcmV0.points.example.com", "sub." + goodHost, badHost, "secret.evil.test", "metadata.google.internal", "example.com", "254.169.254.169.in-addr.arpa"} {
		for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT, dns.TypeNULL, dns.TypeANY, dns.TypeCNAME, dns.TypeMX, dns.TypeSRV, dns.TypeHTTPS, dns.TypeNS} {
			for _, tcp := range []bool{false, true} {
				if tcp && kind != dns.TypeA {
					continue // it takes few connections
				}
				id := fmt.Sprintf("%s %s over TCP %v", name, dns.TypeToString[kind], tcp)
				list = append(list, guestVector{ID: id, To: at, Name: dns.Fqdn(name), Type: kind, TCP: tcp})
				wants[id] = kind == dns.TypeA && (strings.EqualFold(name, goodHost) || strings.HasSuffix(name, ".points.example.com"))
			}
		}
	}
	for id, a := range v.say(list) {
		if a.End != "" || (len(a.Records) == 1) != wants[id] || len(a.Records) > 1 {
			v.t.Errorf("%s: %q, code %d, %s", id, a.Records, a.RCode, a.End)
		}
	}
	if after := v.world.Asked(); len(after) != len(before) {
		v.t.Errorf("the world's name server was asked for %q", after[len(before):])
	}
	for _, name := range before {
		if !strings.HasSuffix(strings.ToLower(name), ".points.example.com.") {
			v.t.Errorf("the world's name server was asked for %q, which nothing allows", name)
		}
	}
}
