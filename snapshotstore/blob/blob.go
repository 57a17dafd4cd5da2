// Package blob is the contract of the backends that keep the objects of the snapshot store: a
// directory (dir) and any server that speaks S3 (s3). Every backend passes the suite in blobtest.
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

// Blobs keeps immutable objects by key. Nothing that it returns is trusted: who reads checks digests.
//
// A store that cannot be reached, or that is too slow for the backend's deadlines, is STORE_UNAVAILABLE, after the backend's own
// bounded retries; one that refuses the credentials is STORE_AUTH. Everything is idempotent and safe for concurrent use. A cancelled
// context leaves an object whole or absent, never in part; what a backend has written of one that was given up it removes, or
// Sweep does.
type Blobs interface {
	// Put stores size bytes of body, whose digest is digest, under a key. It returns when they are durable. Where the key has the same
	// bytes already it succeeds; where it has others it is ErrExists, and they stay. Bytes of another digest are ErrDigest.
	Put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error
	// Get returns n bytes of an object from off on; fewer where it ends before. ErrNotFound when there is no such object. The caller
	// closes it. A body that is cut short is an error of its Read, never io.EOF. The context is the body's too.
	Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error)
	// Stat says what is known of an object; ErrNotFound.
	Stat(ctx context.Context, key string) (Info, error)
	// List yields the objects whose keys begin with prefix, in the order of their keys. It ends with the first error.
	List(ctx context.Context, prefix string) iter.Seq2[Info, error]
	// Delete removes objects. Those that are not there are no error.
	Delete(ctx context.Context, keys ...string) error
	// Sweep removes what uploads that were given up before a moment have left that List does not show.
	Sweep(ctx context.Context, before time.Time) error
}

// Forgetter is a store that keeps bytes nearer to whoever reads them than where they are stored.
type Forgetter interface {
	// Forget says that a range was not what it should be: it is read from where it is stored before it is given again.
	Forget(ctx context.Context, key string, off, n int64)
}

// Forget tells a store, if it is one that forgets.
func Forget(ctx context.Context, b Blobs, key string, off, n int64) {
	if f, ok := b.(Forgetter); ok {
		f.Forget(ctx, key, off, n)
	}
}

// Info is what a store says of an object.
type Info struct {
	Key      string
	Size     int64
	Modified time.Time // by the store's clock
}

// What callers branch on.
var (
	ErrNotFound = errors.New("the store has no such object")
	ErrExists   = errors.New("the store has other bytes under this key")
	ErrDigest   = errors.New("the bytes given do not have the digest given")
)

// MaxKey is the longest key, MaxPart the longest part of one, in bytes: what a file system takes for a name.
const (
	MaxKey  = 512
	MaxPart = 255
)

// ValidKey reports whether a key can be kept by every backend: lower-case letters, digits, "_", "-" and "." in parts divided by
// slashes, none of them empty or beginning with a dot.
//
// A key that is another's first parts ("a" beside "a/b") is one too many for stores that keep objects as files: they refuse the
// second of the two. No layout of ours has such keys.
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

// ValidPrefix reports whether keys can begin so.
func ValidPrefix(prefix string) bool {
	return prefix == "" || ValidKey(strings.TrimSuffix(prefix, "/"))
}

// CheckKey refuses what is no key. Backends call it before all else.
func CheckKey(key string) error {
	if !ValidKey(key) {
		return core.Errorf(core.Invalid, core.CodeInvalidName, "%q is not a key of the store", core.Clip(key))
	}
	return nil
}

// CheckPut refuses a Put that no store can do.
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

// CheckGet refuses a Get that no store can do.
func CheckGet(key string, off, n int64) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if off < 0 || n < 0 || off > math.MaxInt64-n {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "%d bytes from %d on of object %s cannot be read", n, off, key)
	}
	return nil
}

// CheckPrefix refuses a List that no store can do.
func CheckPrefix(prefix string) error {
	if !ValidPrefix(prefix) {
		return core.Errorf(core.Invalid, core.CodeInvalidName, "%q is not the beginning of a key of the store", core.Clip(prefix))
	}
	return nil
}

// WrongDigest is the error of a Put whose bytes have another digest than was said: who made them has lost them since.
func WrongDigest(key string, got, want core.Digest) error {
	return core.Wrapf(ErrDigest, core.DataLoss, core.CodeCheckpointCorrupt,
		"the bytes for object %s have the digest %s instead of %s: they changed on this host before they were stored", key, got.Short(), want.Short())
}

// NotFound is ErrNotFound that names the key.
func NotFound(key string) error { return fmt.Errorf("object %s: %w", key, ErrNotFound) }

// Exists is ErrExists that names the key.
func Exists(key string) error { return fmt.Errorf("object %s: %w", key, ErrExists) }
