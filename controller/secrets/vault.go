package secrets

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/vault/api"
	"golang.org/x/sync/singleflight"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

const (
	askTime   = 5 * time.Second  // for all that one read asks of Vault
	freshTime = time.Minute      // a secret that was read is believed
	staleTime = 15 * time.Minute // it is used while Vault cannot be asked; a denial of Vault ends that at once
	mountTime = 10 * time.Minute // what is mounted is believed
	pauseTime = 2 * time.Second  // Vault is not asked again after it was unreachable
	loginTime = 10 * time.Second // a token that is younger is not replaced when Vault refuses something
	maxAnswer = 1 << 20
	maxKept   = 4096 // secrets of all projects, of at most 16 KiB each
	maxKeptOf = 512  // secrets of one project
	maxMounts = 1024
)

// VaultConfig says where Vault is and who the controller is there: exactly one of TokenFile, RoleIDFile and KubernetesRole is given.
type VaultConfig struct {
	Address   string // https://host:port, or http:// on loopback, where an agent is
	CAFile    string // PEM; empty: the system's authorities
	Namespace string // empty: none
	Prefix    string // of what a project may read; it has {project} where the project's id stands

	TokenFile           string // read whenever Vault is asked
	RoleIDFile          string // AppRole, with
	SecretIDFile        string // read at each login
	KubernetesRole      string // Kubernetes, with
	KubernetesTokenFile string // the service account's token; empty: where Kubernetes puts it
	AuthMount           string // of AppRole or Kubernetes; empty: as they are called

	Log *slog.Logger
}

// Vault reads from the key-value engines, both versions, of a HashiCorp Vault or of a compatible server.
type Vault struct {
	cfg    VaultConfig
	prefix prefix
	http   *http.Client
	base   *api.Client // without a token
	log    *slog.Logger
	now    func() time.Time // time.Now but in tests
	asks   singleflight.Group
	logins singleflight.Group

	// mu guards the fields below.
	mu          sync.Mutex
	kept        map[string]keptSecret // by the reference, which begins with the project's prefix
	mounts      map[string]mount      // by path, with a slash at its end
	me          *session              // who the controller is, after a login
	pausedUntil time.Time             // until then Vault is not asked, because of the error below
	unreachable error
}

var _ Source = (*Vault)(nil)

type keptSecret struct {
	value   grant.Secret
	at      time.Time
	project core.ProjectID
}

// OpenVault makes a source. It sends no request yet.
func OpenVault(cfg VaultConfig) (*Vault, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	p, err := parsePrefix(cfg.Prefix)
	if err != nil {
		return nil, err
	}
	trust := &tls.Config{MinVersion: tls.VersionTLS12}
	if cfg.CAFile != "" {
		pem, err := os.ReadFile(cfg.CAFile)
		if err != nil {
			return nil, core.Wrapf(err, core.Invalid, core.CodeInvalidField, "--vault-ca-file: %s cannot be read", cfg.CAFile)
		}
		trust.RootCAs = x509.NewCertPool()
		if !trust.RootCAs.AppendCertsFromPEM(pem) {
			return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "--vault-ca-file: %s has no certificate in PEM", cfg.CAFile)
		}
	}
	v := &Vault{
		cfg: cfg, prefix: p, log: cfg.Log, now: time.Now, kept: map[string]keptSecret{}, mounts: map[string]mount{},
		http: &http.Client{
			Transport:     bounded{&http.Transport{TLSClientConfig: trust, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Minute, MaxResponseHeaderBytes: 64 << 10}},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
	if v.base, err = v.client(""); err != nil {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "--vault-addr: %s cannot be used", core.Clip(cfg.Address))
	}
	return v, nil
}

// client makes one with a token and nothing else of what the library takes from the environment. The token must not follow a redirect.
func (v *Vault) client(token string) (*api.Client, error) {
	client, err := api.NewClient(&api.Config{
		Address: v.cfg.Address, HttpClient: v.http, DisableRedirects: true, MaxRetries: 1, MinRetryWait: 100 * time.Millisecond, MaxRetryWait: 500 * time.Millisecond,
	})
	if err != nil {
		return nil, faultError("the library of Vault's client does not start")
	}
	client.SetHeaders(http.Header{api.RequestHeaderName: {"true"}})
	client.SetToken(token)
	if v.cfg.Namespace != "" {
		client.SetNamespace(v.cfg.Namespace)
	}
	return client, nil
}

// Validate says all that is wrong with a configuration, without a look at its files.
func (c VaultConfig) Validate() error {
	_, err := parsePrefix(c.Prefix)
	errs := []error{err}
	bad := func(format string, a ...any) {
		errs = append(errs, core.Errorf(core.Invalid, core.CodeInvalidField, format, a...))
	}
	u, err := url.Parse(c.Address)
	if err != nil || u.Host == "" || u.User != nil || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" || u.Scheme != "https" && (u.Scheme != "http" || !loopback(u.Hostname())) {
		bad("--vault-addr: it is not https://host:port; http:// is for loopback only, since tokens and secrets go there")
	}
	ways := 0
	for _, way := range []string{c.TokenFile, c.RoleIDFile, c.KubernetesRole} {
		if way != "" {
			ways++
		}
	}
	if ways != 1 {
		bad("--vault-addr: give one of --vault-token-file, --vault-role-id-file and --vault-kubernetes-role: the controller must be somebody there")
	}
	if (c.RoleIDFile == "") != (c.SecretIDFile == "") {
		bad("--vault-role-id-file and --vault-secret-id-file go together")
	}
	if c.KubernetesTokenFile != "" && c.KubernetesRole == "" {
		bad("--vault-kubernetes-token-file goes with --vault-kubernetes-role")
	}
	for s := range strings.SplitSeq(strings.Trim(c.AuthMount, "/"), "/") {
		if c.AuthMount != "" && !segment.MatchString(s) {
			bad("--vault-auth-mount: %q is not a path", core.Clip(c.AuthMount))
			break
		}
	}
	return errors.Join(errs...)
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Check looks at the text, and whether it is within what the project may read.
func (v *Vault) Check(project core.ProjectID, ref string) error {
	_, err := v.reference(project, ref)
	return err
}

