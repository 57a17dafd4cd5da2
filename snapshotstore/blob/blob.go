// Package blob is the contract of the backends that keep the objects of the snapshot store: a directory (dir) and any
// server with the S3 API (s3). Every backend passes the suite in blobtest.
package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Blobs keeps immutable objects by key. Callers trust nothing that it returns: they check digests.
//
// A store that cannot be reached, or is too slow for the backend's deadlines, is STORE_UNAVAILABLE, after the backend's
// own bounded retries. A store that refuses the credentials is STORE_AUTH. All methods are idempotent and safe for
// concurrent use. A cancelled context leaves an object complete or absent, never partial. The backend, or a later
// Sweep, removes what an abandoned upload has written.
type Blobs interface {
	// Put stores size bytes of body under a key; digest is their digest. It returns when they are durable. If the key
	// already has the same bytes, Put succeeds; if it has other bytes, the error is ErrExists and they stay. If the
	// bytes have another digest, the error is ErrDigest.
	Put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error
	// Get returns n bytes of an object from off on, or fewer if the object ends before. ErrNotFound if there is no such
	// object. The caller must close the body. If a body is cut short, its Read returns an error that is not io.EOF. The
	// context must live as long as the body.
	Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error)
	// Stat returns what the store knows about an object; ErrNotFound.
	Stat(ctx context.Context, key string) (Info, error)
	// List yields the objects whose keys begin with prefix, in the order of their keys. It stops at the first error.
	List(ctx context.Context, prefix string) iter.Seq2[Info, error]
	// Delete removes objects. A missing object is not an error.
	Delete(ctx context.Context, keys ...string) error
	// Sweep removes the hidden leftovers of uploads that were abandoned before the given time. List does not show them.
	Sweep(ctx context.Context, before time.Time) error
}

// Forgetter is a store that caches bytes closer to the reader than the place where they are stored.
type Forgetter interface {
	// Forget reports that a range had wrong bytes: the store reads it from its original place before it returns it
	// again.
	Forget(ctx context.Context, key string, off, n int64)
}

// Forget calls Forget of a store that has it.
func Forget(ctx context.Context, b Blobs, key string, off, n int64) {
	if f, ok := b.(Forgetter); ok {
		f.Forget(ctx, key, off, n)
	}
}

// Info is what a store knows about an object.
type Info struct {
	Key      string
	Size     int64
	Modified time.Time // by the store's clock
}

// The errors that callers check for.
var (
	ErrNotFound = errors.New("the store has no such object")
	ErrExists   = errors.New("the store has other bytes under this key")
	ErrDigest   = errors.New("the bytes do not have the given digest")
)

// MaxKey is the maximum length of a key, MaxPart that of one of its parts, in bytes: the limit of file names.
const (
	MaxKey  = 512
	MaxPart = 255
)

// ValidKey reports whether every backend can keep a key: lower-case letters, digits, "_", "-" and "." in parts
// separated by slashes. No part is empty or begins with a dot.
//
// A key must not be a directory of another key ("a" and "a/b"): a store that keeps objects as files refuses the second
// one. Our layouts have no such keys.
func ValidKey(key string) bool {
	if key == "" || len(key) > MaxKey {
		return false
	}
	for part := range strings.SplitSeq(key, "/") {
		if part == "" || part[0] == '.' || len(part) > MaxPart {
			return false
		}
		for _, c := range []byte(part) {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '-' && c != '.' {
				return false
			}
		}
	}
	return true
}

// ValidPrefix reports whether a valid key can begin with prefix.
func ValidPrefix(prefix string) bool {
	return prefix == "" || ValidKey(strings.TrimSuffix(prefix, "/"))
}

// CheckKey refuses an invalid key. Backends call it first.
func CheckKey(key string) error {
	if !ValidKey(key) {
		return core.Errorf(core.Invalid, core.CodeInvalidName, "%q is not a key of the store", core.Clip(key))
	}
	return nil
}

// CheckPut refuses arguments of Put that no store accepts.
func CheckPut(key string, size int64, digest core.Digest) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if size < 0 {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "object %s cannot have %d bytes", key, size)
	}
	_, err := core.ParseDigest(string(digest))
	return err
}

// CheckGet refuses arguments of Get that no store accepts.
func CheckGet(key string, off, n int64) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if off < 0 || n < 0 || off > math.MaxInt64-n {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "%d bytes from offset %d of object %s cannot be read", n, off, key)
	}
	return nil
}

// CheckPrefix refuses arguments of List that no store accepts.
func CheckPrefix(prefix string) error {
	if !ValidPrefix(prefix) {
		return core.Errorf(core.Invalid, core.CodeInvalidName, "%q is not the beginning of a key of the store", core.Clip(prefix))
	}
	return nil
}

// WrongDigest is the error of a Put whose bytes do not have the given digest: they were damaged on this host.
func WrongDigest(key string, got, want core.Digest) error {
	return core.Wrapf(ErrDigest, core.DataLoss, core.CodeCheckpointCorrupt,
		"the bytes for object %s have the digest %s instead of %s: they changed on this host before they were stored", key, got.Short(), want.Short())
}

// NotFound is ErrNotFound with the key.
func NotFound(key string) error { return fmt.Errorf("object %s: %w", key, ErrNotFound) }

// Exists is ErrExists with the key.
func Exists(key string) error { return fmt.Errorf("object %s: %w", key, ErrExists) }
