package guest_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/guest"
)

// wantReseal is the request for the n-th clone.
func wantReseal(n int, generation string) guestapi.ResealRequest {
	return guestapi.ResealRequest{
		CheckpointID: "ckpt_test",
		Identity: core.Identity{
			Generation: generation, Hostname: fmt.Sprintf("clone-%d", n), MachineID: fmt.Sprintf("%032x", 0xabc000+n),
			MAC: fmt.Sprintf("02:00:00:00:00:%02x", n), IP: netip.AddrFrom4([4]byte{10, 77, 0, byte(n)}),
		},
		HostTimeNS: time.Now().UnixNano(), Entropy: entropy(),
		Network: guestapi.Network{
			Prefix: 32, Gateway: netip.MustParseAddr("10.77.255.1"), GatewayMAC: "02:00:00:00:ff:ff", DNS: []netip.Addr{netip.MustParseAddr("10.77.255.1")},
		},
		Token: fmt.Sprintf("token-%d", n), Env: map[string]string{"FORK": fmt.Sprint(n)}, CA: testCA,
	}
}

// reseal does what the runner does with a clone, up to the release.
func reseal(t *testing.T, c *guest.Client, want guestapi.ResealRequest) core.ResealReport {
	t.Helper()
	want.HostTimeNS = time.Now().UnixNano()
	begin := time.Now()
	report, err := c.Reseal(t.Context(), want)
	if err != nil {
		t.Fatalf("reseal: %v", err)
	}
	t.Logf("reseal took %s, %.1f ms in the guest", time.Since(begin), report.DurationMS)
	for _, s := range report.Steps {
		keys := fmt.Sprint(s.Evidence)
		if s.Name == guestapi.StepEntropy {
			keys = fmt.Sprintf("%d values", len(s.Evidence))
		}
		t.Logf("  %-14s %-8s %6.2f ms %s %s", s.Name, s.Status, s.DurationMS, keys, s.Error)
	}
	if err := guest.Verify(report, want); err != nil {
		t.Fatal(err)
	}
	return report
}

const readCounter = "od -An -td8 /root/count | tr -d ' '"

// prepare makes a guest in which every step has something to do.
const prepare = `set -e
echo seed > /var/lib/systemd/random-seed 2>/dev/null || { mkdir -p /var/lib/systemd; echo seed > /var/lib/systemd/random-seed; }
mkdir -p /etc/ssh /var/lib/dhcp /etc/coppice/reseal.d
echo old > /etc/ssh/ssh_host_rsa_key; echo old > /etc/ssh/ssh_host_ed25519_key
echo lease > /var/lib/dhcp/dhclient.eth0.leases
cat > /etc/coppice/reseal.d/10-first <<'X'
#!/bin/sh
echo "$COPPICE_GENERATION $COPPICE_HOSTNAME $(cat /run/coppice/generation) $(hostname) $(cut -d/ -f2- /proc/self/cgroup) $(ip -o -4 addr show dev eth0 | wc -l)" >> /root/hooks
sleep 1000 &
X
cat > /etc/coppice/reseal.d/20-second <<'X'
#!/bin/sh
echo second >> /root/hooks
od -An -td8 /root/count > /root/counted
X
echo 'exit 1' > /etc/coppice/reseal.d/30-not-executable
chmod +x /etc/coppice/reseal.d/[12]0*
mkdir -p /workspace; cat /proc/sys/kernel/random/boot_id > /root/boot_id`

// worker holds connections of every kind, and draws numbers. It shows what became of them when it is asked.
const worker = `
import os, random, socket, sys, threading
n = 0
lsock = socket.create_server(("127.0.0.1", 7001))
inner = socket.create_connection(("127.0.0.1", 7001)); peer, _ = lsock.accept()
own = socket.create_server((sys.argv[1], 7002))
outer = socket.create_connection((sys.argv[1], 7002)); opeer, _ = own.accept()
syn = socket.socket(); syn.setblocking(False)
try: syn.connect(("10.88.0.1", 80))
except BlockingIOError: pass
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.connect(("10.88.0.1", 53))
state = {}
def reader():
    try: state["blocked"] = outer.recv(1)
    except OSError as e: state["blocked"] = e.strerror
th = threading.Thread(target=reader, daemon=True); th.start()
print("up", flush=True)
for line in sys.stdin:
    n += 1
    th.join(1)
    try: syn.getpeername(); s = "connected"
    except OSError as e: s = os.strerror(syn.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) 
    try: udp.send(b"x"); u = "sent"
    except OSError as e: u = e.strerror
    inner.sendall(b"hi")
    print(f"n={n} inner={peer.recv(2)} blocked={state.get('blocked')} syn={s} udp={u}", flush=True)
`

