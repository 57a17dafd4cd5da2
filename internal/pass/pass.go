// Package pass makes and verifies passes: short-lived tokens, signed by a controller. With a pass,
// a user reaches the streams or files of one sandbox directly at its runner. The runner verifies
// passes by itself and asks no database.
package pass

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Scope is what a pass is good for.
type Scope string

// The scopes.
const (
	Attach Scope = "attach" // to one session, once
	Files  Scope = "files"  // read and write files, until it expires
)

// Claims is what a pass says. It is bound to one sandbox and its epoch: a fork has another sandbox, and a restore in place
// ends the sandbox that it replaces.
type Claims struct {
	ID        string           `json:"id"`
	Runner    core.RunnerID    `json:"runner"`
	Project   core.ProjectID   `json:"project"`
	Workspace core.WorkspaceID `json:"workspace"`
	Sandbox   core.SandboxID   `json:"sandbox"`
	Epoch     int64            `json:"epoch"`
	Scope     Scope            `json:"scope"`
	Session   core.SessionID   `json:"session,omitempty"` // as the guest calls it
	Key       core.KeyID       `json:"key,omitempty"`     // the API key that asked for it
	KeyEnds   time.Time        `json:"key_ends,omitzero"` // when that expires: what was begun ends then
	IssuedAt  time.Time        `json:"issued_at"`
	ExpiresAt time.Time        `json:"expires_at"`
}

const (
	prefix  = "cpp_"
	purpose = "coppice pass v1\x00" // what is signed begins with it, so that no other signature is taken for a pass
	longest = 2048
	skew    = time.Minute // a controller's clock may be ahead by this much
)

var encoding = base64.RawURLEncoding.Strict()

// Signer makes passes.
type Signer struct{ key ed25519.PrivateKey }

// NewSigner makes a signer with a new key.
func NewSigner() (*Signer, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return &Signer{key}, err
}

// LoadSigner makes a signer of the seed that Seed returned.
func LoadSigner(seed []byte) (*Signer, error) {
	if len(seed) != ed25519.SeedSize {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the key for passes has %d bytes", len(seed))
	}
	return &Signer{ed25519.NewKeyFromSeed(seed)}, nil
}

// Seed is the secret key, to be kept sealed.
func (s *Signer) Seed() []byte { return s.key.Seed() }

// Public is the key with which runners verify.
func (s *Signer) Public() []byte { return s.key.Public().(ed25519.PublicKey) } //nolint:forcetypeassert // it is always of that type

// Sign makes a pass, good from now for life. ID and times are set here.
func (s *Signer) Sign(c Claims, life time.Duration) (string, Claims, error) {
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails: crypto/rand ends the program instead
	now := time.Now().UTC().Truncate(time.Millisecond)
	c.ID, c.IssuedAt, c.ExpiresAt = hex.EncodeToString(id), now, now.Add(life)
	payload, err := json.Marshal(c)
	if err != nil {
		return "", c, err
	}
	signature := ed25519.Sign(s.key, append([]byte(purpose), payload...))
	return prefix + encoding.EncodeToString(payload) + "." + encoding.EncodeToString(signature), c, nil
}

// Verifier judges passes at a runner. It is safe for concurrent use.
type Verifier struct {
	runner  core.RunnerID
	started time.Time

	mu   sync.Mutex // guards what follows
	keys []ed25519.PublicKey
	used map[string]time.Time // passes for one use, until when they would be good
}

// NewVerifier makes one that knows no key yet and so takes nothing.
func NewVerifier(runner core.RunnerID) *Verifier {
	return &Verifier{runner: runner, started: time.Now().Truncate(time.Millisecond), used: map[string]time.Time{}}
}

// Learn replaces the keys by what a controller said at registration.
func (v *Verifier) Learn(keys [][]byte) {
	list := make([]ed25519.PublicKey, 0, len(keys))
	for _, k := range keys {
		if len(k) == ed25519.PublicKeySize {
			list = append(list, k)
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.keys = list
}

func refused(why string) error {
	return core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the pass is not taken: %s; ask the API for another", why)
}

// Verify returns the claims of a pass if it is genuine, has the scope, is for this runner and has not expired. Verify
// spends a pass to attach. A restart forgets the spent passes, so the verifier refuses passes from before it.
func (v *Verifier) Verify(token string, scope Scope, now time.Time) (Claims, error) {
	c, err := v.genuine(token)
	switch {
	case err != nil:
		return Claims{}, err
	case c.Runner != v.runner:
		return Claims{}, refused("it is for another runner")
	case c.Scope != scope:
		return Claims{}, refused("it is for something else")
	case !now.Before(c.ExpiresAt):
		return Claims{}, refused("it has expired")
	case c.IssuedAt.After(now.Add(skew)):
		return Claims{}, refused("it is from the future; the clocks of controller and runner differ")
	case scope == Attach && !v.spend(c, now):
		return Claims{}, refused("it was used, or is from before the runner's start")
	}
	return c, nil
}

func (v *Verifier) genuine(token string) (Claims, error) {
	malformed := refused("it is not a pass")
	body, ok := strings.CutPrefix(token, prefix)
	first, second, both := strings.Cut(body, ".")
	if !ok || !both || len(token) > longest {
		return Claims{}, malformed
	}
	payload, err1 := encoding.DecodeString(first)
	signature, err2 := encoding.DecodeString(second)
	if err1 != nil || err2 != nil || len(signature) != ed25519.SignatureSize {
		return Claims{}, malformed
	}
	v.mu.Lock()
	keys := v.keys
	v.mu.Unlock()
	signed := append([]byte(purpose), payload...)
	for _, k := range keys {
		if !ed25519.Verify(k, signed, signature) {
			continue
		}
		var c Claims
		d := json.NewDecoder(bytes.NewReader(payload))
		if err := d.Decode(&c); err != nil {
			return Claims{}, malformed
		}
		return c, nil
	}
	return Claims{}, refused("no controller of this cluster has signed it")
}

func (v *Verifier) spend(c Claims, now time.Time) bool {
	const prune = 1024
	v.mu.Lock()
	defer v.mu.Unlock()
	if _, used := v.used[c.ID]; used || c.IssuedAt.Before(v.started) {
		return false
	}
	if len(v.used) >= prune {
		for id, until := range v.used {
			if now.After(until) {
				delete(v.used, id)
			}
		}
	}
	v.used[c.ID] = c.ExpiresAt
	return true
}
