// Package heartbeat registers a runner with its controller and regularly reports what runs.
package heartbeat

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/pass"
	"github.com/coppice-dev/coppice/runner"
)

// Peers learns which runners were removed, as runner/httpapi.Peers does.
type Peers interface {
	Learn(removed []core.RunnerID, at time.Time, good time.Duration)
}

// Config says which controllers the link calls. Either Member is set, and every controller is https://host:port, or Secret is.
type Config struct {
	Controllers []string       // the listeners for runners: https://host:port, or http://host:port or unix:/path; the next is tried when one is unreachable
	Secret      string         // shared with the controller
	Member      *Member        // who this runner is
	Endpoint    string         // where controllers reach this runner, in the same forms
	DataURL     string         // https://host:port of the data plane; empty: it has none
	OwnDataCert bool           // the data plane shows this runner's own certificate, which users' systems do not know
	Plane       Plane          // the data plane; nil where there is none
	Passes      *pass.Verifier // learns the keys at registration; may be nil
	Peers       Peers          // of a runner that gives objects to others; may be nil
	Log         *slog.Logger
}

// Plane is the data plane. It must end the streams of API keys that are no longer valid.
type Plane interface {
	Keys() []core.KeyID       // whose passes were used lately
	Used() []core.WorkspaceID // that were reached since the last call, or are
	End(keys []core.KeyID)
	// Writes are those that have not been recorded, and the log that they are numbered in. Recorded forgets them up to a number.
	Writes() (log string, list []runnerapi.DataWrite)
	Recorded(number int64) error
}

// Link is a runner's connection to its controllers.
type Link struct {
	cfg    Config
	runner *runner.Runner
	client *http.Client
	bases  []string
	at     atomic.Int64 // of the one in bases that answered last
	epoch  atomic.Int64 // of the lease; 0: there is none

	// What follows is for Run alone.
	lease  *runnerapi.Registered // nil: there is none
	sender beats.Sender
	used   map[core.WorkspaceID]bool // workspaces that the data plane has served since the last answered heartbeat

	renewTried time.Time
	keepTried  time.Time     // the attestation certificate
	registered chan struct{} // closed after the first registration
	once       sync.Once
}

// Registered is closed when the runner has registered for the first time.
func (l *Link) Registered() <-chan struct{} { return l.registered }

// requestTime bounds a register or heartbeat.
const requestTime = 10 * time.Second

// New makes a link. Nothing is sent before Run. Without a certificate or a secret, New fails.
func New(r *runner.Runner, cfg Config) (*Link, error) {
	if len(cfg.Controllers) == 0 || (cfg.Member == nil) == (cfg.Secret == "") {
		return nil, errors.New("the way to the controllers needs their addresses and either a certificate or a secret")
	}
	l := &Link{cfg: cfg, runner: r, client: &http.Client{Timeout: requestTime}, registered: make(chan struct{}), used: make(map[core.WorkspaceID]bool)}
	if cfg.Member != nil {
		l.client = newClient(cfg.Member.Identity.Client(mtls.ControllerName))
	}
	for _, base := range cfg.Controllers {
		path, unix := strings.CutPrefix(base, "unix:")
		switch {
		case cfg.Member != nil && !strings.HasPrefix(base, "https://"):
			return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "the controller %q must be https://host:port", core.Clip(base))
		case unix:
			base = "http://controller"
			l.client.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, "unix", strings.TrimPrefix(path, "//"))
			}}
		}
		l.bases = append(l.bases, strings.TrimSuffix(base, "/"))
	}
	return l, nil
}

// Run registers, then sends heartbeats until ctx ends: at least three times per lease, and whenever something happened. It retries a
// controller that is unreachable, and registers again with one that no longer knows the lease.
func (l *Link) Run(ctx context.Context) error {
	const retry = time.Second
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-l.runner.Wake():
		}
		if err := l.renew(ctx); err != nil && ctx.Err() == nil {
			l.cfg.Log.WarnContext(ctx, "certificate was not renewed", "err", err)
		}
		next, err := l.beat(ctx)
		if core.CodeOf(err) == core.CodeRunnerRevoked {
			// The cluster has given this runner up, and has told its users so: nothing goes on here, and nothing new begins while the
			// process ends.
			return errors.Join(err, l.runner.Fence(ctx, core.MessageOf(err)))
		}
		if err != nil && ctx.Err() == nil {
			l.cfg.Log.WarnContext(ctx, "controller was not reached", "err", err)
			next = retry
		}
		timer.Reset(pace.Spread(next))
	}
}

// keepPause is how long a certificate that could not be kept is not tried again.
const keepPause = 10 * time.Second

// certify has the runner sign with a certificate from now on. A controller without an authority sends none. What is wrong with it, or with the disk
// that is to keep it, is tried again later and has nothing to do with the lease.
func (l *Link) certify(ctx context.Context, cluster string, der []byte) {
	var err error
	switch {
	case len(der) > 0:
		l.keepTried = time.Now()
		err = l.runner.Attestor().Certify(cluster, der)
	case time.Since(l.keepTried) >= keepPause:
		l.keepTried = time.Now()
		err = l.runner.Attestor().Keep()
	}
	if err != nil {
		l.cfg.Log.ErrorContext(ctx, "the attestation certificate is not in use, or not kept", "err", err)
	}
}

// post asks the controller that answered last, and the others when that one is unreachable.
func (l *Link) post(ctx context.Context, path string, in, out any) error {
	return l.postBy(ctx, l.client, path, in, out)
}

func (l *Link) postBy(ctx context.Context, client *http.Client, path string, in, out any) error {
	return l.attempt(ctx, func(base string) error { return post(ctx, client, base+path, l.cfg.Secret, in, out) })
}

// attempt calls send with the address of the controller that answered last, then with the others, until one has answered.
func (l *Link) attempt(ctx context.Context, send func(base string) error) error {
	var errs []error
	for range l.bases {
		at := l.at.Load()
		err := send(l.bases[at])
		code := core.CodeOf(err)
		if core.CategoryOf(err) != core.Unavailable && code != core.CodeCertificateRefused || code == core.CodeRunnerLost {
			return err
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
		l.at.CompareAndSwap(at, (at+1)%int64(len(l.bases)))
	}
	return errors.Join(errs...)
}

// post sends one message. A controller that is not reached is Unavailable.
func post(ctx context.Context, client *http.Client, url, secret string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if secret != "" {
		req.Header.Set("Authorization", "Bearer "+secret)
	}
	res, err := client.Do(req)
	if err != nil {
		if refused := mtls.Refused(err); core.CodeOf(refused) == core.CodeCertificateRefused {
			return refused
		}
		return core.Wrapf(err, core.Unavailable, core.CodeControllerUnreachable, "the controller at %s cannot be reached", req.URL.Host)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 16<<20))
	if err != nil {
		return core.Wrapf(err, core.Unavailable, core.CodeControllerUnreachable, "the controller at %s broke off", req.URL.Host)
	}
	if res.StatusCode >= http.StatusBadRequest {
		var p runnerapi.Problem
		if json.Unmarshal(b, &p) == nil && p.Code != "" {
			return p.Err()
		}
		return core.Errorf(core.Unavailable, core.CodeControllerUnreachable, "the controller at %s answered %s to %s", req.URL.Host, res.Status, req.URL.Path)
	}
	if res.StatusCode == http.StatusNoContent {
		return nil
	}
	return json.Unmarshal(b, out)
}
