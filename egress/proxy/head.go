package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/textproto"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/coppice-dev/coppice/egress/policy"
)

// head is the head of a request as it arrived, before net/http interprets it. net/http drops a Host header beside an
// absolute target, and a Content-Length beside chunked encoding.
type head struct {
	method, target string
	host           string
	hasHost        bool // HTTP/1.0 has none
	size           int  // bytes, including the empty line
}

var (
	errHead      = errors.New("the request's head cannot be read")
	errHeadSize  = errors.New("the request's head is longer than 64 KiB")
	errHeadHost  = errors.New("the request does not have exactly one Host header")
	errHost      = errors.New("the request's Host header is not a host")
	errTwoBodies = errors.New("the request gives its length in two ways")
	errHTTP09    = errors.New("this port takes only HTTP/1.0 and HTTP/1.1")
)

// readHead reads the head of the first request of a connection. Afterwards the same bytes can be read from the
// connection again.
func readHead(c *peeked, within time.Duration) (head, error) {
	if err := c.SetReadDeadline(time.Now().Add(within)); err != nil {
		return head{}, err
	}
	seen := c.ahead
	for {
		if at := bytes.Index(seen, []byte("\r\n\r\n")); at >= 0 {
			c.ahead = seen
			h, err := parseHead(seen[:at+2])
			h.size = at + 4
			return h, err
		}
		if len(seen) > maxHead {
			c.ahead = seen
			return head{}, errHeadSize
		}
		more := make([]byte, 4096)
		n, err := c.Conn.Read(more)
		seen = append(seen, more[:n]...)
		if err != nil && n == 0 {
			c.ahead = seen
			return head{}, errHead
		}
	}
}

// parseHead accepts less than HTTP allows: lines must end in CR LF and must not be folded.
func parseHead(b []byte) (head, error) {
	first, rest, _ := strings.Cut(string(b), "\r\n")
	words := strings.Split(first, " ")
	if len(words) != 3 || words[2] != "HTTP/1.1" && words[2] != "HTTP/1.0" {
		return head{}, errHTTP09
	}
	h := head{method: words[0], target: words[1]}
	count := map[string]int{}
	for line := range strings.SplitSeq(strings.TrimSuffix(rest, "\r\n"), "\r\n") {
		if line == "" {
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok || strings.ContainsAny(line, "\r\n\x00") || strings.ContainsAny(name, " \t") {
			return head{}, errHead
		}
		name = textproto.CanonicalMIMEHeaderKey(name)
		count[name]++
		if name == "Host" {
			h.host, h.hasHost = strings.Trim(value, " \t"), true
		}
	}
	if n := count["Host"]; n > 1 || n == 0 && words[2] == "HTTP/1.1" {
		return head{}, errHeadHost
	}
	if h.hasHost && !httpguts.ValidHostHeader(h.host) { // net/http refuses it as well, but without a record
		return head{method: h.method}, errHost
	}
	if count["Content-Length"]+count["Transfer-Encoding"] > 1 {
		return head{}, errTwoBodies
	}
	return h, nil
}

// hostPort parses a host with an optional port; without one, it returns the given port.
func hostPort(s string, port uint16) (target, error) {
	if h, err := policy.ParseHost(s); err == nil {
		return target{h, port}, nil
	}
	h, p, err := policy.ParseHostPort(s)
	return target{h, p}, err
}

// drain closes a connection so that the guest still receives what was sent, even if it goes on sending or does not read
// yet.
func drain(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(time.Second))
	_ = closeWrite(c)
	_, _ = io.CopyN(io.Discard, c, 1<<20)
	_ = c.Close()
}