// TestVMReseal clones a machine with its whole state, and the connection of its host in the middle of a request.
func TestVMReseal(t *testing.T) {
	parent := startVM(t, vmOptions{})
	c := parent.dial()
	first := wantReseal(1, "gen-parent")
	quiesce(t, c, "ckpt_0")
	reseal(t, c, first)
	if _, err := c.Release(t.Context(), guestapi.ReleaseRequest{Generation: "gen-parent"}); err != nil {
		t.Fatal(err)
	}
	sh(t, c, prepare)
	startCounter(t, c)
	s := start(t, c, guestapi.SessionSpec{Command: []string{"python3", "-u", "-c", worker, "10.77.0.1"}, StdinOpen: true})
	m := &terminal{t: t, conn: attach(t, c, s.ID)} // it stays attached across the capture
	m.until("up\n")
	q := quiesce(t, c, "ckpt_1")
	state := parent.save()

	type clone struct {
		*vm
		c     *guest.Client
		want  guestapi.ResealRequest
		ident map[string]string
	}
	var clones []*clone
	for n := range 3 { // the last one is prepared by a provisional reseal
		cl := &clone{want: wantReseal(2+n, fmt.Sprintf("gen-%d", n))}
		begin := time.Now()
		cl.vm = startVM(t, vmOptions{incoming: state, overlay: parent.overlay, diskSize: 2 << 30})
		t.Logf("clone %d resumed after %s", n, time.Since(begin))
		begin = time.Now()
		cl.c = cl.dial()
		t.Logf("clone %d: agent answered after another %s", n, time.Since(begin))
		clones = append(clones, cl)
	}
	for n, cl := range clones {
		h, err := cl.c.Health(t.Context())
		if err != nil || h.State != guestapi.StateFrozen || h.Generation != "gen-parent" || h.CaptureID != "ckpt_1" {
			t.Fatalf("health of a clone: %+v %v", h, err)
		}
		for _, old := range []string{"gen-parent", h.Generation} {
			if _, err := cl.c.Reseal(t.Context(), wantReseal(9, old)); core.CodeOf(err) != guestapi.CodeAlreadySealed {
				t.Errorf("reseal to the used generation %s: %v", old, err)
			}
		}
		if n == 1 {
			cl.ask("block_resize", map[string]any{"device": "disk", "size": int64(2 << 30)})
			cl.want.GrowDisk, cl.want.DiskBytes = true, 2<<30
		}
		if n == 2 {
			provisional(t, cl.c)
		}
		report := reseal(t, cl.c, cl.want)
		if len(report.StaleProcesses) != len(q.StaleProcesses) || len(q.StaleProcesses) < 2 {
			t.Errorf("stale processes %+v, at the capture %+v", report.StaleProcesses, q.StaleProcesses)
		}
		// Resealed, and still nothing may run.
		if _, _, err := do(t.Context(), cl.c, "POST", guestapi.PathSessions, strings.NewReader(`{"command":["true"]}`)); core.CodeOf(err) != guestapi.CodeQuarantined { //nolint:bodyclose // do has read and closed it
			t.Errorf("a session in quarantine: %v", err)
		}
		if _, err := cl.c.Reseal(t.Context(), wantReseal(9, "gen-again")); core.CodeOf(err) != guestapi.CodeWrongState {
			t.Errorf("a second reseal: %v", err)
		}
		if _, err := cl.c.Reseal(t.Context(), cl.want); core.CodeOf(err) != guestapi.CodeAlreadySealed {
			t.Errorf("a repeated reseal: %v", err)
		}
		sealed := cl.frames()
		t.Logf("%d bytes of frames before the reseal was done", sealed)
		if _, err := cl.c.Release(t.Context(), guestapi.ReleaseRequest{Generation: cl.want.Identity.Generation}); err != nil {
			t.Fatal(err)
		}
		checkFrames(t, cl.vm, sealed, "")
		cl.ident = identity(t, cl.c)
		checkIdentity(t, cl.ident, cl.want)
		checkWorker(t, cl.c, s.ID, len(m.seen))
		if cl.ident["runs"] != "1" || cl.ident["provisional"] != "" {
			t.Errorf("the hooks have run %s times; a provisional identity is in %q", cl.ident["runs"], cl.ident["provisional"])
		}
		if at, now := cl.ident["counted"], sh(t, cl.c, readCounter); at == now || at == "" {
			t.Errorf("the counter does not go on: %s, then %s", at, now)
		}
		checkFrames(t, cl.vm, sealed, cl.want.Identity.MAC)
		cl.ask("stop", nil) // its programs are busy, and the hooks of the next clone have little time
	}
	for _, key := range []string{"boot_id", "random", "machine_id", "hostname", "ssh", "mac", "ip", "tfo"} {
		a, b, c := clones[0].ident[key], clones[1].ident[key], clones[2].ident[key]
		if a == b || a == c || b == c || a == "" || b == "" || c == "" {
			t.Errorf("%s is %q, %q and %q in three clones", key, a, b, c)
		}
	}
	// The hooks have looked at the counter before the thaw: not one instruction of it had run in any clone.
	if a, b, c := clones[0].ident["counted"], clones[1].ident["counted"], clones[2].ident["counted"]; a != b || a != c {
		t.Errorf("the counter was %s, %s and %s before the thaw of three clones", a, b, c)
	}
	if small, large := clones[0].ident["disk"], clones[1].ident["disk"]; small != "1" || large != "2" {
		t.Errorf("the disks have %s and %s GiB, want 1 and 2", small, large)
	}

	// A clone of a clone, with a generation that its grandparent had. Its workload has removed the authority, which is given again.
	a := clones[0]
	a.ask("cont", nil)
	sh(t, a.c, "sed -i '/coppice: begin/,/coppice: end/d' /etc/ssl/certs/ca-certificates.crt")
	quiesce(t, a.c, "ckpt_2")
	state = a.save()
	g := startVM(t, vmOptions{incoming: state, overlay: a.overlay, diskSize: 2 << 30})
	gc := g.dial()
	for _, old := range []string{"gen-parent", "gen-0"} {
		if _, err := gc.Reseal(t.Context(), wantReseal(9, old)); core.CodeOf(err) != guestapi.CodeAlreadySealed {
			t.Errorf("a grandchild resealed to %s: %v", old, err)
		}
	}
	want := wantReseal(7, "gen-grandchild")
	want.Env = nil // keeps its parent's
	reseal(t, gc, want)
	if _, err := gc.Release(t.Context(), guestapi.ReleaseRequest{Generation: "gen-grandchild"}); err != nil {
		t.Fatal(err)
	}
	id := identity(t, gc)
	if id["boot_id"] == a.ident["boot_id"] || id["random"] == a.ident["random"] || id["env"] != "2" {
		t.Errorf("grandchild %v, parent %v", id, a.ident)
	}
	want.Env = map[string]string{"FORK": "2"}
	checkIdentity(t, id, want)
}

