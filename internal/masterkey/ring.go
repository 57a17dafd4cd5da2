package masterkey

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// Ring is the master keys of a file, by which keys of projects are wrapped: the first one wraps, all unwrap. It is safe for concurrent use.
type Ring struct {
	current string
	keys    map[string]*Key // by their ids
}

// OpenRing reads a file of keys, one a line as Open has it, the present one first. The file must exist: a new one could decrypt nothing.
func OpenRing(path string) (*Ring, error) {
	text, err := readPrivate(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable,
			"there is no master key in %s; copy it from where it is kept, or, for the first controller that has one: (umask 077; openssl rand -hex 32 > %s), and keep a copy, without which everything that it protects is lost", path, path)
	}
	if err != nil {
		return nil, err
	}
	r := &Ring{keys: make(map[string]*Key)}
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		raw, err := hex.DecodeString(line)
		if err != nil || len(raw) != size {
			return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "%s does not hold master keys: every line must be %d hex digits", path, 2*size)
		}
		key, err := New(raw)
		if err != nil {
			return nil, err
		}
		id := idOf(raw)
		if r.current == "" {
			r.current = id
		}
		r.keys[id] = key
	}
	if r.current == "" {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "%s holds no master key: it must have a line of %d hex digits", path, 2*size)
	}
	return r, nil
}

// idOf returns the id of a key. The id does not reveal the key.
func idOf(raw []byte) string {
	sum := sha256.Sum256(append([]byte("coppice master key id\n"), raw...))
	return hex.EncodeToString(sum[:8])
}

// Current names the key that Wrap uses.
func (r *Ring) Current() string { return r.current }

// Wrap encrypts a key under a name, without which it cannot be unwrapped.
func (r *Ring) Wrap(_ context.Context, name string, key core.DataKey) ([]byte, error) {
	return r.keys[r.current].Encrypt(name, key[:]), nil
}

// Unwrap decrypts what Wrap made when the key id was the current one; KEY_UNAVAILABLE.
func (r *Ring) Unwrap(_ context.Context, id, name string, wrapped []byte) (core.DataKey, error) {
	k := r.keys[id]
	if k == nil {
		return core.DataKey{}, core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable,
			"%s is wrapped by the master key %s, which this controller does not have; add it to the file of master keys", name, core.Clip(id))
	}
	b, err := k.Decrypt(name, wrapped)
	if err != nil || len(b) != len(core.DataKey{}) {
		return core.DataKey{}, core.Wrapf(err, core.FailedPrecondition, core.CodeKeyUnavailable, "%s was changed in the database since the master key %s has wrapped it", name, core.Clip(id))
	}
	return core.DataKey(b), nil
}
