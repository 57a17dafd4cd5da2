// Package s3 keeps the objects of a store in a bucket of any server that speaks S3.
//
// An upload carries its SHA-256, which the server compares, and the condition that nothing is under
// its key yet. A request that fails for a temporary reason is repeated a few times, and so is a
// request that makes no progress. If a body stops in the middle, the rest is requested from there.
// An upload whose answer was lost finds its own object and succeeds.
package s3

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

const (
	// partSize is the size up to which an object is sent in one request, and the size of a larger object's parts.
	partSize = 16 << 20
	// page is the maximum number of objects in one list or delete request: S3's maximum.
	page = 1000
	// slowAnswer is the factor by which the end of an upload may take longer: a server may copy all its parts then.
	slowAnswer   = 5
	abortTimeout = 10 * time.Second
)

var _ blob.Blobs = (*Store)(nil)

// name returns an object's name in the bucket.
func (s *Store) name(key string) string {
	if s.cfg.Prefix == "" {
		return key
	}
	return s.cfg.Prefix + "/" + key
}

// Put implements blob.Blobs. An object of more than 16 MiB needs twice that much memory.
func (s *Store) Put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error {
	if err := blob.CheckPut(key, size, digest); err != nil {
		return err
	}
	for n := 1; ; n++ {
		err := s.put(ctx, key, body, size, digest)
		if errors.Is(err, errPrecondition) || errors.Is(err, errNoUpload) {
			// The object is another writer's, or our own, if its answer was lost.
			err = s.compare(ctx, key, size, digest)
		}
		// Another process has removed it meanwhile, or two writers collided and neither has won.
		if !errors.Is(err, errConflict) && !errors.Is(err, blob.ErrNotFound) {
			return err
		}
		if n >= s.cfg.Attempts {
			return core.Wrapf(err, core.Unavailable, core.CodeStoreUnavailable,
				"put object %s: the store, %s, has accepted neither this object nor another one", key, s.cfg)
		}
		if err := s.pause(ctx, n); err != nil {
			return fmt.Errorf("put object %s: %w", key, err)
		}
	}
}

// put stores an object. It returns errPrecondition, errNoUpload or errConflict if the key may exist already.
func (s *Store) put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error {
	if size > partSize {
		switch _, err := s.Stat(ctx, key); {
		case err == nil: // the upload would find it out only at its end
			return errPrecondition
		case !errors.Is(err, blob.ErrNotFound):
			return err
		}
		return s.upload(ctx, key, body, size, digest)
	}
	got, err := digestOf(ctx, key, io.NewSectionReader(body, 0, size), size)
	if err != nil {
		return err
	}
	if got != digest {
		return blob.WrongDigest(key, got, digest)
	}
	sum, err := hex.DecodeString(digest.Hex())
	if err != nil {
		return err
	}
	opts := minio.PutObjectOptions{
		UserMetadata:         map[string]string{checksumHeader: base64.StdEncoding.EncodeToString(sum)},
		DisableContentSha256: true, // the digest is given
	}
	opts.SetMatchETagExcept("*")
	return s.retry(ctx, task{doing: "put object " + key, bytes: size, try: func(ctx context.Context, progress func()) error {
		data := &sending{r: io.NewSectionReader(body, 0, size), progress: progress}
		_, err := s.client.PutObject(ctx, s.cfg.Bucket, s.name(key), data, size, "", digest.Hex(), opts)
		return data.explain(key, err)
	}})
}

const checksumHeader = "x-amz-checksum-sha256"

// sending is the body of a request. It reports progress, and remembers an error of the caller's bytes, to tell it from
// an error of the store.
type sending struct {
	r        io.Reader
	progress func()
	err      error
}

// Read implements io.Reader.
func (b *sending) Read(p []byte) (int, error) {
	b.progress()
	n, err := b.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.err = err
	}
	return n, err
}

func (b *sending) explain(key string, err error) error {
	if err != nil && b.err != nil {
		return bodyError(key, b.err)
	}
	return err
}

func bodyError(key string, err error) error {
	return core.Wrapf(err, core.Internal, core.CodeInternal, "the bytes for object %s cannot be read on this host", key)
}

// digestOf computes the digest of size bytes.
func digestOf(ctx context.Context, key string, r io.Reader, size int64) (core.Digest, error) {
	sum := sha256.New()
	buf := make([]byte, min(size, 1<<20))
	for left := size; left > 0; {
		if ctx.Err() != nil {
			return "", fmt.Errorf("put object %s: %w", key, context.Cause(ctx))
		}
		part := buf[:min(left, int64(len(buf)))]
		if _, err := io.ReadFull(r, part); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return "", bodyError(key, err)
		}
		_, _ = sum.Write(part) // never fails
		left -= int64(len(part))
	}
	return core.Digest("sha256:" + hex.EncodeToString(sum.Sum(nil))), nil
}

// compare returns nil if an object has exactly these bytes, otherwise blob.ErrExists or blob.ErrNotFound. If the server
// has a checksum of the whole object, which it compared when it stored the object, this checksum decides; otherwise the
// object is read.
func (s *Store) compare(ctx context.Context, key string, size int64, digest core.Digest) error {
	info, err := s.stat(ctx, key)
	if err != nil {
		return err
	}
	if info.Size != size {
		return blob.Exists(key)
	}
	var got core.Digest
	// The checksum of an object in parts is the checksum of their checksums.
	if sum, err := base64.StdEncoding.DecodeString(info.ChecksumSHA256); err == nil && len(sum) == sha256.Size && info.ChecksumMode != "COMPOSITE" {
		got = core.Digest("sha256:" + hex.EncodeToString(sum))
	} else {
		body, err := s.Get(ctx, key, 0, size)
		if err != nil {
			return err
		}
		got, _, err = core.DigestReader(body)
		if err = errors.Join(err, body.Close()); err != nil {
			return err
		}
	}
	if got != digest {
		return blob.Exists(key)
	}
	return nil
}

