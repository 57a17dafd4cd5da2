// Package envelope encrypts the objects of projects that want it in the snapshot store: frames of
// packs, and manifests. Every attempt to store a checkpoint has its own key, derived from a key of
// its project. So the key of one checkpoint does not open the others.
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

// Overhead is how much longer a box is than what is in it, in bytes: a nonce before and a tag behind.
const Overhead = chacha20poly1305.NonceSizeX + chacha20poly1305.Overhead

// ErrOpen says that a box is not what was sealed, or that the key is another.
var ErrOpen = errors.New("the bytes are not what was encrypted with this key")

// Derive gives the key of the attempt that writes below a prefix, out of a key of its project.
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

// NewKey makes one that is derived from the version of its project's key, which names of objects have.
func NewKey(secret core.DataKey, version int64) *Key {
	aead, err := chacha20poly1305.NewX(secret[:])
	if err != nil {
		panic(err) // the length is a constant
	}
	return &Key{aead, version}
}

// Seal appends a box with plain in it to dst, under a nonce of 192 random bits. It can be opened with the same context only.
func (k *Key) Seal(dst, plain, context []byte) []byte {
	var nonce [chacha20poly1305.NonceSizeX]byte
	_, _ = rand.Read(nonce[:]) // never fails: crypto/rand ends the program instead
	return k.aead.Seal(append(dst, nonce[:]...), nonce[:], plain, context)
}

// Open appends what is in a box to dst; ErrOpen.
func (k *Key) Open(dst, box, context []byte) ([]byte, error) {
	if len(box) < Overhead {
		return nil, ErrOpen
	}
	out, err := k.aead.Open(dst, box[:chacha20poly1305.NonceSizeX], box[chacha20poly1305.NonceSizeX:], context)
	if err != nil {
		return nil, ErrOpen
	}
	return out, nil
}

// Name is the name of an object that is encrypted with the key; of one that is not, where the key is nil.
func (k *Key) Name(plain string) string {
	if k == nil {
		return plain
	}
	return fmt.Sprintf("%s.k%d", plain, k.version)
}

// Version says which of its project's keys an object is encrypted with, from its name. ok is false for one that is not encrypted.
func Version(object string) (version int64, ok bool) {
	_, text, found := strings.Cut(object[strings.LastIndexByte(object, '/')+1:], ".k")
	if !found || text == "" || text[0] < '1' || text[0] > '9' {
		return 0, false
	}
	version, err := strconv.ParseInt(text, 10, 64)
	return version, err == nil
}

// Encrypted reports whether an object is, from its name.
func Encrypted(object string) bool {
	_, ok := Version(object)
	return ok
}

// Prefix is what the keys of all objects of an object's attempt begin with.
func Prefix(object string) string { return object[:strings.LastIndexByte(object, '/')+1] }