// provisional prepares a clone, as a host does before it knows the clone's identity. The clone cannot be released then.
func provisional(t *testing.T, c *guest.Client) {
	t.Helper()
	want := wantReseal(99, "gen-provisional")
	want.CA = otherCA
	want.Identity.Hostname, want.Token = "provisional", "provisional-token"
	want.Network.DNS, want.Env, want.Provisional = nil, nil, true
	if has, err := c.Has(t.Context(), guestapi.FeatureProvisional); err != nil || !has {
		t.Fatalf("the agent knows of provisional reseals: %t, %v", has, err)
	}
	report := reseal(t, c, want)
	if last := report.Steps[len(report.Steps)-1]; last.Name != guestapi.StepPractice || last.Status != core.ResealOK {
		t.Errorf("no program was started for practice: %+v", last)
	}
	if _, err := c.Release(t.Context(), guestapi.ReleaseRequest{Generation: "gen-provisional"}); core.CodeOf(err) != guestapi.CodeWrongState {
		t.Errorf("released after a provisional reseal: %v", err)
	}
	h, err := c.Health(t.Context())
	if err != nil || h.State != guestapi.StateFrozen || h.CaptureID != "ckpt_1" {
		t.Errorf("after a provisional reseal: %+v %v", h, err)
	}
}

// testCA and otherCA are certificates of nobody.
var testCA, otherCA = selfSigned("testCA"), selfSigned("otherCA")

