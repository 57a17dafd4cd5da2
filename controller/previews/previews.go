// Package previews owns previews: ports of guests that have a host name of their own, which the router
// of previews (package router) serves. It owns who may use a preview, the tokens of signed ones, and
// the previews that forks inherit. A preview is a row beside those of forwarded ports.
package previews

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// DefaultSigned is how long a signed preview lives if the request does not say.
const DefaultSigned = time.Hour

// TokenParameter is the query parameter with the token of a signed preview.
const TokenParameter = "coppice_token"

// prefix is what an id has before the part that is in host names.
const prefix = "ws_"

// Preview is a preview with the facts of its workspace that decide who may use it.
type Preview struct {
	model.Port
	Epoch int64
}

// Inherited is the preview that a fork gets.
type Inherited struct {
	ID        core.PortID
	Workspace core.WorkspaceID // the fork
	From      core.PortID
}

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects and commits when it returns nil.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps previews.
type Tx interface {
	request.Tx
	InheritTx
	Workspace(ctx context.Context, id core.WorkspaceID) (model.Workspace, error)
	InsertPort(ctx context.Context, p model.Port) (model.Port, error)
	DeletePort(ctx context.Context, workspace core.WorkspaceID, id core.PortID) error
	// Preview finds the preview of a port of a workspace that has not ended; otherwise it returns Absent.
	Preview(ctx context.Context, workspace core.WorkspaceID, guestPort int) (Preview, error)
}

// InheritTx gives forks previews.
type InheritTx interface {
	Ports(ctx context.Context, id core.WorkspaceID) ([]model.Port, error)
	// InheritPreviews gives forks their own copies of previews, as far as the quota allows.
	InheritPreviews(ctx context.Context, project core.ProjectID, list []Inherited) error
}

// Runners connects to ports of guests.
type Runners interface {
	// ConnectPort connects to a port of a guest. ctx bounds the dial only; the connection ends with the sandbox.
	ConnectPort(ctx context.Context, endpoint string, sandbox core.SandboxID, port int) (net.Conn, error)
}

