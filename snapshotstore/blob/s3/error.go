package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// The errors that this package checks for, in addition to blob.ErrNotFound.
var (
	errPrecondition = errors.New("there is an object under this key")
	errRange        = errors.New("the object ends before this range")
	errNoUpload     = errors.New("there is no such upload")
	errConflict     = errors.New("another request for this key is under way")
	errStalled      = errors.New("no progress was made in time")
	errSlow         = errors.New("it took too long in total")
)

// answerError is an answer that an S3 server should never give.
type answerError struct{ text string }

// Error implements error.
func (e *answerError) Error() string { return e.text }

// remedy says what may help against an error.
type remedy int

const (
	final  remedy = iota
	again         // the same request may succeed
	renew         // other credentials may help
	denied        // other credentials may help, or the same ones after a moment
)

// deniedAttempts bounds the attempts of a denied request, without the extra one after a renewal of the credentials.
// MinIO denies a write into a directory that a delete removes at the same moment, and a new permission needs a moment
// before it is valid everywhere.
const deniedAttempts = 3

// mapError is the only place that maps errors of the library and the network to ours. Without a key, no object can be
// missing.
func (s *Store) mapError(doing, key string, err error) (remedy, error) {
	var (
		known    *core.Error
		response minio.ErrorResponse
		renewal  *renewalError
	)
	switch {
	case err == nil:
		return final, nil
	case errors.As(err, &known), errors.Is(err, blob.ErrExists), errors.Is(err, blob.ErrNotFound), errors.Is(err, errPrecondition),
		errors.Is(err, errConflict), errors.Is(err, errNoUpload), errors.Is(err, errRange):
		return final, err
	case errors.As(err, &renewal):
		return final, core.Wrapf(err, core.Unavailable, core.CodeStoreAuth,
			"%s: the source of the credentials for %s failed", doing, s.cfg)
	case errors.As(err, &response):
		return s.mapResponse(doing, key, response)
	}
	var what string
	r := again
	var (
		authority x509.UnknownAuthorityError
		host      x509.HostnameError
		invalid   x509.CertificateInvalidError
		record    tls.RecordHeaderError
		answer    *answerError
	)
	switch {
	case errors.Is(err, errStalled), errors.Is(err, errSlow):
		what = "it is too slow"
	case errors.As(err, &authority), errors.As(err, &host), errors.As(err, &invalid):
		what, r = "its certificate is not trusted; put the certificate of its authority into the store's CA file", final
	case errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		what, r = "it does not speak TLS", final
	case errors.As(err, &answer):
		what = "it " + answer.text
	case errors.Is(err, io.ErrUnexpectedEOF):
		what = "its answer ended too early"
	default:
		what = "it cannot be reached"
	}
	return r, core.Wrapf(err, core.Unavailable, core.CodeStoreUnavailable, "%s: the store, %s, cannot be used: %s", doing, s.cfg, what)
}

// mapResponse maps an error response of the server.
func (s *Store) mapResponse(doing, key string, e minio.ErrorResponse) (remedy, error) {
	unavailable := func(r remedy, what string) (remedy, error) {
		return r, core.Wrapf(e, core.Unavailable, core.CodeStoreUnavailable, "%s: the store, %s, cannot be used: %s", doing, s.cfg, what)
	}
	said := fmt.Sprintf("it answered %s (%d)", core.Clip(e.Code), e.StatusCode)
	switch e.Code {
	case "NoSuchKey":
		if key == "" {
			return unavailable(final, said)
		}
		return final, blob.NotFound(key)
	case "NoSuchUpload":
		return final, errNoUpload
	case "NoSuchBucket":
		return unavailable(final, "there is no such bucket; create it")
	case "PreconditionFailed":
		return final, errPrecondition
	case "ConditionalRequestConflict", "OperationAborted":
		return final, errConflict
	case "InvalidRange":
		return final, errRange
	case "AccessDenied":
		return denied, core.Wrapf(e, core.Unavailable, core.CodeStoreAuth, "%s: the store, %s, refuses the credentials: %s; correct them", doing, s.cfg, said)
	case "ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch",
		"AuthorizationHeaderMalformed", "XAdminUserNotFound": // versitygw's answer to an unknown key, a 404
		return renew, core.Wrapf(e, core.Unavailable, core.CodeStoreAuth, "%s: the store, %s, refuses the credentials: %s; correct them", doing, s.cfg, said)
	case "RequestTimeTooSkewed":
		return unavailable(final, "its clock and this host's clock differ too much; correct them")
	case "RequestTimeout", "SlowDown", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody",
		"InternalError", "ServiceUnavailable": // even with status 200, at the end of an upload
		return unavailable(again, said)
	}
	switch {
	case strings.HasPrefix(e.Code, "400 "): // the answer to a HEAD, which has no body: AWS refuses expired tokens in this way
		fallthrough
	case e.StatusCode == http.StatusUnauthorized || e.StatusCode == http.StatusForbidden:
		return renew, core.Wrapf(e, core.Unavailable, core.CodeStoreAuth, "%s: the store, %s, refuses the credentials: %s; correct them", doing, s.cfg, said)
	case e.StatusCode == http.StatusPreconditionFailed:
		return final, errPrecondition
	case e.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return final, errRange
	case e.StatusCode == http.StatusConflict:
		return final, errConflict
	case e.StatusCode == http.StatusTooManyRequests || e.StatusCode == http.StatusRequestTimeout,
		e.StatusCode >= http.StatusInternalServerError && e.StatusCode != http.StatusNotImplemented && e.StatusCode != http.StatusInsufficientStorage:
		return unavailable(again, said)
	default:
		return unavailable(final, said)
	}
}

