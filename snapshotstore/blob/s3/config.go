package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// The defaults for zero values of a Config.
const (
	DefaultRegion   = "us-east-1"
	DefaultAttempts = 5
	DefaultBackoff  = 200 * time.Millisecond
	DefaultStall    = 30 * time.Second
	DefaultMinRate  = 64 << 10
)

const (
	maxBackoff  = 5 * time.Second
	dialTimeout = 10 * time.Second
	idleTimeout = time.Minute
	idleConns   = 32
)

// Config says where a store is, and how long to wait for it.
type Config struct {
	// Endpoint is the server's URL: https://host[:port], or http://…, which should be used only on loopback.
	Endpoint string
	Region   string // for the signatures
	Bucket   string
	// Prefix begins the keys of all objects, followed by a slash; empty means the whole bucket.
	Prefix string
	// PathStyle puts the bucket into the path, as most servers need it, instead of into the host's name, as AWS does.
	PathStyle bool
	// CAFile has additional roots for the server's certificate, in PEM.
	CAFile      string
	Credentials Credentials

	// Attempts is the maximum number of attempts for a request.
	Attempts int
	// Backoff is the pause after the first attempt; it doubles each time.
	Backoff time.Duration
	// Stall is the maximum time that an attempt may make no progress: no byte of a body and no answer.
	Stall time.Duration
	// MinRate, in bytes per second, bounds the total time of a body, together with Stall.
	MinRate int64
}

// Credentials sign the requests. They are never printed.
type Credentials struct {
	AccessKey, SecretKey string
	SessionToken         string // for temporary credentials
	// Expires is the time when temporary credentials expire, if it is known. They are renewed before.
	Expires time.Time
	// Renew returns credentials that are valid now. It is called when Expires is near, and once when the store refuses
	// the current ones. Nil: there are no others.
	Renew func(context.Context) (Credentials, error)
}

// String hides the secrets.
func (c Credentials) String() string {
	if c.AccessKey == "" {
		return "none"
	}
	return "key " + core.Clip(c.AccessKey)
}

// GoString hides the secrets.
func (c Credentials) GoString() string { return c.String() }

// LogValue implements slog.LogValuer.
func (c Credentials) LogValue() slog.Value { return slog.StringValue(c.String()) }

// MarshalText hides the secrets from encoders.
func (c Credentials) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// String names the store, without secrets.
func (c Config) String() string {
	where := c.Bucket
	if c.Prefix != "" {
		where += "/" + c.Prefix
	}
	return fmt.Sprintf("bucket %s at %s", where, c.Endpoint)
}

// GoString hides the secrets.
func (c Config) GoString() string { return c.String() }

// LogValue implements slog.LogValuer.
func (c Config) LogValue() slog.Value {
	return slog.GroupValue(slog.String("endpoint", c.Endpoint), slog.String("region", c.Region), slog.String("bucket", c.Bucket),
		slog.String("prefix", c.Prefix), slog.Any("credentials", c.Credentials))
}

func (c Config) withDefaults() Config {
	if c.Region == "" {
		c.Region = DefaultRegion
	}
	if c.Attempts == 0 {
		c.Attempts = DefaultAttempts
	}
	if c.Backoff == 0 {
		c.Backoff = DefaultBackoff
	}
	if c.Stall == 0 {
		c.Stall = DefaultStall
	}
	if c.MinRate == 0 {
		c.MinRate = DefaultMinRate
	}
	return c
}

// Check reports errors of a configuration. It opens nothing.
func (c Config) Check() error {
	_, err := c.withDefaults().check()
	return err
}

