// Package envelope encrypts objects in the snapshot store, for projects that want it: the frames of packs, and
// manifests. Each attempt to store a checkpoint has its own key, derived from a key of its project. So the key of one
// checkpoint does not open the others.
package envelope

import (
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/crypto/chacha20poly1305"

	"github.com/coppice-dev/coppice/core"
)

// Overhead is the difference between the length of a box and of its content, in bytes: a nonce at the beginning and a
// tag at the end.
const Overhead = chacha20poly1305.NonceSizeX + chacha20poly1305.Overhead

// ErrOpen says that a box was changed, or that it was encrypted with another key or context.
var ErrOpen = errors.New("the bytes were not encrypted with this key, or were changed since")

// Derive returns the key of the attempt that writes below a prefix, derived from a key of its project.
func Derive(project core.DataKey, prefix string) core.DataKey {
	b, err := hkdf.Key(sha256.New, project[:], nil, "coppice objects v1\n"+prefix, len(project))
	if err != nil {
		panic(err) // the length is a constant
	}
	return core.DataKey(b)
}

// Key encrypts and decrypts the objects of one attempt. It is safe for concurrent use.
type Key struct {
	aead    cipher.AEAD
	version int64
}

// NewKey returns a key; version is the version of the project key from which it was derived. The names of objects
// contain the version.
func NewKey(secret core.DataKey, version int64) *Key {
	aead, err := chacha20poly1305.NewX(secret[:])
	if err != nil {
		panic(err) // the length is a constant
	}
	return &Key{aead, version}
}

// Encrypt appends a box with plain in it to dst, with a nonce of 192 random bits. Decrypt needs the same context.
func (k *Key) Encrypt(dst, plain, context []byte) []byte {
	var nonce [chacha20poly1305.NonceSizeX]byte
	_, _ = rand.Read(nonce[:]) // never fails: crypto/rand ends the program instead
	return k.aead.Seal(append(dst, nonce[:]...), nonce[:], plain, context)
}

// Decrypt appends the content of a box to dst. It fails with ErrOpen if the box cannot be decrypted.
func (k *Key) Decrypt(dst, box, context []byte) ([]byte, error) {
	if len(box) < Overhead {
		return nil, ErrOpen
	}
	out, err := k.aead.Open(dst, box[:chacha20poly1305.NonceSizeX], box[chacha20poly1305.NonceSizeX:], context)
	if err != nil {
		return nil, ErrOpen
	}
	return out, nil
}

// Name returns the name of an object that is encrypted with the key; for a nil key, the name of an unencrypted object.
func (k *Key) Name(plain string) string {
	if k == nil {
		return plain
	}
	return fmt.Sprintf("%s.k%d", plain, k.version)
}

// Version returns the version of the project key with which an object is encrypted, from the object's name. ok is false
// for an unencrypted object.
func Version(object string) (version int64, ok bool) {
	_, text, found := strings.Cut(object[strings.LastIndexByte(object, '/')+1:], ".k")
	if !found || text == "" || text[0] < '1' || text[0] > '9' {
		return 0, false
	}
	version, err := strconv.ParseInt(text, 10, 64)
	return version, err == nil
}

// Encrypted reports whether an object is encrypted, from its name.
func Encrypted(object string) bool {
	_, ok := Version(object)
	return ok
}

// Prefix returns the key prefix of all objects of the attempt to which an object belongs.
func Prefix(object string) string { return object[:strings.LastIndexByte(object, '/')+1] }