// task is an operation for retry, with the words for its errors.
type task struct {
	doing string
	key   string // key of the object that may be missing
	bytes int64  // length of the request's body
	// slow is the factor by which the server may be silent longer than usual.
	slow int64
	// try makes one attempt. It calls progress whenever the server has taken some bytes.
	try func(ctx context.Context, progress func()) error
}

// retry makes attempts until one succeeds or fails permanently.
func (s *Store) retry(ctx context.Context, t task) error {
	renewed := s.cfg.Credentials.Renew == nil
	for n := 1; ; n++ {
		err := s.attempt(ctx, t)
		if ctx.Err() != nil && err != nil {
			return fmt.Errorf("%s: %w", t.doing, context.Cause(ctx))
		}
		r, mapped := s.mapError(t.doing, t.key, err)
		switch {
		case mapped == nil:
			return nil
		case (r == renew || r == denied) && !renewed:
			renewed = true
			s.creds.Expire()
			n--
			continue
		case r == denied && n < min(deniedAttempts, s.cfg.Attempts):
		case r != again || n >= s.cfg.Attempts:
			return mapped
		}
		if err := s.pause(ctx, n); err != nil {
			return fmt.Errorf("%s: %w", t.doing, err)
		}
	}
}

// attempt makes one attempt with a watch.
func (s *Store) attempt(ctx context.Context, t task) error {
	w := s.watch(ctx, s.cfg.Stall*time.Duration(max(1, t.slow)), t.bytes)
	defer w.stop()
	w.wait()
	err := t.try(w.ctx, w.wait)
	if err != nil {
		err = w.explain(err)
	}
	return err
}

// pause waits after attempt n.
func (s *Store) pause(ctx context.Context, n int) error {
	d := min(s.cfg.Backoff<<min(n-1, 16), maxBackoff)
	d = d/2 + rand.N(d/2+1) //nolint:gosec // G404: only to spread requests
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// watch ends an attempt that makes no progress, or takes too long in total. The time between a pause and the next wait
// belongs to the caller and does not count.
type watch struct {
	ctx    context.Context // context of the attempt; ends with it
	cancel context.CancelCauseFunc
	stall  time.Duration

	mu      sync.Mutex // a request's body may still be read after the attempt
	timer   *time.Timer
	left    time.Duration // left in total
	began   time.Time
	stopped bool
}

func (s *Store) watch(ctx context.Context, stall time.Duration, bytes int64) *watch {
	w := &watch{stall: stall, left: 2*stall + time.Duration(float64(bytes)/float64(s.cfg.MinRate)*float64(time.Second))}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	return w
}

// wait begins a wait for the server, and ends the one before.
func (w *watch) wait() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.end()
	if w.stopped {
		return
	}
	d, cause := w.stall, errStalled
	if w.left < d {
		d, cause = w.left, errSlow
	}
	w.began = time.Now()
	w.timer = time.AfterFunc(max(d, time.Millisecond), func() { w.cancel(cause) })
}

// pause ends the current wait.
func (w *watch) pause() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.end()
}

func (w *watch) end() {
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
		w.left -= time.Since(w.began)
	}
}

// stop ends the attempt.
func (w *watch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.end()
	w.stopped = true
	w.cancel(nil)
}

// explain returns the real reason why an attempt failed.
func (w *watch) explain(err error) error {
	if cause := context.Cause(w.ctx); errors.Is(cause, errStalled) || errors.Is(cause, errSlow) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}
