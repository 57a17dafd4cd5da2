package secrets

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/hashicorp/vault/api"
)

// errNothing is that Vault has no such secret.
var errNothing = errors.New("there is no such secret")

// answerError is what Vault answered instead of a secret. What it wrote is left out: it may have anything in it.
type answerError struct {
	status int
	login  bool // it did not let the controller in
	raw    bool // the answer is not in Vault's form: something else may have sent it
}

func (e *answerError) Error() string {
	if e.login {
		return fmt.Sprintf("it does not let this controller log in (it answered %d)", e.status)
	}
	switch e.status {
	case http.StatusForbidden:
		return "it does not let this controller read there (it answered 403): mind the token, its policy and the namespace"
	case http.StatusNotFound:
		return "nothing is mounted there (it answered 404): mind the mount and the namespace"
	case http.StatusServiceUnavailable:
		return "it is sealed or not up (it answered 503)"
	case http.StatusTooManyRequests:
		return "it is asked too much (it answered 429)"
	}
	return fmt.Sprintf("it answered %d", e.status)
}

// faultError is why nobody gets an answer, in words of our own.
type faultError string

func (e faultError) Error() string { return string(e) }

// denies reports whether Vault itself has said that the controller may not have a secret, or that there is none. An answer that
// only shows that nobody can say at this moment (too much, sealed, broken, not from Vault) is no denial.
func denies(err error) bool {
	if errors.Is(err, errNothing) || errors.Is(err, errEngine) {
		return true
	}
	a, ok := errors.AsType[*answerError](err)
	if !ok || a.raw {
		return false
	}
	switch a.status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound:
		return true
	case http.StatusBadRequest: // AppRole says so of a role or a secret id that it does not know any more
		return a.login
	}
	return false
}

// errEngine is that something is mounted there which keeps no secrets of this kind.
var errEngine = errors.New("another kind of engine is mounted there")

// placeError is what is wrong with the answer about one place.
type placeError string

func (e placeError) Error() string { return string(e) }

const errNoVault placeError = "what answers is no Vault"

// clean makes an error of the library's one that can be shown: that may quote an answer.
func clean(ctx context.Context, err error) error {
	var a *api.ResponseError
	var cert *tls.CertificateVerificationError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &a):
		return &answerError{status: a.StatusCode, raw: a.RawError}
	case errors.Is(err, errTooLong):
		return placeError("its answer is too long")
	case ctx.Err() != nil: // whatever the library makes of it
		return faultError(fmt.Sprintf("it did not answer within %v", askTime))
	case errors.As(err, &cert):
		return faultError("its certificate is not of an authority that is trusted here, or for another name: mind --vault-ca-file")
	case errors.As(err, new(interface{ Timeout() bool })): // of the network
		return faultError("it cannot be reached")
	}
	return errNoVault
}

// reason is what a caller may know of an error of ours.
func reason(err error) string {
	var a *answerError
	var f faultError
	var p placeError
	switch {
	case errors.As(err, &a):
		return a.Error()
	case errors.As(err, &f):
		return string(f)
	case errors.As(err, &p):
		return string(p)
	}
	return "it cannot be asked"
}

func statusOf(err error) int {
	if a, ok := errors.AsType[*answerError](err); ok {
		return a.status
	}
	return 0
}

// mount is a key-value engine.
type mount struct {
	path string // with a slash at its end
	v2   bool
	at   time.Time
}

// ask reads, and logs in again when Vault does not know the controller any more.
func (v *Vault) ask(ctx context.Context, r reference) (string, error) {
	me, err := v.session(ctx)
	if err != nil {
		return "", err
	}
	value, err := v.find(ctx, me.client, r)
	if statusOf(err) == http.StatusForbidden && v.dismiss(me) {
		if me, err = v.session(ctx); err != nil {
			return "", err
		}
		value, err = v.find(ctx, me.client, r)
	}
	return value, err
}

// find reads, and looks again at what is mounted when what is known of it may be old.
func (v *Vault) find(ctx context.Context, client *api.Client, r reference) (string, error) {
	m, known := v.knownMount(r)
	if known {
		value, err := get(ctx, client, m, r)
		if status := statusOf(err); !errors.Is(err, errNothing) && status != http.StatusForbidden && status != http.StatusNotFound {
			return value, err
		}
	}
	m, err := v.findMount(ctx, client, r)
	if err != nil {
		return "", err
	}
	return get(ctx, client, m, r)
}

func (v *Vault) knownMount(r reference) (mount, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for at := strings.IndexByte(r.path, '/'); at >= 0; {
		if m, ok := v.mounts[r.path[:at+1]]; ok && v.now().Sub(m.at) < mountTime {
			return m, true
		}
		next := strings.IndexByte(r.path[at+1:], '/')
		if next < 0 {
			break
		}
		at += 1 + next
	}
	return mount{}, false
}

// findMount asks what Vault's own client asks: everybody who may read anything below the mount may ask it.
func (v *Vault) findMount(ctx context.Context, client *api.Client, r reference) (mount, error) {
	s, err := fetch(ctx, client, "sys/internal/ui/mounts/"+r.path)
	if err != nil {
		if errors.Is(err, errNothing) {
			err = &answerError{status: http.StatusNotFound}
		}
		return mount{}, err
	}
	path, _ := s.Data["path"].(string)
	kind, _ := s.Data["type"].(string)
	options, _ := s.Data["options"].(map[string]any)
	if !strings.HasSuffix(path, "/") || !strings.HasPrefix(r.path, path) {
		return mount{}, errNoVault
	}
	if kind != "kv" && kind != "generic" {
		return mount{}, errors.Join(errEngine, placeError(fmt.Sprintf("what is mounted at %s keeps no secrets of this kind: a key-value engine does", path)))
	}
	m := mount{path: path, v2: options["version"] == "2", at: v.now()}
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.mounts) >= maxMounts {
		clear(v.mounts) // they are asked for again
	}
	v.mounts[path] = m
	return m, nil
}

// get reads a field.
func get(ctx context.Context, client *api.Client, m mount, r reference) (string, error) {
	path := r.path
	if m.v2 {
		path = m.path + "data/" + strings.TrimPrefix(r.path, m.path)
	}
	s, err := fetch(ctx, client, path)
	if err != nil {
		return "", err
	}
	data := s.Data
	if m.v2 {
		data, _ = data["data"].(map[string]any) // nil where the version was deleted
	}
	value, ok := data[r.field].(string)
	if !ok {
		return "", errNothing
	}
	return value, nil
}

// fetch reads a path.
func fetch(ctx context.Context, client *api.Client, path string) (*api.Secret, error) {
	resp, err := client.Logical().ReadRawWithContext(ctx, path)
	if resp != nil && resp.Body != nil {
		defer func() { _ = resp.Body.Close() }()
	}
	var a *api.ResponseError
	if errors.As(err, &a) && a.StatusCode == http.StatusNotFound && len(a.Errors) == 0 && !a.RawError {
		return nil, errNothing // a 404 with errors says that there is no such place
	}
	if err != nil {
		return nil, clean(ctx, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, &answerError{status: resp.StatusCode}
	}
	s, err := api.ParseSecret(resp.Body)
	if err != nil {
		return nil, clean(ctx, err)
	}
	if s == nil || s.Data == nil {
		return nil, errNoVault
	}
	return s, nil
}