// Config says what a manager works with.
type Config struct {
	// Reach returns a workspace whose guest can get requests. It resumes a suspended workspace that has auto-resume.
	Reach func(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (model.Workspace, error)
	Used  func(w model.Workspace) // records the use of a workspace
}

// Site is where previews are served.
type Site struct {
	Scheme string // http or https
	Domain string // the wildcard name
	Port   string // of URLs; empty: the scheme's own
	Secret []byte // makes tokens; the same on all controllers of a cluster
}

// Manager opens previews and judges their tokens. It is safe for concurrent use.
type Manager struct {
	cfg     Config
	store   Store
	runners Runners
	site    atomic.Pointer[Site]

	recent    recent
	lookups   singleflight.Group
	strangers *lane // of lookups for names that are not known
	guests    *lane // of lookups for other names, and of requests that were let in
}

// New makes a manager. No preview can be opened before Serve.
func New(cfg Config, store Store, runners Runners) *Manager {
	return &Manager{cfg: cfg, store: store, runners: runners, strangers: newLane(maxWaiting), guests: newLane(0)}
}

// Serve says where previews are served from now on.
func (m *Manager) Serve(s Site) { m.site.Store(&s) }

// Absent is the answer for a preview that does not exist.
func Absent() error {
	return core.Errorf(core.NotFound, core.CodePortNotFound, "there is no such preview")
}

// Want is the preview that a request asks for.
type Want struct {
	GuestPort  int
	Visibility model.Visibility
	TTL        time.Duration // 0: an hour for a signed one, and the workspace's life for others
}

// Open opens a preview. It replaces the preview of the same port, and with it the token of that. A signed one ends with the key of the request.
func (m *Manager) Open(ctx context.Context, project core.ProjectID, id core.WorkspaceID, want Want) (model.Port, error) {
	if m.site.Load() == nil {
		return model.Port{}, core.Errorf(core.Invalid, core.CodeUnsupported, "this server serves no previews; its operator turns them on with --preview-listen and --preview-domain")
	}
	if want.TTL == 0 && want.Visibility == model.VisibilitySigned {
		want.TTL = DefaultSigned
	}
	p := model.Port{ID: core.NewID[core.PortID](), ProjectID: project, WorkspaceID: id, GuestPort: want.GuestPort, Visibility: want.Visibility, KeyID: request.KeyOf(ctx).ID}
	if want.TTL > 0 {
		ends := time.Now().Add(want.TTL).UTC().Truncate(time.Second) // as it is in the token
		if key := request.KeyOf(ctx); want.Visibility == model.VisibilitySigned && !key.ExpiresAt.IsZero() && key.ExpiresAt.Before(ends) {
			ends = key.ExpiresAt.UTC().Truncate(time.Second)
		}
		p.ExpiresAt = &ends
	}
	defer m.Changed(id)
	var made model.Port
	err := m.store.InProject(ctx, project, func(tx Tx) (err error) {
		if err := request.Bind(ctx, tx, project, string(p.ID)); err != nil {
			return err
		}
		if _, err := tx.Workspace(ctx, id); err != nil {
			return err
		}
		list, err := tx.Ports(ctx, id)
		if err != nil {
			return err
		}
		for _, old := range list {
			if old.Visibility == "" || old.GuestPort != p.GuestPort {
				continue
			}
			if err := tx.DeletePort(ctx, id, old.ID); err != nil {
				return err
			}
		}
		if made, err = tx.InsertPort(ctx, p); err != nil {
			return err
		}
		return request.ClaimOf(ctx).Answer(ctx, tx, project, string(p.ID), made)
	})
	if again, ok := errors.AsType[*request.RepeatError](err); ok && again.Use.Answer != nil {
		return request.Replay[model.Port](ctx, again.Use)
	}
	return made, err
}

// URLs returns the URLs of previews by their ids. Without tokens, the URLs of signed previews have none.
func (m *Manager) URLs(ctx context.Context, project core.ProjectID, ports []model.Port, tokens bool) (map[core.PortID]string, error) {
	site := m.site.Load()
	epochs := map[core.WorkspaceID]int64{}
	out := map[core.PortID]string{}
	if site == nil {
		return out, nil
	}
	signed := func(p model.Port) bool { return tokens && p.Visibility == model.VisibilitySigned }
	if slices.ContainsFunc(ports, signed) {
		err := m.store.InProject(ctx, project, func(tx Tx) error {
			clear(epochs) // the transaction may be repeated
			for _, p := range ports {
				if _, known := epochs[p.WorkspaceID]; known || !signed(p) {
					continue
				}
				w, err := tx.Workspace(ctx, p.WorkspaceID)
				if err != nil {
					return err
				}
				epochs[p.WorkspaceID] = w.Epoch
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	for _, p := range ports {
		if p.Visibility == "" {
			continue
		}
		out[p.ID] = site.url(p)
		if signed(p) {
			out[p.ID] += "?" + TokenParameter + "=" + site.token(Preview{Port: p, Epoch: epochs[p.WorkspaceID]})
		}
	}
	return out, nil
}

// Of returns the previews of workspaces. A workspace that has ended meanwhile has none.
func (m *Manager) Of(ctx context.Context, project core.ProjectID, ids []core.WorkspaceID) (map[core.WorkspaceID][]model.Port, error) {
	out := map[core.WorkspaceID][]model.Port{}
	if m.site.Load() == nil || len(ids) == 0 {
		return out, nil
	}
	err := m.store.InProject(ctx, project, func(tx Tx) error {
		clear(out) // the transaction may be repeated
		for _, id := range ids {
			list, err := tx.Ports(ctx, id)
			if err != nil && core.CategoryOf(err) != core.NotFound {
				return err
			}
			for _, p := range list {
				if p.Visibility != "" {
					out[id] = append(out[id], p)
				}
			}
		}
		return nil
	})
	return out, err
}

func (s *Site) url(p model.Port) string {
	host := sandboxhost.Target{ID: strings.TrimPrefix(string(p.WorkspaceID), prefix), Port: p.GuestPort}.Host(s.Domain)
	if s.Port != "" {
		host = net.JoinHostPort(host, s.Port)
	}
	return s.Scheme + "://" + host + "/"
}

// Form is the form of the URLs of previews, for people.
func (s *Site) Form() string {
	host := "<port>-<id>." + s.Domain
	if s.Port != "" {
		host += ":" + s.Port
	}
	return s.Scheme + "://" + host + "/"
}

// token is the token of a signed preview. A fork has another workspace, a restore and a resume another epoch, and a preview that
// replaces it another id.
func (s *Site) token(p Preview) string {
	var ends string
	if p.ExpiresAt != nil {
		ends = strconv.FormatInt(p.ExpiresAt.Unix(), 10)
	}
	mac := hmac.New(sha256.New, s.Secret)
	for _, part := range []string{"preview", string(p.ProjectID), string(p.WorkspaceID), strconv.Itoa(p.GuestPort), strconv.FormatInt(p.Epoch, 10), string(p.ID), ends} {
		mac.Write([]byte(part))
		mac.Write([]byte{0})
	}
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// Find finds the preview of a port; otherwise it returns Absent.
func (m *Manager) Find(ctx context.Context, t sandboxhost.Target) (p Preview, err error) {
	err = m.store.InSystem(ctx, func(tx Tx) (err error) {
		p, err = tx.Preview(ctx, core.WorkspaceID(prefix+t.ID), t.Port)
		return err
	})
	return p, err
}

// Token reports whether a token is that of a signed preview, in its present epoch.
func (m *Manager) Token(p Preview, token string) bool {
	site := m.site.Load()
	return site != nil && p.Visibility == model.VisibilitySigned && hmac.Equal([]byte(site.token(p)), []byte(token))
}

// Upstream is a port of one sandbox.
type Upstream struct {
	Sandbox core.SandboxID
	Port    int

	w       model.Workspace
	runners Runners
}

// Reach returns the port of a preview in the present sandbox of its workspace. It resumes the workspace if that has auto-resume, but not for a
// token: the token of a signed preview is dead after a resume.
func (m *Manager) Reach(ctx context.Context, p Preview) (Upstream, error) {
	w, err := m.workspace(ctx, p)
	if err != nil {
		return Upstream{}, err
	}
	signed := p.Visibility == model.VisibilitySigned
	switch {
	case signed && (w.Epoch != p.Epoch || w.Reachable() != nil): // it was restored or suspended meanwhile
		return Upstream{}, Absent()
	case w.Asleep() && !signed:
		if w, err = m.cfg.Reach(ctx, p.ProjectID, p.WorkspaceID); err != nil {
			return Upstream{}, err
		}
	default:
		if err := w.Reachable(); err != nil {
			return Upstream{}, err
		}
		m.cfg.Used(w)
	}
	return Upstream{Sandbox: w.Sandbox.ID, Port: p.GuestPort, w: w, runners: m.runners}, nil
}

// workspace reads the workspace of a preview. Visitors cannot use more than a few of the database's connections for that.
func (m *Manager) workspace(ctx context.Context, p Preview) (w model.Workspace, err error) {
	if err := m.guests.enter(ctx); err != nil {
		return w, err
	}
	defer m.guests.leave()
	err = m.store.InProject(ctx, p.ProjectID, func(tx Tx) (err error) {
		w, err = tx.Workspace(ctx, p.WorkspaceID)
		return err
	})
	return w, err
}

// Epoch is the epoch of the workspace in which it has the sandbox.
func (u Upstream) Epoch() int64 { return u.w.Epoch }

// Connect connects to the port. ctx bounds the dial only.
func (u Upstream) Connect(ctx context.Context) (net.Conn, error) {
	return u.runners.ConnectPort(ctx, u.w.Sandbox.Endpoint, u.w.Sandbox.ID, u.Port)
}

// Used records that a port is still in use.
func (m *Manager) Used(u Upstream) { m.cfg.Used(u.w) }

// Inherit gives forks of a workspace its private and signed previews, in the transaction that inserts them. Public previews are not inherited:
// nobody has said that a fork may be public.
func Inherit(ctx context.Context, tx InheritTx, project core.ProjectID, from core.WorkspaceID, forks []core.WorkspaceID) error {
	if from == "" {
		return nil
	}
	ports, err := tx.Ports(ctx, from)
	if err != nil {
		return err
	}
	var list []Inherited
	for _, p := range ports {
		if p.Visibility != model.VisibilityPrivate && p.Visibility != model.VisibilitySigned {
			continue
		}
		for _, id := range forks {
			list = append(list, Inherited{ID: core.NewID[core.PortID](), Workspace: id, From: p.ID})
		}
	}
	return tx.InheritPreviews(ctx, project, list)
}