func (c Config) check() (*url.URL, error) {
	refuse := func(format string, a ...any) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, format, a...)
	}
	var errs []error
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil ||
		u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
		errs = append(errs, refuse("the store's endpoint must be https://host[:port], with nothing after it and without credentials"))
	}
	if !validBucket(c.Bucket) {
		errs = append(errs, refuse("%q is not a valid name of a bucket: use 3 to 63 lower-case letters, digits, dots and hyphens", core.Clip(c.Bucket)))
	}
	if c.Prefix != "" && !blob.ValidKey(c.Prefix) {
		errs = append(errs, refuse("%q cannot be the prefix of a store: use parts of lower-case letters, digits, \"_\", \"-\" and \".\", separated by slashes",
			core.Clip(c.Prefix)))
	}
	if c.Attempts < 1 || c.Backoff < 0 || c.Stall < 0 || c.MinRate < 1 {
		errs = append(errs, refuse("the store's attempts, pauses and rates must be positive"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return u, nil
}

func validBucket(s string) bool {
	if len(s) < 3 || len(s) > 63 || strings.Contains(s, "..") || net.ParseIP(s) != nil {
		return false
	}
	for i, c := range []byte(s) {
		alnum := c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		if !alnum && (c != '-' && c != '.' || i == 0 || i == len(s)-1) {
			return false
		}
	}
	return true
}

// transport is minio-go's transport, but it does not read the environment and has no deadlines for answers: each
// attempt has its own.
func (c Config) transport(secure bool) (*http.Transport, error) {
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: dialTimeout, KeepAlive: dialTimeout}).DialContext,
		TLSHandshakeTimeout:   dialTimeout,
		ExpectContinueTimeout: time.Second,
		IdleConnTimeout:       idleTimeout,
		MaxIdleConns:          idleConns,
		MaxIdleConnsPerHost:   idleConns,
		DisableCompression:    true, // the stored bytes themselves are wanted
	}
	if !secure {
		return t, nil
	}
	t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CAFile == "" {
		return t, nil
	}
	pem, err := os.ReadFile(c.CAFile)
	if err != nil {
		return nil, core.Wrapf(err, core.Invalid, core.CodeInvalidField, "the store's CA file %s cannot be read", core.Clip(c.CAFile))
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "the store's CA file %s contains no certificate in PEM", core.Clip(c.CAFile))
	}
	t.TLSClientConfig.RootCAs = roots
	return t, nil
}

// Store is a bucket, or the part of a bucket below a prefix.
type Store struct {
	cfg       Config
	client    *minio.Core
	creds     *credentials.Credentials
	transport *http.Transport
}

// New makes a store. It sends nothing.
func New(cfg Config) (*Store, error) {
	cfg = cfg.withDefaults()
	u, err := cfg.check()
	if err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg}
	if s.transport, err = cfg.transport(u.Scheme == "https"); err != nil {
		return nil, err
	}
	s.creds = credentials.New(&provider{current: cfg.Credentials})
	lookup := minio.BucketLookupDNS
	if cfg.PathStyle {
		lookup = minio.BucketLookupPath
	}
	s.client, err = minio.NewCore(u.Host, &minio.Options{
		Creds: s.creds, Secure: u.Scheme == "https", Transport: s.transport, Region: cfg.Region, BucketLookup: lookup,
		MaxRetries: 1, // retry makes the attempts
	})
	if err != nil {
		return nil, core.Wrapf(err, core.Invalid, core.CodeInvalidField, "the store cannot be %s: %v", cfg, err)
	}
	return s, nil
}

// Close closes idle connections.
func (s *Store) Close() error {
	s.transport.CloseIdleConnections()
	return nil
}

// provider gives our credentials to minio-go, which holds a lock when it calls.
type provider struct {
	current Credentials
	given   bool // minio-go has the current ones; it asks again only if they are not accepted
}

// RetrieveWithCredContext is called at first, after IsExpired returned true, and after Expire.
func (p *provider) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	if renew := p.current.Renew; renew != nil && (p.given || p.current.AccessKey == "" || p.IsExpired()) {
		ctx := context.Background()
		if cc != nil && cc.Context != nil {
			ctx = cc.Context
		}
		c, err := renew(ctx)
		if err != nil {
			return credentials.Value{}, &renewalError{err}
		}
		c.Renew = renew
		p.current = c
	}
	p.given = true
	c := p.current
	kind := credentials.SignatureV4
	if c.AccessKey == "" {
		kind = credentials.SignatureAnonymous
	}
	return credentials.Value{
		AccessKeyID: c.AccessKey, SecretAccessKey: c.SecretKey, SessionToken: c.SessionToken, Expiration: c.Expires, SignerType: kind,
	}, nil
}

// Retrieve is the old form of RetrieveWithCredContext.
func (p *provider) Retrieve() (credentials.Value, error) { return p.RetrieveWithCredContext(nil) }

// IsExpired reports whether to ask for new credentials. It does so a little before they expire.
func (p *provider) IsExpired() bool {
	const early = 30 * time.Second
	return p.current.Renew != nil && !p.current.Expires.IsZero() && time.Until(p.current.Expires) < early
}

// renewalError is a failure of the source of credentials.
type renewalError struct{ err error }

// Error implements error.
func (e *renewalError) Error() string { return "renew the credentials: " + e.err.Error() }

// Unwrap returns the cause.
func (e *renewalError) Unwrap() error { return e.err }
