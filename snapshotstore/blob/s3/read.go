package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/minio/minio-go/v7"

	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// enough is the number of bytes after which an attempt does not count as failed, so that a long read may be interrupted
// often.
const enough = 1 << 20

// Get implements blob.Blobs.
func (s *Store) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := blob.CheckGet(key, off, n); err != nil {
		return nil, err
	}
	r := &reader{ctx: ctx, store: s, key: key, off: off, left: n, renewed: s.cfg.Credentials.Renew == nil}
	var err error
	if n == 0 { // S3 has no request for an empty range
		_, err = s.stat(ctx, key)
	} else {
		err = r.open()
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

// reader is the body of a Get. It uses as many answers as necessary.
type reader struct {
	ctx   context.Context // the context of the Get, also for reads of its body
	store *Store
	key   string
	off   int64
	left  int64
	total int64 // size of the object, from the first answer

	body    io.ReadCloser // of the current answer; nil between two answers
	watch   *watch
	brought int64 // bytes that this answer has brought
	fails   int
	renewed bool
	err     error // permanent
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	for r.left > 0 && len(p) > 0 {
		if r.err == nil && r.ctx.Err() != nil { // even if more bytes have arrived
			r.err = r.failed(r.ctx.Err())
		}
		if r.err != nil {
			return 0, r.err
		}
		if r.body == nil {
			if err := r.open(); err != nil {
				return 0, err
			}
			continue // perhaps nothing is left
		}
		r.watch.wait()
		n, err := r.body.Read(p[:min(int64(len(p)), r.left)])
		r.watch.pause()
		r.off += int64(n)
		r.left -= int64(n)
		r.brought += int64(n)
		if err != nil && r.left > 0 {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			r.err = r.failed(r.watch.explain(err))
		}
		if n > 0 {
			return n, nil
		}
	}
	if len(p) == 0 {
		return 0, nil
	}
	return 0, io.EOF
}

// Close implements io.Closer.
func (r *reader) Close() error {
	r.left = 0
	r.drop()
	return nil
}

// open requests the rest, until there is an answer.
func (r *reader) open() error {
	for {
		err := r.ask()
		if err == nil {
			return nil
		}
		if err = r.failed(err); err != nil {
			r.err = err
			return err
		}
	}
}

// ask makes one request.
func (r *reader) ask() error {
	opts := minio.GetObjectOptions{}
	if err := opts.SetRange(r.off, r.off+r.left-1); err != nil {
		return err
	}
	w := r.store.watch(r.ctx, r.store.cfg.Stall, r.left)
	w.wait()
	body, _, header, err := r.store.client.GetObject(w.ctx, r.store.cfg.Bucket, r.store.name(r.key), opts)
	w.pause()
	if err != nil {
		err = w.explain(err)
		w.stop()
		switch _, mapped := r.store.mapError("", r.key, err); {
		case !errors.Is(mapped, errRange):
			return err
		case r.total != 0:
			return errChanged
		}
		r.left = 0 // the object ends before the range
		return nil
	}
	r.body, r.watch, r.brought = body, w, 0
	first, last, total, ok := parseContentRange(header.Get("Content-Range"))
	switch {
	case !ok || first != r.off || last != min(r.off+r.left, total)-1:
		err = &answerError{"answers with another range than the requested one"}
	case r.total != 0 && total != r.total:
		err = errChanged
	case header.Get("Content-Length") != "" && header.Get("Content-Length") != strconv.FormatInt(last-first+1, 10):
		err = io.ErrUnexpectedEOF
	default:
		r.total, r.left = total, last-first+1
	}
	return err
}

var errChanged = &answerError{"has changed an object while it was read"}

// failed handles the failure of an answer. It returns nil, after a pause, when another request should be made.
func (r *reader) failed(err error) error {
	doing := "read object " + r.key
	r.fails++
	if r.brought >= enough {
		r.fails = 0
	}
	r.brought = 0
	r.drop()
	if r.ctx.Err() != nil {
		return fmt.Errorf("%s: %w", doing, context.Cause(r.ctx))
	}
	what, err := r.store.mapError(doing, r.key, err)
	if (what == renew || what == denied) && !r.renewed {
		r.renewed = true
		r.store.creds.Expire()
		return nil
	}
	if what != again || r.fails >= r.store.cfg.Attempts {
		return err
	}
	if err := r.store.pause(r.ctx, max(1, r.fails)); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

// drop closes the answer. Its connection is used again only if the answer was read to its end.
func (r *reader) drop() {
	if r.body == nil {
		return
	}
	r.watch.stop()
	_ = r.body.Close()
	r.body = nil
}

// parseContentRange parses "bytes first-last/total".
func parseContentRange(s string) (first, last, total int64, ok bool) {
	s, ok = strings.CutPrefix(s, "bytes ")
	r, t, ok2 := strings.Cut(s, "/")
	f, l, ok3 := strings.Cut(r, "-")
	var errs [3]error
	first, errs[0] = strconv.ParseInt(f, 10, 64)
	last, errs[1] = strconv.ParseInt(l, 10, 64)
	total, errs[2] = strconv.ParseInt(t, 10, 64)
	ok = ok && ok2 && ok3 && errors.Join(errs[:]...) == nil && 0 <= first && first <= last && last < total
	return first, last, total, ok
}
