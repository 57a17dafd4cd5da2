// Package masterkey encrypts the secrets of a cluster in its database, with a key in a file outside
// the database. A copy of the database alone opens nothing.
package masterkey

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
)

const size = 32

// Key encrypts and decrypts. It is safe for concurrent use.
type Key struct{ aead cipher.AEAD }

// Open reads the key of a file: 64 hex digits, readable by its owner only. found is false when there is no such file.
func Open(path string) (key *Key, found bool, err error) {
	text, err := readPrivate(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, true, err
	}
	raw, err := hex.DecodeString(strings.TrimSpace(text))
	if err != nil || len(raw) != size {
		return nil, true, core.Errorf(core.Invalid, core.CodeInvalidField, "%s does not hold a key: it must be %d hex digits", path, 2*size)
	}
	key, err = New(raw)
	return key, true, err
}

// readPrivate reads a file that nobody but its owner may read.
func readPrivate(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return "", core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost,
			"others than its owner may read %s; chmod 600 it, and if they have, replace the keys that are in it", path)
	}
	text, err := os.ReadFile(path)
	return string(text), err
}

// Create makes a key and keeps it in a file, which must not be there.
func Create(path string) (*Key, error) {
	raw := make([]byte, size)
	_, _ = rand.Read(raw) // never fails: crypto/rand ends the program instead
	if err := atomicfile.Write(path, []byte(hex.EncodeToString(raw)+"\n"), 0o600); err != nil {
		return nil, err
	}
	return New(raw)
}

// New makes a key out of 32 bytes.
func New(raw []byte) (*Key, error) {
	block, err := aes.NewCipher(raw)
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCM(block)
	return &Key{aead}, err
}

// Encrypt encrypts a secret under a name. Decryption needs the same name.
func (k *Key) Encrypt(name string, secret []byte) []byte {
	nonce := make([]byte, k.aead.NonceSize(), k.aead.NonceSize()+len(secret)+k.aead.Overhead())
	_, _ = rand.Read(nonce) // never fails
	return k.aead.Seal(nonce, nonce, secret, []byte(name))
}

// Decrypt decrypts what Encrypt made under the same name.
func (k *Key) Decrypt(name string, encrypted []byte) ([]byte, error) {
	n := k.aead.NonceSize()
	if len(encrypted) < n {
		return nil, fmt.Errorf("the encrypted %s is too short", name)
	}
	secret, err := k.aead.Open(nil, encrypted[:n], encrypted[n:], []byte(name))
	if err != nil {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeIncompatibleHost,
			"the %s in the database was encrypted with another key; use the key file that the cluster's first controller made", name)
	}
	return secret, nil
}
