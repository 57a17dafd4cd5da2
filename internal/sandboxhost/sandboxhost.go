// Package sandboxhost owns the form of host names that lead to a port of a sandbox: <port>-<id>.<domain>, where
// the id is that of a workspace after "ws_".
package sandboxhost

import (
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// Target is a port of a sandbox.
type Target struct {
	ID   string // the 26 characters after "ws_"
	Port int
}

var bareID = regexp.MustCompile(`^[0-9a-hjkmnp-tv-z]{26}$`)

// maxHost bounds a Host header: a name has at most 253 characters, and a port six.
const maxHost = 260

// Name returns the name in a Host header, in lower case, without port and final dot.
func Name(host string) string {
	if len(host) > maxHost {
		return ""
	}
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

// Decode reads a Host header of the form <port>-<id>.<domain>. An empty domain accepts every domain.
func Decode(host, domain string) (Target, bool) {
	first, rest, _ := strings.Cut(Name(host), ".")
	if domain != "" && rest != domain || rest == "" {
		return Target{}, false
	}
	port, id, _ := strings.Cut(first, "-")
	return New(id, port)
}

// New checks an id and a port as clients wrote them. Each port has only one form.
func New(id, port string) (Target, bool) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || port[0] == '0' || port[0] == '+' || !bareID.MatchString(id) {
		return Target{}, false
	}
	return Target{id, int(n)}, true
}

// Host is the name of a target below a domain.
func (t Target) Host(domain string) string { return strconv.Itoa(t.Port) + "-" + t.ID + "." + domain }

// Bare reports whether a Host header names no sandbox but this server: by an address, as localhost, as the domain itself,
// or as sandbox.<domain>. Only there do headers name the sandbox.
func Bare(host, domain string) bool {
	name := Name(host)
	if _, err := netip.ParseAddr(name); err == nil || name == "localhost" {
		return true
	}
	return domain != "" && (name == domain || name == "sandbox."+domain)
}
