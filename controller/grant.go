package controller

import (
	"context"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Grant is permission for a workspace, and for what is forked from it, to use a secret towards hosts (docs/adr/0038-grants-of-a-tree.md).
type Grant struct {
	ID        core.GrantID
	ProjectID core.ProjectID
	Owner     core.WorkspaceID // that it was given to
	Name      string           // what its user calls it
	Provider  string
	Mode      grant.Mode
	VaultRef  string   // where the secret is; empty: in secrets
	SecretID  string   // likewise
	Hosts     []string // host:port, the first is what the base URL stands for
	Header    string   // in its canonical form
	Methods   []string // empty: any
	Paths     []string // prefixes; empty: any
	Env       string   // the variable that has the placeholder
	BaseEnv   string   // the variable that has the base URL, in that mode
	BasePath  string   // what the base URL has after its host
	MaxBytes  int64    // of bodies, for each sandbox; 0: no bound
	PerMinute int      // requests, likewise
	Reserved  int      // bytes of its secret, as grant.Secret.Size counts them, that it was admitted with
	Size      int      // bytes of all of it, as grant.Size counts them
	Version   int64    // one more with each change
	ExpiresAt time.Time
	CreatedAt time.Time
	UpdatedAt time.Time
}

// Expired reports whether a grant's time is over.
func (g Grant) Expired(now time.Time) bool { return !g.ExpiresAt.IsZero() && !now.Before(g.ExpiresAt) }

// HeldGrant is a grant that a workspace has, by a placeholder that is worth nothing elsewhere.
type HeldGrant struct {
	Grant
	Workspace   core.WorkspaceID
	Placeholder string
}

// GrantHolder is a workspace that is to have a grant.
type GrantHolder struct {
	Workspace   core.WorkspaceID
	Grant       core.GrantID
	Placeholder string
}

// GrantRequest gives a workspace a grant. What is left out is what is usual for the provider.
type GrantRequest struct {
	Provider  string // empty: the one that the grant is called by, else ProviderCustom
	Mode      grant.Mode
	VaultRef  string       // where the secret is, or
	Secret    grant.Secret // the secret; neither: as the grant has it already
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

// GrantChoice says which grants forks have of those of the workspace that they come from.
type GrantChoice struct {
	None  bool
	Names []string // nil: all
}

// The bounds of grants.
const (
	MaxGrants     = 32 // of a workspace
	maxGrantHosts = 16
	maxGrantPaths = 32

	// MaxProjectGrants bounds the grants that living workspaces of a project have. One that forks have from their parent counts once.
	MaxProjectGrants = 4096
)

// GrantTx keeps grants. Who changes any has locked the project's rules, see RulesTx.
type GrantTx interface {
	// HeldGrants returns the grants of workspaces, by their names.
	HeldGrants(ctx context.Context, of []core.WorkspaceID) ([]HeldGrant, error)
	// PutGrant gives its owner a grant, in the place of one of that name, and returns it. One that is the owner's own keeps its placeholder.
	PutGrant(ctx context.Context, g Grant, ttl time.Duration, placeholder string) (HeldGrant, error)
	// DropGrant takes a grant from everybody.
	DropGrant(ctx context.Context, id core.GrantID) error
	// DropHolders takes a grant from workspaces.
	DropHolders(ctx context.Context, id core.GrantID, from []core.WorkspaceID) error
	// CountGrants counts those that living workspaces of a project have.
	CountGrants(ctx context.Context, project core.ProjectID) (int, error)
	// LargestHolder returns the workspace, of those that have a grant, whose grants are the largest, with their size in bytes.
	LargestHolder(ctx context.Context, id core.GrantID) (core.WorkspaceID, int, error)
	// GrantHolders returns who has a grant.
	GrantHolders(ctx context.Context, id core.GrantID) ([]core.WorkspaceID, error)
	// InsertHolders gives grants to workspaces that were just inserted.
	InsertHolders(ctx context.Context, list []GrantHolder) error
	// ChangedGrants makes the rules of workspaces newer, which has their runners get them.
	ChangedGrants(ctx context.Context, ids []core.WorkspaceID) error
}

var (
	grantName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
	envName   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
	method    = regexp.MustCompile(`^[A-Z]{1,20}$`)
)

func badGrant(field, format string, a ...any) error {
	return core.Errorf(core.Invalid, core.CodeInvalidField, field+": "+format, a...)
}

// CheckGrantName refuses what cannot name a grant.
func CheckGrantName(name string) error {
	if !grantName.MatchString(name) {
		return badGrant("grant_id", "%q must be 1 to 63 of a-z, 0-9, '.', '_' and '-', and begin with a letter or digit", core.Clip(name))
	}
	return nil
}

// grant checks a request and makes the grant of it.
func (c *Controller) grant(project core.ProjectID, owner core.WorkspaceID, name string, r GrantRequest) (Grant, error) {
	if err := CheckGrantName(name); err != nil {
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
	if err := r.check(g); err != nil {
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
		source, err := c.secretSource()
		if err != nil {
			return g, err
		}
		return g, source.Check(project, r.VaultRef)
	case r.Secret.Reveal() != "":
		return g, grant.CheckSecret(r.Secret.Reveal())
	}
	return g, nil
}

// check looks at what needs no list.
func (r GrantRequest) check(g Grant) error {
	const most = 10 * 365 * 24 * time.Hour
	switch {
	case r.Mode != grant.ModeHeader && r.Mode != grant.ModeBaseURL:
		return badGrant("mode", "it must be %s or %s", grant.ModeHeader, grant.ModeBaseURL)
	case len(r.Hosts) == 0:
		return badGrant("allowed_hosts", "the provider %s is not known by hosts of its own: name those that the secret is for", g.Provider)
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

// forbiddenHeader reports whether a header says how a request is sent, and not by whom.
func forbiddenHeader(name string) bool {
	switch name {
	case "Host", "Connection", "Content-Length", "Content-Type", "Content-Encoding", "Transfer-Encoding", "Te", "Trailer", "Upgrade", "Expect", "Accept-Encoding", "Keep-Alive", "Via", "Forwarded":
		return true
	}
	return strings.HasPrefix(name, "Proxy-") || strings.HasPrefix(name, "Sec-") || strings.HasPrefix(name, "X-Forwarded-")
}

// checkPath refuses a path that is not plain: what is compared by prefix must mean one thing only.
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
		return "", badGrant("allowed_hosts", "%q is an address; a secret is for a name, which a certificate can be for", core.Clip(s))
	}
	return policy.JoinHostPort(h, port), nil
}

// allowedHosts refuses a grant for hosts that a workspace may not reach.
func allowedHosts(w Workspace, g Grant) error {
	if w.Egress == core.EgressAllowAll {
		return core.Errorf(core.FailedPrecondition, core.CodeInvalidField, "workspace %s has egress policy allow-all, under which nothing of its goes through the proxy that puts secrets in; fork it with deny-all", w.ID)
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
			return core.Errorf(core.FailedPrecondition, core.CodeGrantHostDenied, "workspace %s may not reach %s, so a secret for it would be of no use; allow it first: coppice ws network %s --allow %s …", w.ID, t, w.ID, h)
		}
	}
	return nil
}

func noGrant(id core.WorkspaceID, name string) error {
	return core.Errorf(core.NotFound, core.CodeGrantNotFound, "workspace %s has no grant %s", id, core.Clip(name))
}

func heldGrant(ctx context.Context, tx Tx, id core.WorkspaceID, name string) (HeldGrant, []HeldGrant, error) {
	list, err := tx.HeldGrants(ctx, []core.WorkspaceID{id})
	if err != nil {
		return HeldGrant{}, nil, err
	}
	for _, g := range list {
		if g.Name == name {
			return g, list, nil
		}
	}
	return HeldGrant{}, list, noGrant(id, name)
}

// PutGrant gives a workspace a grant, or changes one: for those that have it by a fork, too. A fork that is given one by a name that it has
// from above has its own from then on.
func (c *Controller) PutGrant(ctx context.Context, project core.ProjectID, id core.WorkspaceID, name string, r GrantRequest) (HeldGrant, Workspace, error) {
	g, err := c.grant(project, id, name, r)
	if err != nil {
		return HeldGrant{}, Workspace{}, err
	}
	if _, err := c.secrets.Authority(ctx, project); err != nil {
		return HeldGrant{}, Workspace{}, err
	}
	var sealed *secretstore.Secret
	if r.Secret.Reveal() != "" {
		if sealed, err = c.secrets.Encrypt(ctx, project, []byte(r.Secret.Reveal())); err != nil {
			return HeldGrant{}, Workspace{}, err
		}
	}
	value := r.Secret
	if g.VaultRef != "" { // outside of transactions: one that cannot be had is not granted
		if value, err = c.readSource(ctx, project, g.VaultRef); err != nil {
			return HeldGrant{}, Workspace{}, err
		}
	}
	g.reserve(value)
	var held HeldGrant
	w, err := read(ctx, c, InProject(project), func(tx Tx) (Workspace, error) {
		if err := tx.LockRules(ctx, project); err != nil {
			return Workspace{}, err
		}
		w, err := tx.Workspace(ctx, id)
		if err == nil && w.State.Final() {
			err = notReady(w)
		}
		if err == nil {
			err = allowedHosts(w, g)
		}
		if err != nil {
			return w, err
		}
		held, err = putGrant(ctx, tx, g, r.TTL, sealed)
		if err != nil {
			return w, err
		}
		return tx.Workspace(ctx, id)
	})
	if err != nil {
		return held, w, err
	}
	c.log.InfoContext(ctx, "grant given", "workspace_id", id, "grant_id", name, "provider", held.Provider, "mode", held.Mode, "hosts", held.Hosts)
	return held, c.applyRules(ctx, w), nil
}

// Grants lists those of a workspace.
func (c *Controller) Grants(ctx context.Context, project core.ProjectID, id core.WorkspaceID) ([]HeldGrant, Workspace, error) {
	var w Workspace
	list, err := read(ctx, c, InProject(project), func(tx Tx) (list []HeldGrant, err error) {
		if w, err = tx.Workspace(ctx, id); err != nil {
			return nil, err
		}
		return tx.HeldGrants(ctx, []core.WorkspaceID{id})
	})
	return list, w, err
}

// Grant returns one of a workspace.
func (c *Controller) Grant(ctx context.Context, project core.ProjectID, id core.WorkspaceID, name string) (HeldGrant, Workspace, error) {
	list, w, err := c.Grants(ctx, project, id)
	if err != nil {
		return HeldGrant{}, w, err
	}
	for _, g := range list {
		if g.Name == name {
			return g, w, nil
		}
	}
	return HeldGrant{}, w, noGrant(id, name)
}

// RevokeGrant takes a grant from a workspace and from everything that has it by a fork of that, and what was begun with it ends.
func (c *Controller) RevokeGrant(ctx context.Context, project core.ProjectID, id core.WorkspaceID, name string) error {
	w, err := read(ctx, c, InProject(project), func(tx Tx) (Workspace, error) {
		if err := tx.LockRules(ctx, project); err != nil {
			return Workspace{}, err
		}
		if _, err := tx.Workspace(ctx, id); err != nil {
			return Workspace{}, err
		}
		g, _, err := heldGrant(ctx, tx, id, name)
		if err != nil {
			return Workspace{}, err
		}
		if err := revoke(ctx, tx, g); err != nil {
			return Workspace{}, err
		}
		return tx.Workspace(ctx, id)
	})
	if err != nil {
		return err
	}
	c.log.InfoContext(ctx, "grant revoked", "workspace_id", id, "grant_id", name)
	c.applyRules(ctx, w)
	return nil
}

// revoke takes a grant from its holder and from those below. Who has it there is looked for in the whole tree of workspaces, and by what it is
// called: who is in between may have another by that name since, which ends nothing for what was forked before. What those below were given
// themselves stays.
func revoke(ctx context.Context, tx Tx, g HeldGrant) error {
	below, err := forksBelow(ctx, tx, g.Workspace)
	if err != nil {
		return err
	}
	held, err := tx.HeldGrants(ctx, slices.Collect(maps.Keys(below)))
	if err != nil {
		return err
	}
	lost := map[core.GrantID][]core.WorkspaceID{g.ID: {g.Workspace}}
	for _, h := range held {
		if h.Name == g.Name && !below[h.Owner] {
			lost[h.ID] = append(lost[h.ID], h.Workspace)
		}
	}
	if g.Owner == g.Workspace {
		if lost[g.ID], err = tx.GrantHolders(ctx, g.ID); err != nil {
			return err
		}
		if err := tx.DropGrant(ctx, g.ID); err != nil {
			return err
		}
		if g.SecretID != "" {
			if err := tx.DeleteSecret(ctx, g.SecretID); err != nil {
				return err
			}
		}
	}
	var changed []core.WorkspaceID // none twice: a workspace has one by a name
	for id, from := range lost {
		if err := tx.DropHolders(ctx, id, from); err != nil {
			return err
		}
		changed = append(changed, from...)
	}
	return tx.ChangedGrants(ctx, changed)
}

// forksBelow is what was forked from a workspace, and from that, without the workspace itself.
func forksBelow(ctx context.Context, tx Tx, id core.WorkspaceID) (map[core.WorkspaceID]bool, error) {
	below := map[core.WorkspaceID]bool{}
	for level := []core.WorkspaceID{id}; len(level) > 0; {
		forks, err := tx.Forks(ctx, level)
		if err != nil {
			return nil, err
		}
		level = nil
		for _, f := range forks {
			if f.ID != id && !below[f.ID] {
				below[f.ID] = true
				level = append(level, f.ID)
			}
		}
	}
	return below, nil
}

// inherit gives children the grants of the workspace that they come from, as it has them now, by placeholders of their own.
func inherit(ctx context.Context, tx Tx, source Checkpoint, choice GrantChoice, children []Workspace) error {
	if choice.None || source.WorkspaceID == "" || !source.Granted && len(choice.Names) == 0 {
		return nil
	}
	list, err := tx.HeldGrants(ctx, []core.WorkspaceID{source.WorkspaceID})
	if err != nil {
		return err
	}
	if choice.Names != nil {
		for _, name := range choice.Names {
			if !slices.ContainsFunc(list, func(g HeldGrant) bool { return g.Name == name }) {
				return noGrant(source.WorkspaceID, name)
			}
		}
		list = slices.DeleteFunc(list, func(g HeldGrant) bool { return !slices.Contains(choice.Names, g.Name) })
	}
	if len(list) == 0 {
		return nil
	}
	var holders []GrantHolder
	for i := range children {
		if children[i].Egress != core.EgressDenyAll {
			continue
		}
		children[i].Rules.Granted = true
		for _, g := range list {
			holders = append(holders, GrantHolder{children[i].ID, g.ID, grant.NewPlaceholder()})
		}
	}
	return tx.InsertHolders(ctx, holders)
}

// GrantEnv is what programs find of the grants of a workspace: placeholders, and where base URLs lead.
func GrantEnv(list []HeldGrant, egressURL string, now time.Time) map[string]string {
	env := map[string]string{}
	for _, g := range list {
		if g.Expired(now) {
			continue
		}
		if g.Env != "" {
			env[g.Env] = g.Placeholder
		}
		if g.BaseEnv != "" && egressURL != "" {
			env[g.BaseEnv] = BaseURL(g, egressURL)
		}
	}
	return env
}

// BaseURL is what a program asks instead of a grant's host; egressURL is that of the host's proxy.
func BaseURL(g HeldGrant, egressURL string) string {
	return egressURL + grant.BasePath + g.Name + g.BasePath
}
