package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/runner/vmm"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// guest attacks as root in Mallory's machine: requests of every size and shape, connections by the thousand, questions, floods.
func (x *assault) guest() {
	x.vectors(x.heads())
	x.vectors(x.destinations())
	x.storms()
	x.console()
	x.hoard()
}

// vectors has the guest send them and wants each to be answered or ended in time, without a secret in the answer.
func (x *assault) vectors(list []guestVector) {
	x.t.Helper()
	answers := map[string]guestAnswer{}
	for some := range slices.Chunk(list, 60) {
		args := []string{probePath, "say"}
		for _, v := range some {
			b, err := json.Marshal(v)
			if err != nil {
				x.t.Fatal(err)
			}
			args = append(args, string(b))
		}
		ctx, cancel := context.WithTimeout(x.t.Context(), 5*time.Minute)
		res, err := x.mallory.Exec(ctx, x.ws, coppice.ExecRequest{Command: args})
		cancel()
		if err != nil {
			x.t.Fatalf("exec in the attacker's guest: %v", err)
		}
		var got map[string]guestAnswer
		if err := json.Unmarshal([]byte(res.Stdout), &got); err != nil {
			x.t.Fatalf("%v in %q, %q", err, res.Stdout, res.Stderr)
		}
		maps.Copy(answers, got)
	}
	for _, v := range list {
		a, ok := answers[v.ID]
		x.take(a.Got)
		var err error
		switch {
		case !ok:
			err = errors.New("the guest does not say what came of it")
		case a.End == "silence":
			err = fmt.Errorf("it was neither answered nor ended; first bytes %q", a.Got)
		case strings.HasPrefix(v.ID, "denied") && a.carried():
			err = fmt.Errorf("it was carried: %q", a.Got)
		}
		x.held("guest", v.ID, err)
	}
}

// heads are requests whose head or framing is large or odd in one place.
func (x *assault) heads() []guestVector {
	text := func(s string) part { return part{[]byte(s), 1} }
	times := func(s string, n int) part { return part{[]byte(s), n} }
	end := text("\r\n\r\n")
	get := func(host string) part { return text("GET http://" + host + "/ HTTP/1.1\r\nHost: " + host + "\r\n") }
	kinds := []struct {
		name string
		of   func(host string, n int) []part
	}{
		{"a header's name", func(h string, n int) []part { return []part{get(h), times("X", n), text(": v"), end} }},
		{"a name like a placeholder's", func(h string, n int) []part {
			return []part{get(h), text("coppice-brokered-"), times("&", n), text(": v"), end}
		}},
		{"a value like a placeholder's", func(h string, n int) []part {
			return []part{get(h), text("X-A: coppice-brokered-"), times("&", n), end}
		}},
		{"a header's value", func(h string, n int) []part { return []part{get(h), text("X-A: "), times("&", n), end} }},
		{"a value that is no text", func(h string, n int) []part { return []part{get(h), text("X-A: "), times("\xff\xc3", n), end} }},
		{"a path", func(h string, n int) []part {
			return []part{text("GET http://" + h + "/"), times("a", n), text(" HTTP/1.1\r\nHost: " + h), end}
		}},
		{"a path of escapes", func(h string, n int) []part {
			return []part{text("GET http://" + h + "/"), times("%26", n), text(" HTTP/1.1\r\nHost: " + h), end}
		}},
		{"a query", func(h string, n int) []part {
			return []part{text("GET http://" + h + "/?"), times("&coppice-brokered-", n/16+1), text(" HTTP/1.1\r\nHost: " + h), end}
		}},
		{"a method", func(h string, n int) []part {
			return []part{times("M", n), text(" http://" + h + "/ HTTP/1.1\r\nHost: " + h), end}
		}},
		{"a host", func(h string, n int) []part {
			return []part{text("GET http://"), times("a", n), text("." + h + "/ HTTP/1.1\r\nHost: "), times("a", n), text("." + h), end}
		}},
		{"a target of CONNECT", func(h string, n int) []part {
			return []part{text("CONNECT "), times("a", n), text("." + h + ":443 HTTP/1.1"), end}
		}},
		{"many headers", func(h string, n int) []part { return []part{get(h), times("A: b\r\n", n/6+1), text("\r\n")} }},
		{"many hosts", func(h string, n int) []part { return []part{get(h), times("Host: "+h+"\r\n", n/24+1), text("\r\n")} }},
		{"many placeholders", func(h string, n int) []part {
			return []part{get(h), times("Authorization: Bearer coppice-brokered-x\r\n", n/40+1), text("\r\n")}
		}},
		{"folded lines", func(h string, n int) []part {
			return []part{get(h), text("X-A: b\r\n"), times(" c\r\n", n/4+1), text("\r\n")}
		}},
		{"empty lines", func(h string, n int) []part { return []part{times("\r\n", n/2+1), get(h), text("\r\n")} }},
		{"NULs", func(h string, n int) []part { return []part{get(h), text("X-A: "), times("\x00", n), end} }},
		{"a chunk's extension", func(h string, n int) []part {
			return []part{text("POST http://" + h + "/ HTTP/1.1\r\nHost: " + h + "\r\nTransfer-Encoding: chunked\r\n\r\n1;"), times("e", n), text("\r\nx\r\n0\r\n\r\n")}
		}},
		{"a trailer", func(h string, n int) []part {
			return []part{text("POST http://" + h + "/ HTTP/1.1\r\nHost: " + h + "\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n0\r\nX-T: "), times("t", n), end}
		}},
	}
	sizes := []int{1, 300, 9_000, 60_000, 1 << 20}
	var list []guestVector
	for _, k := range kinds {
		for _, n := range sizes {
			list = append(list, guestVector{ID: fmt.Sprintf("denied: %s of %d, through the proxy", k.name, n), To: x.proxy, Parts: k.of("x.evil.test", n)})
			list = append(list, guestVector{ID: fmt.Sprintf("%s of %d, to an allowed host", k.name, n), To: x.proxy, Parts: k.of(malloryHost, n)})
			list = append(list, guestVector{ID: fmt.Sprintf("%s of %d, without the proxy", k.name, n), To: somewhere + ":80", Parts: k.of(malloryHost, n)})
		}
	}
	return list
}

