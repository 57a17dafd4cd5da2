package e2e

import (
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// vectorRow is a row of the table of addresses and names that sandboxes must not reach (the threat model's 1.3).
type vectorRow struct {
	name  string   // as in the table
	forms []string // as a host is written
	addrs []string // that it is, or that are in it: names resolve to them, and guests dial them
	said  [][]byte // to the proxy
	// tunnels are ClientHellos: asked for as CONNECT does, and sent as if there were no proxy.
	tunnels [][]byte
}

// The host that the policy of these tests allows, and one that it does not.
const (
	goodHost = "a.example.com"
	badHost  = "b.example.com"
)

// addressRows are the rows that are addresses, however they are written.
func addressRows() []vectorRow {
	row := func(name, form string, addrs ...string) vectorRow {
		return vectorRow{name: name, forms: []string{form}, addrs: addrs}
	}
	const metadata = "169.254.169.254"
	return []vectorRow{
		row("127.0.0.1", "127.0.0.1", "127.0.0.1"), row("127.1", "127.1"), row("0", "0"), row("0.0.0.0", "0.0.0.0", "0.0.0.0"), row("[::]", "[::]", "::"), row("[::1]", "[::1]", "::1"),
		row("2130706433", "2130706433"), row("0x7f000001", "0x7f000001"), row("0177.0.0.1", "0177.0.0.1"),
		row(metadata, metadata, metadata), row("169.254.170.2", "169.254.170.2", "169.254.170.2"), row("100.100.100.200", "100.100.100.200", "100.100.100.200"),
		row("168.63.129.16", "168.63.129.16", "168.63.129.16"), row("fd00:ec2::254", "[fd00:ec2::254]", "fd00:ec2::254"), row("metadata.google.internal", "metadata.google.internal"),
		row("10/8", "10.1.2.3", "10.1.2.3"), row("172.16/12", "172.16.5.4", "172.16.5.4", "172.31.255.254"), row("192.168/16", "192.168.0.1", "192.168.0.1"), row("100.64/10", "100.64.0.1", "100.64.0.1"),
		row("198.18/15", "198.19.255.1", "198.19.255.1"), row("192.0.0.0/24", "192.0.0.192", "192.0.0.192"), row("224/4", "224.0.0.251", "224.0.0.251"), row("240/4", "240.1.2.3", "240.1.2.3"),
		row("255.255.255.255", "255.255.255.255", "255.255.255.255"),
		row("fc00::/7", "[fd12:3456::1]", "fd12:3456::1"), row("fe80::/10", "[fe80::1]", "fe80::1"), row("fec0::/10", "[fec0::1]", "fec0::1"), row("ff00::/8", "[ff02::1]", "ff02::1"),
		row("::ffff:169.254.169.254", "[::ffff:169.254.169.254]", "::ffff:169.254.169.254"), row("::ffff:a9fe:a9fe", "[::ffff:a9fe:a9fe]"), row("::a9fe:a9fe", "[::a9fe:a9fe]", "::a9fe:a9fe"),
		row("64:ff9b::a9fe:a9fe", "[64:ff9b::a9fe:a9fe]", "64:ff9b::a9fe:a9fe"), row("64:ff9b:1::/48", "[64:ff9b:1::a9fe:a9fe]", "64:ff9b:1::a9fe:a9fe"),
		row("2002:a9fe:a9fe::", "[2002:a9fe:a9fe::]", "2002:a9fe:a9fe::"), row("2001::/32(Teredo)", "[2001::a9fe:a9fe]", "2001::a9fe:a9fe"),
	}
}

// nameRows are the rows that are names, requests and ClientHellos.
func nameRows(t *testing.T) []vectorRow {
	t.Helper()
	get := func(target string, lines ...string) []byte {
		return []byte("GET " + target + " HTTP/1.1\r\n" + strings.Join(append(lines, "", ""), "\r\n"))
	}
	connect := func(target string) []byte {
		return []byte("CONNECT " + target + " HTTP/1.1\r\nHost: " + target + "\r\n\r\n")
	}
	good, bad := "Host: "+goodHost, "Host: "+badHost
	row := func(name string, said ...[]byte) vectorRow { return vectorRow{name: name, said: said} }
	hellos := func(name string, list ...[]byte) vectorRow { return vectorRow{name: name, tunnels: list} }
	forms := func(name string, list ...string) vectorRow { return vectorRow{name: name, forms: list} }
	var ports [][]byte
	for _, p := range []int{22, 25, 53, 3306, 6443} {
		ports = append(ports, connect(fmt.Sprintf("%s:%d", goodHost, p)))
	}
	nameless := clientHello(t, "")
	return []vectorRow{
		forms("[allowed.example]", "["+goodHost+"]"), forms("allowed.example.evil.com", goodHost+".evil.test"), forms("evilallowed.example", "evil"+goodHost, "x"+goodHost),
		forms("allowed.example:443@evil", goodHost+":443@evil.test", goodHost+"@evil.test"), forms("allowed%2eexample", "a%2eexample.com"),
		forms("xn-- homographs", "\u0430.example.com", "xn--80a.example.com", "xn--a.example.com"),
		forms("host with NUL/CR/LF/space/tab", goodHost+"\x00", goodHost+"\r", goodHost+"\n.evil.test", goodHost+" .evil.test", goodHost+"\t.evil.test"),
		forms("empty label", "a..example.com", "."+goodHost), forms("254-byte name", strings.Repeat("a.", 121)+"example.com"),
		row("port 0/65536/\"443 \"", connect(goodHost+":0"), connect(goodHost+":65536"), connect(goodHost+":443 "), get("http://"+goodHost+":0/", good+":0"), get("http://"+goodHost+":65536/", good+":65536")),
		row("CONNECT to port 22/25/53/3306/6443", ports...),
		row("unix: and file: schemes", get("unix:/run/coppice.sock", good), get("file:///etc/passwd", good), get("unix://"+goodHost+"/x", good)),
		row("host header twice", get("http://"+goodHost+"/", good, bad), get("http://"+goodHost+"/", good, good), get("/", bad, good)),
		row("Host + absolute URI mismatch", get("http://"+goodHost+"/", bad), get("http://"+badHost+"/", good)),
		row("Transfer-Encoding+Content-Length", get("http://"+goodHost+"/", good, "Content-Length: 3", "Transfer-Encoding: chunked"), get("http://"+goodHost+"/", good, "Content-Length: 3", "Content-Length: 4")),
		row("HTTP/0.9", []byte("GET http://"+goodHost+"/\r\n\r\n"), []byte("GET /\r\n\r\n")),
		row("h2c upgrade", get("http://"+badHost+"/", bad, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"), []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")),
		row("WebSocket to denied host", get("http://"+badHost+"/", bad, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")),
		hellos("SNI = IP", withSNI(nameless, "169.254.169.254")), hellos("SNI missing", nameless), hellos("SNI with trailing dot", withSNI(nameless, goodHost+".")),
		hellos("two SNI entries", withSNI(nameless, goodHost, badHost), withSNI(nameless, badHost, goodHost)),
		hellos("ClientHello > 16 KiB", withExtension(clientHello(t, badHost), 21, make([]byte, 16<<10)), withExtension(clientHello(t, goodHost), 21, make([]byte, 17<<10))),
		hellos("ECH present", withExtension(clientHello(t, goodHost), 0xfe0d, make([]byte, 32))),
		hellos("SNI of another host", clientHello(t, badHost), clientHello(t, "metadata.google.internal")),
	}
}

// clientHello is that of a client for a name; without one when the name is empty.
func clientHello(t *testing.T, name string) []byte {
	t.Helper()
	near, far := net.Pipe()
	defer far.Close()
	go func() {
		_ = tls.Client(near, &tls.Config{ServerName: name, InsecureSkipVerify: true}).HandshakeContext(t.Context())
		_ = near.Close()
	}()
	_ = far.SetReadDeadline(time.Now().Add(10 * time.Second))
	head := make([]byte, 5)
	if _, err := io.ReadFull(far, head); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, binary.BigEndian.Uint16(head[3:]))
	if _, err := io.ReadFull(far, body); err != nil {
		t.Fatal(err)
	}
	return append(head, body...)
}

func withSNI(hello []byte, names ...string) []byte {
	var list []byte
	for _, n := range names {
		list = append(binary.BigEndian.AppendUint16(append(list, 0), uint16(len(n))), n...)
	}
	return withExtension(hello, 0, append(binary.BigEndian.AppendUint16(nil, uint16(len(list))), list...))
}

// withExtension adds an extension to a ClientHello, which becomes as many records as it takes.
func withExtension(hello []byte, kind uint16, body []byte) []byte {
	const most = 16 << 10
	m := slices.Clone(hello[5:])
	// handshake header 4, version 2, random 32, session id, suites, compression, extensions
	at := 4 + 2 + 32
	at += 1 + int(m[at])
	at += 2 + int(binary.BigEndian.Uint16(m[at:]))
	at += 1 + int(m[at])
	ext := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, kind), uint16(len(body)))
	ext = append(ext, body...)
	m = slices.Insert(m, at+2, ext...)
	binary.BigEndian.PutUint16(m[at:], binary.BigEndian.Uint16(m[at:])+uint16(len(ext)))
	n := len(m) - 4
	m[1], m[2], m[3] = byte(n>>16), byte(n>>8), byte(n)
	var out []byte
	for part := range slices.Chunk(m, most) {
		out = binary.BigEndian.AppendUint16(append(out, hello[:3]...), uint16(len(part)))
		out = append(out, part...)
	}
	return out
}
