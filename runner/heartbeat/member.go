package heartbeat

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// Member is a runner's membership of a cluster: who it is there, and the certificate that proves it. It is kept in a file that
// only the runner's user may read.
type Member struct {
	RunnerID  core.RunnerID
	ClusterID string
	Identity  *mtls.Identity

	path      string
	authority []byte
}

type memberFile struct {
	RunnerID    core.RunnerID `json:"runner_id"`
	ClusterID   string        `json:"cluster_id"`
	Authority   []byte        `json:"authority"`
	Certificate []byte        `json:"certificate"`
	Key         []byte        `json:"key"` // PKCS#8
}

// Load reads a membership; found is false when there is none yet. An expired certificate is an error that says what to do.
func Load(path string) (m *Member, found bool, err error) {
	var f memberFile
	if err := atomicfile.ReadJSON(path, &f); err != nil {
		return nil, !errors.Is(err, os.ErrNotExist), ignoreAbsent(err)
	}
	if m, _, err = f.member(path); err != nil {
		return nil, true, err
	}
	if leaf := m.Identity.Leaf(); time.Now().After(leaf.NotAfter) {
		return m, true, core.Errorf(core.Unauthenticated, core.CodeCertificateRefused,
			"the certificate of runner %s expired at %s, while it was not running; make a token with `coppice runner-token create --runner %s` and start it with that",
			f.RunnerID, leaf.NotAfter.Format(time.RFC3339), f.RunnerID)
	}
	return m, true, nil
}

func (f memberFile) member(path string) (*Member, crypto.Signer, error) {
	parsed, err := x509.ParsePKCS8PrivateKey(f.Key)
	key, ok := parsed.(crypto.Signer)
	if err != nil || !ok {
		return nil, nil, core.Wrapf(err, core.DataLoss, core.CodeInternal, "%s holds no key; remove it and join again with a token for the same runner", path)
	}
	m := &Member{RunnerID: f.RunnerID, ClusterID: f.ClusterID, path: path, authority: f.Authority}
	m.Identity, err = mtls.NewIdentity(f.Authority, mtls.Certificate{DER: f.Certificate, Key: key})
	return m, key, err
}

// Reload reads the membership again: another process renews its certificate. It replaces what is in use if that has changed.
func (m *Member) Reload() error {
	var f memberFile
	if err := atomicfile.ReadJSON(m.path, &f); err != nil {
		return err
	}
	now, key, err := f.member(m.path)
	if err != nil || now.Identity.Leaf().Equal(m.Identity.Leaf()) {
		return err
	}
	return m.Identity.Replace(f.Authority, mtls.Certificate{DER: f.Certificate, Key: key})
}

func ignoreAbsent(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Join spends a token at the first controller that answers and keeps the membership in path. A token is
// "secret.pin"; the pin tells the cluster's controllers from others.
func Join(ctx context.Context, controllers []string, token, path string) (*Member, error) {
	token = strings.TrimSpace(token)
	_, pin, ok := strings.Cut(token, ".")
	if !ok {
		return nil, core.Errorf(core.Unauthenticated, core.CodeJoinTokenRefused, "what was given is not a join token; `coppice runner-token create` prints one")
	}
	key, err := mtls.NewKey()
	if err != nil {
		return nil, err
	}
	request, err := mtls.Request(key)
	if err != nil {
		return nil, err
	}
	client := newClient(mtls.JoinClient(pin))
	defer client.CloseIdleConnections()
	var errs []error
	for _, base := range controllers {
		if !strings.HasPrefix(base, "https://") {
			return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "the controller %q must be https://host:port", core.Clip(base))
		}
		var out runnerapi.Joined
		err := post(ctx, client, strings.TrimSuffix(base, "/")+runnerapi.PathJoin, "", runnerapi.Join{Token: token, CertificateRequest: request}, &out)
		if err == nil {
			if !mtls.PinMatches(pin, out.Authority) {
				return nil, core.Errorf(core.Unauthenticated, core.CodeCertificateRefused, "the controller sent another authority than the token names")
			}
			m := &Member{RunnerID: out.RunnerID, ClusterID: out.ClusterID, path: path, authority: out.Authority}
			return m, m.adopt(out.Certificate, key)
		}
		errs = append(errs, err)
		if core.CategoryOf(err) != core.Unavailable {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// adopt keeps a certificate, then uses it.
func (m *Member) adopt(der []byte, key crypto.Signer) error {
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	cert := mtls.Certificate{DER: der, Key: key}
	fresh, err := mtls.NewIdentity(m.authority, cert)
	if err != nil {
		return err
	}
	if err := fresh.Leaf().VerifyHostname(mtls.RunnerName(m.RunnerID)); err != nil {
		return err
	}
	if err := atomicfile.WriteJSON(m.path, memberFile{m.RunnerID, m.ClusterID, m.authority, der, secret}, 0o600); err != nil {
		return err
	}
	if m.Identity == nil {
		m.Identity = fresh
		return nil
	}
	return m.Identity.Replace(m.authority, cert)
}

// renew replaces the certificate at half of its life. It says when to look again.
func (l *Link) renew(ctx context.Context) error {
	m := l.cfg.Member
	if m == nil || time.Now().Before(m.Identity.RenewAt()) || time.Since(l.renewTried) < renewPause {
		return nil
	}
	l.renewTried = time.Now()
	key, err := mtls.NewKey()
	if err != nil {
		return err
	}
	request, err := mtls.Request(key)
	if err != nil {
		return err
	}
	var out runnerapi.Renewed
	if err := l.post(ctx, strings.Replace(runnerapi.PathRenew, "{id}", string(m.RunnerID), 1), runnerapi.Renew{CertificateRequest: request}, &out); err != nil {
		return err
	}
	if err := m.adopt(out.Certificate, key); err != nil {
		return err
	}
	l.client.CloseIdleConnections()
	l.cfg.Log.InfoContext(ctx, "certificate renewed", "expires_at", m.Identity.Leaf().NotAfter)
	return nil
}

// renewPause is the least time between two attempts.
const renewPause = time.Second

func newClient(secure *tls.Config) *http.Client {
	return &http.Client{Timeout: requestTime, Transport: &http.Transport{TLSClientConfig: secure, MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute}}
}
