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

// head is the head of a request as it came, before net/http makes sense of it: it keeps no Host header beside an absolute target, and
// no Content-Length beside chunks.
type head struct {
	method, target string
	host           string
	hasHost        bool // HTTP/1.0 knows of none
	size           int  // bytes, with the empty line
}

var (
	errHead      = errors.New("the request's head cannot be read")
	errHeadSize  = errors.New("the request's head is longer than 64 KiB")
	errHeadHost  = errors.New("the request does not have exactly one Host header")
	errHost      = errors.New("the request's Host header is not a host")
	errTwoBodies = errors.New("the request says its length in two ways")
	errHTTP09    = errors.New("only HTTP/1.0 and HTTP/1.1 are spoken here")
)

// readHead reads the head of the first request of a connection, which is in conn again afterwards.
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

// parseHead takes less than HTTP allows: lines end in CR LF and are not folded.
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
	if h.hasHost && !httpguts.ValidHostHeader(h.host) { // net/http refuses it as well, and tells nobody
		return head{method: h.method}, errHost
	}
	if count["Content-Length"]+count["Transfer-Encoding"] > 1 {
		return head{}, errTwoBodies
	}
	return h, nil
}

// hostPort reads what may have a port; without one, it is the one given.
func hostPort(s string, port uint16) (target, error) {
	if h, err := policy.ParseHost(s); err == nil {
		return target{h, port}, nil
	}
	h, p, err := policy.ParseHostPort(s)
	return target{h, p}, err
}

// drain is what comes before an end that the guest is to hear of although it still sends, or does not read.
func drain(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(time.Second))
	_ = closeWrite(c)
	_, _ = io.CopyN(io.Discard, c, 1<<20)
	_ = c.Close()
}
