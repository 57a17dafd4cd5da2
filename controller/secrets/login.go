package secrets

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"time"

	"github.com/hashicorp/vault/api"
	"github.com/hashicorp/vault/api/auth/approle"
	"github.com/hashicorp/vault/api/auth/kubernetes"
)

// maxCredential bounds a file with a credential; Kubernetes's tokens have some KiB.
const maxCredential = 16 << 10

// session is who the controller is in Vault. It is immutable.
type session struct {
	client *api.Client
	began  time.Time
	// renewAt is when it is renewed, endsAt when it ends; zero: never.
	renewAt, endsAt time.Time
	renewable       bool
	lasted          time.Duration // as Vault said when it began
}

// session is the present one, or a new one where that is over.
func (v *Vault) session(ctx context.Context) (*session, error) {
	if v.cfg.TokenFile != "" {
		return v.withTokenFile()
	}
	v.mu.Lock()
	me := v.me
	v.mu.Unlock()
	if me != nil && (me.renewAt.IsZero() || v.now().Before(me.renewAt)) {
		return me, nil
	}
	// The one who logs in has a deadline of his own, which is the same for all who wait.
	got, err, _ := v.logins.Do("", func() (any, error) {
		fresh, err := v.renewOrLogin(ctx, me)
		if err != nil {
			return (*session)(nil), err
		}
		v.mu.Lock()
		defer v.mu.Unlock()
		v.me = fresh
		return fresh, nil
	})
	fresh, _ := got.(*session)
	return fresh, err
}

// withTokenFile reads the file each time, because its writer (an agent, for example) may replace it at any time.
func (v *Vault) withTokenFile() (*session, error) {
	token, err := readCredential(v.cfg.TokenFile)
	if err != nil {
		return nil, err
	}
	client, err := v.client(token)
	return &session{client: client, began: v.now()}, err
}

// dismiss ends a session that Vault refused, unless it is so young that another would be refused as well.
func (v *Vault) dismiss(me *session) bool {
	if v.cfg.TokenFile != "" || v.now().Sub(me.began) < loginTime {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.me == me {
		v.me = nil
	}
	return true
}

// renewOrLogin goes on with a session that can be renewed. A renewal that gives little more is the end of its longest life.
func (v *Vault) renewOrLogin(ctx context.Context, me *session) (*session, error) {
	if me != nil && me.renewable && v.now().Before(me.endsAt) {
		s, err := me.client.Auth().Token().RenewSelfWithContext(ctx, 0)
		if err == nil && s != nil && s.Auth != nil {
			if lasts := time.Duration(s.Auth.LeaseDuration) * time.Second; lasts >= me.lasted/2 {
				return v.lasting(&session{client: me.client, began: me.began, renewable: s.Auth.Renewable, lasted: me.lasted}, lasts), nil
			}
		}
	}
	s, err := v.login(ctx)
	if err != nil {
		if a, ok := errors.AsType[*answerError](err); ok {
			a.login = true
		}
		return nil, err
	}
	client, err := v.client(s.Auth.ClientToken)
	lasts := time.Duration(s.Auth.LeaseDuration) * time.Second
	return v.lasting(&session{client: client, began: v.now(), renewable: s.Auth.Renewable, lasted: lasts}, lasts), err
}

func (v *Vault) lasting(s *session, lasts time.Duration) *session {
	if lasts > 0 {
		s.renewAt, s.endsAt = v.now().Add(lasts*2/3), v.now().Add(lasts)
	}
	return s
}

func (v *Vault) login(ctx context.Context) (*api.Secret, error) {
	method, err := v.method()
	if err != nil {
		return nil, err
	}
	s, err := method.Login(ctx, v.base)
	if err != nil {
		return nil, clean(ctx, err)
	}
	if s == nil || s.Auth == nil || s.Auth.ClientToken == "" {
		return nil, faultError("it gave no token for a login: mind --vault-auth-mount")
	}
	return s, nil
}

// method reads the credentials again at each login.
func (v *Vault) method() (method api.AuthMethod, err error) {
	mount := strings.Trim(v.cfg.AuthMount, "/")
	if v.cfg.RoleIDFile != "" {
		role, err := readCredential(v.cfg.RoleIDFile)
		if err != nil {
			return nil, err
		}
		secret, err := readCredential(v.cfg.SecretIDFile)
		if err != nil {
			return nil, err
		}
		var options []approle.LoginOption
		if mount != "" {
			options = append(options, approle.WithMountPath(mount))
		}
		method, err = approle.NewAppRoleAuth(role, &approle.SecretID{FromString: secret}, options...)
		if err != nil {
			return nil, faultError("the credentials of AppRole cannot be used")
		}
		return method, nil
	}
	file := v.cfg.KubernetesTokenFile
	if file == "" {
		file = "/var/run/secrets/kubernetes.io/serviceaccount/token"
	}
	jwt, err := readCredential(file)
	if err != nil {
		return nil, err
	}
	options := []kubernetes.LoginOption{kubernetes.WithServiceAccountToken(jwt)}
	if mount != "" {
		options = append(options, kubernetes.WithMountPath(mount))
	}
	if method, err = kubernetes.NewKubernetesAuth(v.cfg.KubernetesRole, options...); err != nil {
		return nil, faultError("the credentials of Kubernetes cannot be used")
	}
	return method, nil
}

// readCredential reads a small file of one line.
func readCredential(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", faultError("the controller cannot read its own credentials for it")
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, maxCredential+1))
	text := strings.TrimSpace(string(b))
	switch {
	case err != nil || text == "":
		return "", faultError("the controller's own credentials for it are empty or cannot be read")
	case len(b) > maxCredential:
		return "", faultError("a file with the controller's own credentials for it is longer than 16 KiB: it is no credential")
	}
	return text, nil
}