func selfSigned(name string) string {
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Unix(4e9, 0), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		panic(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// identity collects what must differ, as the workload sees it.
func identity(t *testing.T, c *guest.Client) map[string]string {
	t.Helper()
	before := time.Now().Unix()
	out := sh(t, c, `
echo boot_id=$(cat /proc/sys/kernel/random/boot_id)
echo random=$(head -c 32 /dev/urandom | sha256sum)
echo machine_id=$(cat /etc/machine-id)
echo hostname=$(hostname)/$(cat /etc/hostname)/$(grep -c "127.0.1.1.*$(hostname)" /etc/hosts)
echo ssh=$(cat /etc/ssh/ssh_host_ed25519_key.pub)
echo sshfiles=$(ls /etc/ssh | sort | tr '\n' ' ')
echo mac=$(cat /sys/class/net/eth0/address)
echo ip=$(ip -o -4 addr show dev eth0 | awk '{print $4}')
echo route=$(ip route show default)
echo neigh=$(ip neigh show)
echo dns=$(cat /etc/resolv.conf)
echo tfo=$(cat /proc/sys/net/ipv4/tcp_fastopen_key)
echo token=$(cat /run/coppice/token)/$(stat -c %a /run/coppice/token)
echo generation=$(cat /run/coppice/generation)
echo env=$FORK
echo seed=$(ls /var/lib/systemd/random-seed /var/lib/dhcp/* 2>/dev/null)
echo hooks=$(tail -n 2 /root/hooks | tr '\n' '|')
echo left=$(pgrep -fc '[s]leep 1000')
echo now=$(date +%s)
echo counted=$(cat /root/counted | tr -d " ")
echo ca=$(grep -c 'coppice: begin' /etc/ssl/certs/ca-certificates.crt)
echo authority=$(sed -n '/coppice: begin/,/coppice: end/{/coppice:/!p}' /etc/ssl/certs/ca-certificates.crt | sha256sum | cut -c1-64)
echo runs=$(grep -c second /root/hooks)
echo provisional=$(grep -rls -e provisional -e 00000000000000000000000000abc063 /etc /run/coppice /root /workspace /var/lib | tr '\n' ' ')
echo disk=$(df -BG --output=size / | tail -1 | tr -dc 0-9)
`)
	m := map[string]string{}
	for line := range strings.Lines(out) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		m[k] = strings.TrimSpace(v)
	}
	var now int64
	if _, err := fmt.Sscan(m["now"], &now); err != nil || now < before-1 || now > time.Now().Unix()+1 {
		t.Errorf("the clock said %s between %d and %d", m["now"], before, time.Now().Unix())
	}
	return m
}

func checkIdentity(t *testing.T, got map[string]string, want guestapi.ResealRequest) {
	t.Helper()
	id := want.Identity
	for k, w := range map[string]string{
		"machine_id": id.MachineID, "hostname": id.Hostname + "/" + id.Hostname + "/1", "mac": id.MAC, "ip": id.IP.String() + "/32",
		"route": "default via 10.77.255.1 dev eth0 proto static onlink", "neigh": "10.77.255.1 dev eth0 lladdr 02:00:00:00:ff:ff PERMANENT",
		"dns": "nameserver 10.77.255.1", "token": want.Token + "/600", "generation": id.Generation, "env": want.Env["FORK"], "seed": "", "left": "0", "ca": "1", "authority": fmt.Sprintf("%x", sha256.Sum256([]byte(want.CA))),
		"sshfiles": "ssh_host_ed25519_key ssh_host_ed25519_key.pub",
		"hooks":    fmt.Sprintf("%s %s %s %s ../hooks 1|second|", id.Generation, id.Hostname, id.Generation, id.Hostname),
	} {
		if got[k] != w {
			t.Errorf("%s is %q, want %q", k, got[k], w)
		}
	}
}

// checkWorker asks the process that was alive at the capture.
func checkWorker(t *testing.T, c *guest.Client, id core.SessionID, seen int) {
	t.Helper()
	m := &terminal{t: t, conn: attach(t, c, id)}
	m.until("up\n") // what it had said before the capture is kept
	if len(m.seen) < seen {
		t.Errorf("the clone has %q of the output, the parent had %d bytes", m.seen, seen)
	}
	m.send(2, "go\n")
	m.until("udp=")
	m.until("\n")
	const want = "up\nn=1 inner=b'hi' blocked=Software caused connection abort syn=Software caused connection abort udp="
	if !strings.HasPrefix(m.seen, want) || strings.Contains(m.seen, "udp=sent") {
		t.Errorf("the worker says %q, want %q and a UDP error", m.seen, want)
	}
}

// frames is how much of frames the guest has sent. Before the reseal its kernel may repeat what the parent had begun: the host's end of
// the link is down then.
func (v *vm) frames() int {
	v.t.Helper()
	fi, err := os.Stat(v.file("pcap"))
	if err != nil {
		v.t.Fatal(err)
	}
	return int(fi.Size())
}

// checkFrames looks at every frame that the guest has sent since it was resealed: none has an old address; and none at all has come
// while mac is empty. The VMM's own announcement at resume (RARP) is not the guest's.
func checkFrames(t *testing.T, v *vm, from int, mac string) {
	t.Helper()
	b, err := os.ReadFile(v.file("pcap"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for at := max(24, from); at+16 <= len(b); {
		size := int(binary.LittleEndian.Uint32(b[at+8:]))
		if at+16+size > len(b) {
			break
		}
		frame := b[at+16 : at+16+size]
		at += 16 + size
		if len(frame) < 14 || binary.BigEndian.Uint16(frame[12:]) == 0x8035 {
			continue
		}
		n++
		if from := net.HardwareAddr(frame[6:12]).String(); from != mac {
			t.Errorf("a frame from %s (want %q): %s", from, mac, hex.EncodeToString(frame[:min(len(frame), 60)]))
		}
	}
	t.Logf("%d frames of the guest", n)
}
