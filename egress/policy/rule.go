package policy

import (
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// Rule allows one host, or the names below one, at some ports.
type Rule struct {
	Host   Host
	Suffix bool   // every name below Host, and not Host
	Port   uint16 // 0: the ports of HTTP and HTTPS
	TCP    bool   // any protocol; otherwise only TLS and HTTP
}

// The ports of a rule that names no port.
const (
	portHTTP  = 80
	portHTTPS = 443
)

// parseRule reads a rule that is not a bundle.
func parseRule(s string) (Rule, error) {
	var r Rule
	rest, tcp := strings.CutPrefix(s, "tcp://")
	r.TCP = tcp
	rest, r.Suffix = strings.CutPrefix(rest, "*.")
	host, port, err := splitPort(rest)
	if err != nil {
		return Rule{}, badRule(s, err.Error())
	}
	r.Port = port
	if r.Host, err = ParseHost(host); err != nil {
		return Rule{}, badRule(s, err.Error())
	}
	_, isAddr := r.Host.Addr()
	switch {
	case strings.Contains(host, "*"):
		return Rule{}, badRule(s, "a star may only be the first label, as in *.example.com")
	case r.Suffix && isAddr:
		return Rule{}, badRule(s, "there are no names below an address")
	case r.Suffix && !strings.Contains(r.Host.Name(), "."):
		return Rule{}, badRule(s, "it would allow a whole top-level domain")
	case r.TCP && (r.Suffix || r.Port == 0):
		return Rule{}, badRule(s, "tcp:// takes one host and a port, as in tcp://db.example.com:5432")
	}
	return r, nil
}

// splitPort separates the port from a host; the port is 0 when there is none.
func splitPort(s string) (host string, port uint16, err error) {
	bare := !strings.Contains(s, ":") || strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") || strings.Count(s, ":") > 1 && !strings.HasPrefix(s, "[")
	if bare {
		return s, 0, nil
	}
	host, text, err := net.SplitHostPort(s)
	if err != nil {
		return "", 0, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not a host and a port", core.Clip(s))
	}
	if strings.HasPrefix(s, "[") {
		host = "[" + host + "]"
	}
	port, err = ParsePort(text)
	return host, port, err
}

// ParsePort reads a port as it is written in URLs and requests: a decimal number between 1 and 65535.
func ParsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || s[0] == '0' || s[0] == '+' {
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not a port between 1 and 65535", core.Clip(s))
	}
	return uint16(n), nil
}

// ParseHostPort reads "host:port"; the port is required.
func ParseHostPort(s string) (Host, uint16, error) {
	host, port, err := splitPort(s)
	if err == nil && port == 0 {
		err = core.Errorf(core.Invalid, core.CodeInvalidField, "%q names no port", core.Clip(s))
	}
	if err != nil {
		return Host{}, 0, err
	}
	h, err := ParseHost(host)
	return h, port, err
}

// JoinHostPort returns the form that [ParseHostPort] reads.
func JoinHostPort(h Host, port uint16) string {
	return net.JoinHostPort(h.String(), strconv.Itoa(int(port)))
}

func badRule(s, why string) error {
	return core.Errorf(core.Invalid, core.CodeInvalidField, "%q cannot be allowed: %s", core.Clip(s), why)
}

// String returns the rule in canonical form.
func (r Rule) String() string {
	host := r.Host.String()
	if addr, ok := r.Host.Addr(); ok && addr.Is6() {
		host = "[" + host + "]"
	}
	if r.Suffix {
		host = "*." + host
	}
	if r.Port != 0 {
		host += ":" + strconv.Itoa(int(r.Port))
	}
	if r.TCP {
		return "tcp://" + host
	}
	return host
}

// allows reports whether a rule allows a host at a port; raw means any protocol other than TLS and HTTP.
func (r Rule) allows(h Host, port uint16, raw bool) bool {
	return r.covers(h) && slices.Contains(r.ports(), port) && (r.TCP || !raw)
}

func (r Rule) ports() []uint16 {
	if r.Port != 0 {
		return []uint16{r.Port}
	}
	return []uint16{portHTTP, portHTTPS}
}

func (r Rule) covers(h Host) bool {
	if r.Suffix {
		return below(h.name, r.Host.name)
	}
	return h == r.Host
}

// withinAt reports whether another rule allows everything that this rule allows at one of its ports.
func (r Rule) withinAt(port uint16, o Rule) bool {
	switch {
	case r.TCP && !o.TCP || !slices.Contains(o.ports(), port):
		return false
	case r.Suffix && o.Suffix:
		return r.Host == o.Host || below(r.Host.name, o.Host.name)
	case r.Suffix:
		return false
	}
	return o.covers(r.Host)
}