func (v *Vault) reference(project core.ProjectID, ref string) (reference, error) {
	r, err := parseReference(ref)
	if err != nil {
		return r, err
	}
	own := v.prefix.of(project)
	if _, err := core.ParseID[core.ProjectID](string(project)); err != nil {
		return r, err
	}
	if rest, ok := strings.CutPrefix(r.path, own); !ok || rest == "" {
		return r, badRef("this project reads secrets below %s%s only", vaultScheme, own)
	}
	r.project = project
	return r, nil
}

// Read returns what Vault has, or had not long ago.
func (v *Vault) Read(ctx context.Context, project core.ProjectID, ref string) (grant.Secret, error) {
	r, err := v.reference(project, ref)
	if err != nil {
		return grant.Secret{}, err
	}
	if k, ok := v.recall(r, freshTime); ok {
		return k, nil
	}
	// Callers that ask for the same meanwhile get the same answer, also when the first one has given up.
	answer := v.asks.DoChan(r.text, func() (any, error) {
		ask, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTime)
		defer cancel()
		return v.readNow(ask, r)
	})
	select {
	case <-ctx.Done():
		return grant.Secret{}, ctx.Err()
	case a := <-answer:
		s, _ := a.Val.(grant.Secret)
		return s, a.Err
	}
}

func (v *Vault) readNow(ctx context.Context, r reference) (grant.Secret, error) {
	if err := v.paused(); err != nil {
		return v.orStale(ctx, r, err)
	}
	text, err := v.ask(ctx, r)
	if errors.Is(err, errNothing) {
		v.forget(r)
		return grant.Secret{}, core.Errorf(core.FailedPrecondition, core.CodeSecretNotFound, "Vault has nothing at %s: the path, its latest version or a field of that name with text in it; write it there", r.text)
	}
	if err != nil {
		v.noteUnreachable(err)
		return v.orStale(ctx, r, err)
	}
	s, err := secret(r.text, text)
	if err != nil {
		v.forget(r)
		return s, err
	}
	v.keep(r, s)
	return s, nil
}

// orStale returns a secret that was read before, while Vault gives no answer. A denial ends its use.
func (v *Vault) orStale(ctx context.Context, r reference, err error) (grant.Secret, error) {
	if denies(err) {
		v.forget(r)
	} else if k, ok := v.recall(r, staleTime); ok {
		v.log.WarnContext(ctx, "vault gave no secret; what was read before is used", "err", err)
		return k, nil
	}
	return grant.Secret{}, core.Wrapf(err, core.Unavailable, core.CodeSecretUnavailable, "Vault did not give %s: %s", r.text, reason(err))
}

func (v *Vault) recall(r reference, within time.Duration) (grant.Secret, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	k, ok := v.kept[r.text]
	return k.value, ok && v.now().Sub(k.at) < within
}

// keep remembers a secret. At the bound of a project its oldest secret makes room, at the bound of all the oldest of any: one
// project that names many secrets takes nothing from the others until it has its whole share.
func (v *Vault) keep(r reference, s grant.Secret) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.pausedUntil, v.unreachable = time.Time{}, nil
	if _, there := v.kept[r.text]; !there {
		own := 0
		maps.DeleteFunc(v.kept, func(_ string, k keptSecret) bool { return v.now().Sub(k.at) >= staleTime })
		for _, k := range v.kept {
			if k.project == r.project {
				own++
			}
		}
		if own >= maxKeptOf {
			v.dropOldest(func(k keptSecret) bool { return k.project == r.project })
		} else if len(v.kept) >= maxKept {
			v.dropOldest(func(keptSecret) bool { return true })
		}
	}
	v.kept[r.text] = keptSecret{s, v.now(), r.project}
}

// dropOldest forgets the secret that was read the longest time ago, of those that match. The caller holds mu.
func (v *Vault) dropOldest(match func(keptSecret) bool) {
	var oldest string
	for text, k := range v.kept {
		if match(k) && (oldest == "" || k.at.Before(v.kept[oldest].at)) {
			oldest = text
		}
	}
	delete(v.kept, oldest)
}

func (v *Vault) forget(r reference) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.kept, r.text)
}

// paused is why Vault is not asked just now: a fork with many grants must not wait for each of them.
func (v *Vault) paused() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.now().Before(v.pausedUntil) {
		return v.unreachable
	}
	return nil
}

// noteUnreachable pauses requests to Vault when it is unreachable for everybody. An answer about one path says nothing about the others.
func (v *Vault) noteUnreachable(err error) {
	var a *answerError
	var f faultError
	if errors.As(err, &a) && !a.login && a.status != http.StatusServiceUnavailable && a.status != http.StatusTooManyRequests || !errors.As(err, &a) && !errors.As(err, &f) {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.pausedUntil, v.unreachable = v.now().Add(pauseTime), err
}

// bounded is a transport whose answers have an end.
type bounded struct{ http.RoundTripper }

// RoundTrip asks.
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = &boundedBody{resp.Body, maxAnswer}
	}
	return resp, err
}

type boundedBody struct {
	io.ReadCloser
	left int64
}

var errTooLong = errors.New("the answer is too long")

// Read fails where the answer is too long, instead of ending.
func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, errTooLong
	}
	return n, err
}
