package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

const (
	// senders is the number of parts of an object that are sent at once, each from its own buffer.
	senders  = 2
	maxParts = 10_000
)

// upload stores an object in parts. The object appears when the last request succeeds. That request has the condition
// that the key does not exist.
func (s *Store) upload(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error {
	doing := "put object " + key
	var id string
	err := s.retry(ctx, task{doing: doing, try: func(ctx context.Context, _ func()) error {
		var err error
		id, err = s.client.NewMultipartUpload(ctx, s.cfg.Bucket, s.name(key), minio.PutObjectOptions{
			UserMetadata: map[string]string{"x-amz-checksum-algorithm": "SHA256"},
		})
		return err
	}})
	if err != nil {
		return err
	}
	parts, err := s.sendParts(ctx, key, id, body, size, digest)
	if err == nil {
		opts := minio.PutObjectOptions{}
		opts.SetMatchETagExcept("*")
		err = s.retry(ctx, task{doing: doing, slow: slowAnswer, try: func(ctx context.Context, _ func()) error {
			_, err := s.client.CompleteMultipartUpload(ctx, s.cfg.Bucket, s.name(key), id, parts, opts)
			return err
		}})
	}
	if err != nil {
		s.abort(ctx, key, id)
	}
	return err
}

// abort removes what was sent, as far as this is possible now. Sweep does the rest.
func (s *Store) abort(ctx context.Context, key, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
	defer cancel()
	_ = s.retry(ctx, task{doing: "put object " + key, try: func(ctx context.Context, _ func()) error {
		return s.client.AbortMultipartUpload(ctx, s.cfg.Bucket, s.name(key), id)
	}})
}

// sendParts sends the parts of an object and checks its digest.
func (s *Store) sendParts(ctx context.Context, key, id string, body io.ReaderAt, size int64, digest core.Digest) ([]minio.CompletePart, error) {
	each := int64(partSize)
	for size > each*maxParts {
		each *= 2
	}
	parts := make([]minio.CompletePart, (size+each-1)/each)
	buffers := make(chan []byte, senders)
	for range senders {
		buffers <- nil
	}
	whole := sha256.New()
	g, gctx := errgroup.WithContext(ctx)
	err := func() error {
		for i := range parts {
			var buf []byte
			select {
			case <-gctx.Done():
				return nil // the failed sender has the error
			case buf = <-buffers:
			}
			n := min(each, size-int64(i)*each)
			if buf == nil {
				buf = make([]byte, n) // only the last part may be smaller
			}
			data := buf[:n]
			if read, err := body.ReadAt(data, int64(i)*each); int64(read) < n {
				if err == nil || errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF
				}
				return bodyError(key, err)
			}
			_, _ = whole.Write(data) // never fails
			g.Go(func() error {
				defer func() { buffers <- buf }()
				var err error
				parts[i], err = s.sendPart(gctx, key, id, i+1, data)
				return err
			})
		}
		return nil
	}()
	if sent := g.Wait(); sent != nil {
		return nil, sent
	}
	if err == nil && ctx.Err() != nil {
		err = fmt.Errorf("put object %s: %w", key, context.Cause(ctx))
	}
	if got := core.Digest("sha256:" + hex.EncodeToString(whole.Sum(nil))); err == nil && got != digest {
		err = blob.WrongDigest(key, got, digest)
	}
	return parts, err
}

func (s *Store) sendPart(ctx context.Context, key, id string, number int, data []byte) (minio.CompletePart, error) {
	sum := sha256.Sum256(data)
	checksum := base64.StdEncoding.EncodeToString(sum[:])
	var part minio.ObjectPart
	t := task{doing: "put object " + key, bytes: int64(len(data))}
	t.try = func(ctx context.Context, progress func()) error {
		var err error
		part, err = s.client.PutObjectPart(ctx, s.cfg.Bucket, s.name(key), id, number,
			&sending{r: bytes.NewReader(data), progress: progress}, int64(len(data)), minio.PutObjectPartOptions{
				Sha256Hex: hex.EncodeToString(sum[:]), DisableContentSha256: true,
				CustomHeader: http.Header{http.CanonicalHeaderKey(checksumHeader): {checksum}},
			})
		return err
	}
	if err := s.retry(ctx, t); err != nil {
		return minio.CompletePart{}, err
	}
	return minio.CompletePart{PartNumber: number, ETag: part.ETag, ChecksumSHA256: checksum}, nil
}
