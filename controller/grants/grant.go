package grants

import (
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Grant permits a workspace and its forks to use a secret for certain hosts (docs/adr/0038-grants-of-a-tree.md).
type Grant struct {
	ID        core.GrantID
	ProjectID core.ProjectID
	Owner     core.WorkspaceID // the workspace that it was given to
	Name      string           // the name that its user chose
	Provider  string
	Mode      grant.Mode
	VaultRef  string   // where the secret is; empty: in secrets
	SecretID  string   // likewise
	Hosts     []string // host:port; the base URL stands for the first one
	Header    string   // in its canonical form
	Methods   []string // empty: any
	Paths     []string // prefixes; empty: any
	Env       string   // the variable that has the placeholder
	BaseEnv   string   // in the mode of base URLs, the variable that has the base URL
	BasePath  string   // the path of the base URL
	MaxBytes  int64    // of bodies, for each sandbox; 0: no bound
	PerMinute int      // requests, likewise
	Reserved  int      // bytes of its secret at its admission, as grant.Secret.Size counts them
	Size      int      // bytes of all of it, as grant.Size counts them
	Version   int64    // one more with each change
	ExpiresAt time.Time
	CreatedAt time.Time
	UpdatedAt time.Time
}

// Expired reports whether a grant's time is over.
func (g Grant) Expired(now time.Time) bool { return !g.ExpiresAt.IsZero() && !now.Before(g.ExpiresAt) }

// Held is a grant that a workspace has, with its placeholder there. The placeholder is worthless elsewhere.
type Held struct {
	Grant
	Workspace   core.WorkspaceID
	Placeholder string
}

// Holder is a workspace that will get a grant.
type Holder struct {
	Workspace   core.WorkspaceID
	Grant       core.GrantID
	Placeholder string
}

// Request gives a workspace a grant. The provider has defaults for the fields that are not set.
type Request struct {
	Provider  string // empty: the provider with the name of the grant, else ProviderCustom
	Mode      grant.Mode
	VaultRef  string       // where the secret is, or
	Secret    grant.Secret // the secret; if neither is set, the grant keeps its secret
	Hosts     []string     // host or host:port
	Header    string
	Methods   []string
	Paths     []string
	Env       string
	BaseEnv   string
	BasePath  string
	TTL       time.Duration // 0: none
	MaxBytes  int64
	PerMinute int
}

// Choice says which grants of the parent workspace its forks get.
type Choice struct {
	None  bool
	Names []string // nil: all
}

// The bounds of grants.
const (
	MaxGrants     = 32 // of a workspace
	maxGrantHosts = 16
	maxGrantPaths = 32

	// MaxProjectGrants bounds the grants that living workspaces of a project have. An inherited grant counts once.
	MaxProjectGrants = 4096
)

var (
	grantName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
	envName   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
	method    = regexp.MustCompile(`^[A-Z]{1,20}$`)
)

func badGrant(field, format string, a ...any) error {
	return core.Errorf(core.Invalid, core.CodeInvalidField, field+": "+format, a...)
}

// CheckName refuses a text that cannot be the name of a grant.
func CheckName(name string) error {
	if !grantName.MatchString(name) {
		return badGrant("grant_id", "%q must be 1 to 63 of a-z, 0-9, '.', '_' and '-', and begin with a letter or digit", core.Clip(name))
	}
	return nil
}

// check checks a request and makes a grant from it.
func (m *Manager) check(project core.ProjectID, owner core.WorkspaceID, name string, r Request) (Grant, error) {
	if err := CheckName(name); err != nil {
		return Grant{}, err
	}
	if err := r.fill(name); err != nil {
		return Grant{}, err
	}
	g := Grant{
		ID: core.NewID[core.GrantID](), ProjectID: project, Owner: owner, Name: name, Provider: r.Provider, Mode: r.Mode, VaultRef: r.VaultRef,
		Header: http.CanonicalHeaderKey(r.Header), Env: r.Env, MaxBytes: r.MaxBytes, PerMinute: r.PerMinute, Methods: []string{}, Paths: []string{},
	}
	if r.Mode == grant.ModeBaseURL {
		g.BaseEnv, g.BasePath = r.BaseEnv, r.BasePath
	}
	if err := r.checkFields(g); err != nil {
		return g, err
	}
	for _, m := range r.Methods {
		if !method.MatchString(m) || m == http.MethodConnect {
			return g, badGrant("methods", "%q is not a method such as GET", core.Clip(m))
		}
		g.Methods = append(g.Methods, m)
	}
	for _, p := range r.Paths {
		if err := checkPath("paths", p); err != nil {
			return g, err
		}
		g.Paths = append(g.Paths, p)
	}
	for _, h := range r.Hosts {
		t, err := grantHost(h)
		if err != nil {
			return g, err
		}
		if !slices.Contains(g.Hosts, t) {
			g.Hosts = append(g.Hosts, t)
		}
	}
	switch {
	case r.VaultRef != "" && r.Secret.Reveal() != "":
		return g, badGrant("secret", "a grant has its secret from vault_ref or from secret, not from both")
	case r.VaultRef != "":
		source, err := m.secretSource()
		if err != nil {
			return g, err
		}
		return g, source.Check(project, r.VaultRef)
	case r.Secret.Reveal() != "":
		return g, grant.CheckSecret(r.Secret.Reveal())
	}
	return g, nil
}

// checkFields checks the fields that need no list.
func (r Request) checkFields(g Grant) error {
	const most = 10 * 365 * 24 * time.Hour
	switch {
	case r.Mode != grant.ModeHeader && r.Mode != grant.ModeBaseURL:
		return badGrant("mode", "it must be %s or %s", grant.ModeHeader, grant.ModeBaseURL)
	case len(r.Hosts) == 0:
		return badGrant("allowed_hosts", "the provider %s has no hosts of its own: name the hosts that the secret is for", g.Provider)
	case len(r.Hosts) > maxGrantHosts || len(r.Methods) > maxGrantHosts || len(r.Paths) > maxGrantPaths:
		return badGrant("allowed_hosts", "a grant is for at most %d hosts and methods, and %d paths", maxGrantHosts, maxGrantPaths)
	case !httpguts.ValidHeaderFieldName(r.Header) || len(r.Header) > 64 || forbiddenHeader(g.Header):
		return badGrant("header", "%q cannot have a secret; give one such as Authorization or X-Api-Key", core.Clip(r.Header))
	case !envName.MatchString(r.Env):
		return badGrant("env", "%q cannot be the name of an environment variable", core.Clip(r.Env))
	case g.Mode == grant.ModeBaseURL && (!envName.MatchString(r.BaseEnv) || r.BaseEnv == r.Env):
		return badGrant("base_url_env", "%q cannot be the name of the environment variable of a base URL", core.Clip(r.BaseEnv))
	case r.TTL < 0 || r.TTL > most:
		return badGrant("ttl_seconds", "it must be between 1 and %d", int64(most.Seconds()))
	case r.MaxBytes < 0:
		return badGrant("max_bytes", "it must not be negative")
	case r.PerMinute < 0 || r.PerMinute > 1_000_000:
		return badGrant("requests_per_minute", "it must be between 0, for no bound, and 1000000")
	}
	if r.BasePath == "" || g.Mode != grant.ModeBaseURL {
		return nil
	}
	return checkPath("base_url_path", r.BasePath)
}

// forbiddenHeader reports whether a header says how a request is sent, and not who sends it.
func forbiddenHeader(name string) bool {
	switch name {
	case "Host", "Connection", "Content-Length", "Content-Type", "Content-Encoding", "Transfer-Encoding", "Te", "Trailer", "Upgrade", "Expect", "Accept-Encoding", "Keep-Alive", "Via", "Forwarded":
		return true
	}
	return strings.HasPrefix(name, "Proxy-") || strings.HasPrefix(name, "Sec-") || strings.HasPrefix(name, "X-Forwarded-")
}

// checkPath refuses a path that is not plain: the proxy compares prefixes, so a path must have one meaning only.
func checkPath(field, p string) error {
	plain := strings.HasPrefix(p, "/") && len(p) <= 512 && !strings.Contains(p, "//") && !strings.ContainsAny(p, "?#%\\;*")
	for _, c := range p {
		plain = plain && c > ' ' && c < 0x7f
	}
	for s := range strings.SplitSeq(p, "/") {
		plain = plain && s != "." && s != ".."
	}
	if !plain {
		return badGrant(field, "%q is not a plain path such as /v1/chat: it begins with a slash, and has no '..', '%%', '?', '#' or ';'", core.Clip(p))
	}
	return nil
}

// grantHost reads a host that a secret is for, and returns it with its port.
func grantHost(s string) (string, error) {
	text := s
	if h, err := policy.ParseHost(s); err == nil {
		text = policy.JoinHostPort(h, 443)
	}
	h, port, err := policy.ParseHostPort(text)
	if err != nil {
		return "", badGrant("allowed_hosts", "%q is not a host such as api.example.com, or one with a port", core.Clip(s))
	}
	if h.Name() == "" {
		return "", badGrant("allowed_hosts", "%q is an address; give a name, because a secret is only for hosts that can have a certificate for their name", core.Clip(s))
	}
	return policy.JoinHostPort(h, port), nil
}

// allowedHosts refuses a grant for hosts that a workspace may not reach.
func allowedHosts(w Workspace, g Grant) error {
	if w.Egress == core.EgressAllowAll {
		return core.Errorf(core.FailedPrecondition, core.CodeInvalidField,
			"workspace %s has egress policy allow-all, so its traffic does not go through the proxy, which inserts the secrets; fork it with deny-all", w.ID)
	}
	p, err := policy.Parse("network.allow", w.Rules.Allow)
	if err != nil {
		return err
	}
	for _, t := range g.Hosts {
		h, port, err := policy.ParseHostPort(t)
		if err != nil {
			return err
		}
		if _, ok := p.Allows(h, port, core.SpokenTLS); !ok {
			return core.Errorf(core.FailedPrecondition, core.CodeGrantHostDenied,
				"workspace %s may not reach %s, so it could not use a secret there; allow the host first: coppice ws network %s --allow %s …", w.ID, t, w.ID, h)
		}
	}
	return nil
}