// Stat implements blob.Blobs. If the bucket is gone, it reports a missing object, because an answer to HEAD has no
// body.
func (s *Store) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	info, err := s.stat(ctx, key)
	if err != nil {
		return blob.Info{}, err
	}
	return blob.Info{Key: key, Size: info.Size, Modified: info.LastModified}, nil
}

func (s *Store) stat(ctx context.Context, key string) (minio.ObjectInfo, error) {
	var info minio.ObjectInfo
	err := s.retry(ctx, task{doing: "stat object " + key, key: key, try: func(ctx context.Context, _ func()) error {
		var err error
		info, err = s.client.StatObject(ctx, s.cfg.Bucket, s.name(key), minio.StatObjectOptions{Checksum: true})
		return err
	}})
	return info, err
}

// List implements blob.Blobs. It keeps one page in memory.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		if err := blob.CheckPrefix(prefix); err != nil {
			yield(blob.Info{}, err)
			return
		}
		for after := ""; ; {
			objects, err := s.list(ctx, s.name(prefix), after)
			for _, o := range objects {
				key := o.Key[len(s.name("")):]
				if blob.ValidKey(key) && !yield(blob.Info{Key: key, Size: o.Size, Modified: o.LastModified}, nil) {
					return
				}
			}
			if err != nil {
				yield(blob.Info{}, err)
			}
			if err != nil || len(objects) < page {
				return
			}
			after = objects[len(objects)-1].Key
		}
	}
}

// list returns the next page of objects, after the given key.
func (s *Store) list(ctx context.Context, prefix, after string) (objects []minio.ObjectInfo, err error) {
	owner := false
	err = s.retry(ctx, task{doing: "list the store", try: func(ctx context.Context, progress func()) error {
		objects = nil
		last := after
		for o := range s.client.ListObjectsIter(ctx, s.cfg.Bucket, minio.ListObjectsOptions{
			Prefix: prefix, Recursive: true, StartAfter: after, MaxKeys: page, FetchOwner: &owner,
		}) {
			progress()
			switch {
			case o.Err != nil:
				return o.Err
			case !strings.HasPrefix(o.Key, prefix) || o.Key <= last:
				return &answerError{"lists its objects out of order"}
			}
			last = o.Key
			if objects = append(objects, o); len(objects) == page {
				break
			}
		}
		return ctx.Err() // the library ends a cancelled list without an error
	}})
	if err != nil {
		return nil, err
	}
	return objects, nil
}

// Delete implements blob.Blobs.
func (s *Store) Delete(ctx context.Context, keys ...string) error {
	for _, key := range keys {
		if err := blob.CheckKey(key); err != nil {
			return err
		}
	}
	for len(keys) > 0 {
		batch := keys[:min(page, len(keys))]
		keys = keys[len(batch):]
		err := s.retry(ctx, task{doing: fmt.Sprintf("delete %d objects", len(batch)), try: func(ctx context.Context, _ func()) error {
			return s.remove(ctx, batch)
		}})
		if err != nil {
			return err
		}
	}
	return nil
}

// remove deletes objects with one request.
func (s *Store) remove(ctx context.Context, keys []string) error {
	objects := make(chan minio.ObjectInfo, len(keys))
	for _, key := range keys {
		objects <- minio.ObjectInfo{Key: s.name(key)}
	}
	close(objects)
	var failed error
	done := 0
	for r := range s.client.RemoveObjectsWithResult(ctx, s.cfg.Bucket, objects, minio.RemoveObjectsOptions{}) {
		if r.Err != nil && minio.ToErrorResponse(r.Err).Code != "NoSuchKey" {
			failed = r.Err
		}
		done++
	}
	if failed == nil && done == 0 {
		failed = &answerError{"does not say what it deleted"}
	}
	return failed
}

// Sweep implements blob.Blobs. It aborts multipart uploads that began before the given time, by the store's clock.
func (s *Store) Sweep(ctx context.Context, before time.Time) error {
	const doing = "sweep the store"
	for key, upload := "", ""; ; {
		var found minio.ListMultipartUploadsResult
		// All uploads of the bucket are listed: for a prefix, MinIO lists only those of exactly that key.
		err := s.retry(ctx, task{doing: doing, try: func(ctx context.Context, _ func()) error {
			var err error
			found, err = s.client.ListMultipartUploads(ctx, s.cfg.Bucket, "", key, upload, "", page)
			return err
		}})
		if err != nil {
			return err
		}
		for _, u := range found.Uploads {
			if !strings.HasPrefix(u.Key, s.name("")) || !u.Initiated.Before(before) {
				continue
			}
			err := s.retry(ctx, task{doing: doing, try: func(ctx context.Context, _ func()) error {
				return s.client.AbortMultipartUpload(ctx, s.cfg.Bucket, u.Key, u.UploadID)
			}})
			if err != nil && !errors.Is(err, errNoUpload) {
				return err
			}
		}
		if !found.IsTruncated || found.NextKeyMarker == key && found.NextUploadIDMarker == upload {
			return nil
		}
		key, upload = found.NextKeyMarker, found.NextUploadIDMarker
	}
}
