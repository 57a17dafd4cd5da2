package policy

import (
	"errors"
	"net/netip"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"

	"github.com/coppice-dev/coppice/core"
)

// Host is a name or an address in canonical form. The zero Host is no host.
type Host struct {
	name string
	addr netip.Addr
}

// maxName bounds a name in bytes, like DNS.
const maxName = 253

// ParseHost reads a host from a CONNECT request, a Host header, an SNI extension, a rule or a question to the resolver.
// It is a DNS name, an IPv4 address or an IPv6 address, which may be in brackets. There is no port.
func ParseHost(s string) (Host, error) {
	if inner, ok := strings.CutPrefix(s, "["); ok {
		inner, ok = strings.CutSuffix(inner, "]")
		addr, err := netip.ParseAddr(inner)
		if !ok || err != nil || !addr.Is6() || addr.Zone() != "" {
			return Host{}, badHost(s, "brackets are for IPv6 addresses")
		}
		return Host{addr: addr}, nil
	}
	if addr, err := netip.ParseAddr(s); err == nil {
		if addr.Zone() != "" {
			return Host{}, badHost(s, "an address must not have a zone")
		}
		return Host{addr: addr}, nil
	}
	name, err := parseName(s)
	return Host{name: name}, err
}

func parseName(s string) (string, error) {
	if len(s) > 4*maxName { // no form of a name is longer
		return "", badHost(s, "a name has at most 253 characters")
	}
	ascii, err := profile.ToASCII(strings.TrimSuffix(s, "."))
	if err == nil && ascii != "" { // the result must not change again, or two forms would mean one host
		var again string
		if again, err = profile.ToASCII(ascii); again != ascii {
			err = errors.Join(err, errTwoForms)
		}
	}
	if err != nil || !utf8.ValidString(s) {
		return "", badHost(s, "it is not a DNS name")
	}
	if ascii == "" || len(ascii) > maxName {
		return "", badHost(s, "a name has between 1 and 253 characters")
	}
	labels := strings.Split(ascii, ".")
	for _, l := range labels {
		if !isLabel(l) {
			return "", badHost(s, "each label must have 1 to 63 letters, digits and hyphens, and no hyphen at its beginning or end")
		}
	}
	if last := labels[len(labels)-1]; isNumber(last) {
		return "", badHost(s, "a name that ends in a number could be read as an address")
	}
	return ascii, nil
}

var errTwoForms = errors.New("the name has two forms")

// profile converts a name as browsers do, and refuses what they refuse.
var profile = idna.New(
	idna.MapForLookup(), idna.Transitional(false), idna.StrictDomainName(true), idna.ValidateLabels(true),
	idna.CheckHyphens(false), idna.CheckJoiners(true), idna.BidiRule(), idna.VerifyDNSLength(false),
)

// isLabel checks a label from IDNA against the rules for host names (RFC 1123).
func isLabel(l string) bool {
	if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
		return false
	}
	for i := range len(l) {
		c := l[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// isNumber reports whether the C library and browsers take a label for a part of an address: digits, or hexadecimal.
func isNumber(l string) bool {
	digits := "0123456789"
	if hex, ok := strings.CutPrefix(l, "0x"); ok {
		l, digits = hex, "0123456789abcdef"
	}
	return strings.Trim(l, digits) == ""
}

func badHost(s, why string) error {
	return core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not a host: %s", core.Clip(s), why)
}

// String returns the host as it is written in URLs, but IPv6 without brackets; empty for the zero Host.
func (h Host) String() string {
	if h.addr.IsValid() {
		return h.addr.String()
	}
	return h.name
}

// Name returns the host's name; empty for an address.
func (h Host) Name() string { return h.name }

// Addr returns the host's address; ok is false for a name.
func (h Host) Addr() (addr netip.Addr, ok bool) { return h.addr, h.addr.IsValid() }

// IsZero reports whether this is the zero Host.
func (h Host) IsZero() bool { return h == Host{} }

// below reports whether a name is a subdomain of another one.
func below(name, parent string) bool {
	rest, ok := strings.CutSuffix(name, parent)
	return ok && len(rest) > 1 && rest[len(rest)-1] == '.'
}