// destinations are addresses that no sandbox may reach: as names that the rules allow, and as addresses.
func (x *assault) destinations() []guestVector {
	var list []guestVector
	addrs := []string{"127.0.0.1", "0.0.0.0", "169.254.169.254", "10.0.0.1", "100.100.100.200", "192.168.0.1", "172.16.0.1", "224.0.0.1", "::1", "fd00:ec2::254", "::ffff:169.254.169.254"}
	for i, a := range addrs {
		name := fmt.Sprintf("t%d.points.example.com", i)
		x.world.Point(name, a)
		list = append(list,
			guestVector{ID: "denied: a name at " + a, To: x.proxy, Send: [][]byte{fmt.Appendf(nil, "GET http://%s/ HTTP/1.1\r\nHost: %[1]s\r\n\r\n", name)}},
			guestVector{ID: "denied: " + a, To: x.proxy, Send: [][]byte{fmt.Appendf(nil, "CONNECT %s HTTP/1.1\r\n\r\n", net.JoinHostPort(a, "443"))}})
	}
	return list
}

// storms are connections by the thousand. Most of them are to be refused or ended.
func (x *assault) storms() {
	const seconds, count = "15", "3000"
	dns := net.JoinHostPort(strings.Split(x.proxy, ":")[0], "53")
	for _, s := range [][]string{
		{"silent", count, seconds, x.proxy},
		{"drip", count, seconds, x.proxy},
		{"burst", "30", seconds, x.proxy},
		{"silent", count, seconds, somewhere + ":443"},
		{"drip", count, seconds, somewhere + ":80"},
		{"silent", count, seconds, dns},
		{"dns", "8", seconds, dns},
	} {
		got := x.sh(probePath + " storm " + strings.Join(s, " ") + " 2>&1")
		var err error
		if !strings.Contains(got, "opened") {
			err = fmt.Errorf("the guest said %q", got)
		}
		x.t.Logf("storm %v: %s", s, strings.TrimSpace(got))
		x.held("guest", "a storm, "+strings.Join(s, " "), err)
	}
}

// console floods the machine's console, which is a serial port and slow: what the host keeps of it is bounded.
func (x *assault) console() {
	const flood, most = 10 * vmm.ConsoleBytes, 4 * vmm.ConsoleBytes
	got := x.sh(fmt.Sprintf(`yes "$(printf '\033]0;x\007\033[2J')" | head -c %d | timeout -s INT 120 dd of=/dev/console bs=4096 iflag=fullblock 2>&1`, flood))
	var printed int64
	for line := range strings.Lines(got) {
		if n, _, ok := strings.Cut(line, " bytes"); ok {
			printed, _ = strconv.ParseInt(n, 10, 64)
		}
	}
	var err error
	if printed < most {
		err = fmt.Errorf("the guest printed only %d bytes, which tests nothing: %q", printed, got)
	}
	if walk := filepath.WalkDir(x.s.data, func(path string, d os.DirEntry, err error) error {
		if err == nil && strings.Contains(d.Name(), "console") {
			if info, err := d.Info(); err == nil && info.Size() > most { // files come and go
				return fmt.Errorf("the host keeps %d bytes of it in %s", info.Size(), path)
			}
		}
		return nil
	}); err == nil {
		err = walk
	}
	x.held("guest", "a flood of the console", err)
}

// hoard makes sessions and output beyond every bound of the agent.
func (x *assault) hoard() {
	const n, enough = 600, 20
	refused := 0
	var last error
	var ids []coppice.SessionID
	for range n {
		s, err := x.mallory.StartSession(x.t.Context(), x.ws, coppice.ExecRequest{Command: []string{"sleep", "3000"}})
		if err == nil {
			ids = append(ids, s.ID)
			continue
		}
		last = err
		if refused++; refused == enough {
			break
		}
	}
	x.t.Logf("%d sessions were made, then %d refused: %v", len(ids), refused, last)
	var err error
	if e := (*coppice.Error)(nil); refused == 0 || !errors.As(last, &e) || e.Code == "INTERNAL" {
		err = fmt.Errorf("%d sessions were made and %d refused, the last with %w", len(ids), refused, last)
	}
	x.held("guest", "sessions by the hundred", err)
	for _, id := range ids { // the agent runs no more programs until they have ended
		if err := x.mallory.DeleteSession(x.t.Context(), id); err != nil {
			x.t.Error(err)
		}
	}
	x.sh("yes x | head -c 8000000; true")
	x.held("guest", "8 MB of output", nil)
}
