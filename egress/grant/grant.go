package grant

import (
	"encoding/base64"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Mode is the way in which a secret gets into requests.
type Mode string

// The modes.
const (
	// ModeHeader: the proxy reads what the guest sends to the hosts over TLS, with a certificate of the project's
	// authority.
	ModeHeader Mode = "header"
	// ModeBaseURL: the guest's program sends its requests to the proxy instead of the host, without TLS, at a URL of
	// the grant.
	ModeBaseURL Mode = "base_url"
)

// BasePath begins the path of each base URL at a sandbox's proxy. The id of a grant follows, then the path at its host.
const BasePath = "/grant/"

// Target is a host at a port.
type Target struct {
	Host policy.Host
	Port uint16
}

// Grant is permission to use a secret towards hosts.
type Grant struct {
	ID          string
	Mode        Mode
	Placeholder string
	Secret      Secret
	Targets     []Target  // exact; the base URL stands for the first
	Header      string    // in its canonical form
	Methods     []string  // empty: any
	Paths       []string  // prefixes, of whole segments; empty: any
	Expires     time.Time // zero: it does not expire
	MaxBytes    int64     // of bodies in both directions; 0: no bound
	PerMinute   int       // requests, 0: no bound
}

// same reports whether a flow that began with a grant may go on when o takes its place.
func (g *Grant) same(o *Grant) bool {
	return g.Secret == o.Secret && g.Placeholder == o.Placeholder && g.Mode == o.Mode && g.Header == o.Header && g.Expires.Equal(o.Expires) &&
		slices.Equal(g.Targets, o.Targets) && slices.Equal(g.Methods, o.Methods) && slices.Equal(g.Paths, o.Paths)
}

// is reports whether a grant is for a host.
func (g *Grant) is(t Target) bool { return slices.Contains(g.Targets, t) }

// covers reports whether a request is within a grant's methods and paths.
func (g *Grant) covers(method string, u *url.URL) bool {
	if len(g.Methods) > 0 && !slices.Contains(g.Methods, method) {
		return false
	}
	return len(g.Paths) == 0 || plain(u) && slices.ContainsFunc(g.Paths, func(p string) bool { return under(u.EscapedPath(), p) })
}

// under reports whether a path is a prefix or below it.
func under(path, prefix string) bool {
	rest, ok := strings.CutPrefix(path, prefix)
	return ok && (rest == "" || strings.HasSuffix(prefix, "/") || rest[0] == '/')
}

// plain reports whether every server reads a path in the same way: it has no ".." and no escaped separator.
func plain(u *url.URL) bool {
	if !strings.HasPrefix(u.Path, "/") || strings.Contains(u.Path, "\\") || strings.Contains(u.Path, "//") || strings.Contains(strings.ToLower(u.EscapedPath()), "%2f") {
		return false
	}
	for s := range strings.SplitSeq(u.Path, "/") {
		if s, _, _ = strings.Cut(s, ";"); s == "." || s == ".." {
			return false
		}
	}
	return true
}

// Set is the set of a sandbox's grants. The zero Set is empty. It is immutable.
type Set struct {
	grants  []Grant
	needles [][]needle // for each grant, the forms of its secret
}

// NewSet makes a set.
func NewSet(grants ...Grant) Set {
	s := Set{grants: slices.Clone(grants)}
	for _, g := range s.grants {
		s.needles = append(s.needles, forms(g.Secret.Reveal()))
	}
	return s
}

// Granted reports whether there is a grant for a host in a mode. If so, every request to the host must pass [Set.Use].
func (s Set) Granted(t Target, mode Mode) bool {
	return slices.ContainsFunc(s.grants, func(g Grant) bool { return g.Mode == mode && g.is(t) })
}

// Base returns the host that a grant's base URL stands for.
func (s Set) Base(id string) (Target, bool) {
	for _, g := range s.grants {
		if g.ID == id && g.Mode == ModeBaseURL && len(g.Targets) > 0 {
			return g.Targets[0], true
		}
	}
	return Target{}, false
}

// Has reports whether there is a grant with that id.
func (s Set) Has(id string) bool {
	return slices.ContainsFunc(s.grants, func(g Grant) bool { return g.ID == id })
}

// Hosts returns the names for which an issuer must be able to sign, sorted and without duplicates.
func (s Set) Hosts() []string {
	var out []string
	for _, g := range s.grants {
		for _, t := range g.Targets {
			if g.Mode == ModeHeader && t.Host.Name() != "" {
				out = append(out, t.Host.Name())
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Keeps reports whether a flow that began with a grant may go on under this set.
func (s Set) Keeps(g *Grant) bool {
	return slices.ContainsFunc(s.grants, func(o Grant) bool { return o.ID == g.ID && o.same(g) })
}

// DeniedError is the reason why a request is refused. It has no text that the guest must not see.
type DeniedError string

func (d DeniedError) Error() string { return string(d) }

// Use checks a request to a granted host against the grants in a mode, and puts the secret into its header. id is the
// grant that a base URL named; empty means any. used is nil when the request may go without a secret; what the guest
// itself put into the grants' headers is removed.
func (s Set) Use(r *http.Request, t Target, mode Mode, id string, now time.Time) (used *Grant, err error) {
	var covering []*Grant
	for i := range s.grants {
		g := &s.grants[i]
		if g.Mode != mode || !g.is(t) || id != "" && g.ID != id || !g.covers(r.Method, r.URL) {
			continue
		}
		covering = append(covering, g)
	}
	if covering == nil {
		return nil, DeniedError("no grant allows " + core.Clip(r.Method) + " of this path at " + t.Host.String())
	}
	for _, g := range covering {
		for _, v := range r.Header.Values(g.Header) {
			with, ok := replace(v, g.Placeholder, g.Secret.Reveal())
			if !ok {
				continue
			}
			if !g.Expires.IsZero() && !now.Before(g.Expires) {
				return nil, DeniedError("the grant " + g.ID + " has expired")
			}
			strip(r, covering)
			if NewPlaceholderScanner().In(with) {
				return nil, DeniedError("there is more than one placeholder in the header " + g.Header)
			}
			if bad := Find(r); bad != "" {
				return nil, DeniedError(bad)
			}
			r.Header.Set(g.Header, with)
			return g, nil
		}
	}
	if bad := Find(r); bad != "" {
		return nil, DeniedError(bad)
	}
	strip(r, covering)
	return nil, nil
}

// strip removes the headers of grants, as the guest sent them.
func strip(r *http.Request, grants []*Grant) {
	for _, g := range grants {
		r.Header.Del(g.Header)
	}
}

// replace puts a secret in the place of a placeholder in a header's value, also within Basic authentication.
func replace(value, placeholder, secret string) (string, bool) {
	if strings.Contains(value, placeholder) {
		return strings.ReplaceAll(value, placeholder, secret), true
	}
	scheme, rest, _ := strings.Cut(value, " ")
	if !strings.EqualFold(scheme, "Basic") {
		return "", false
	}
	b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(rest))
	if err != nil || !strings.Contains(string(b), placeholder) {
		return "", false
	}
	return scheme + " " + base64.StdEncoding.EncodeToString([]byte(strings.ReplaceAll(string(b), placeholder, secret))), true
}
