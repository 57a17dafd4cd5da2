package s3

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/coppice-dev/coppice/core"
)

func TestSecretsAreHidden(t *testing.T) {
	t.Parallel()
	const secret, token = "a-secret-that-is-mine", "a-token-that-is-mine"
	cfg := Config{
		Endpoint: "https://s3.example", Bucket: "checkpoints", Prefix: "a",
		Credentials: Credentials{AccessKey: "AKIA1", SecretKey: secret, SessionToken: token},
	}
	var log bytes.Buffer
	for _, h := range []slog.Handler{slog.NewJSONHandler(&log, nil), slog.NewTextHandler(&log, nil)} {
		slog.New(h).Info("opened", "config", cfg, "credentials", cfg.Credentials, "pointer", &cfg.Credentials)
	}
	encoded, err := json.Marshal(cfg.Credentials)
	if err != nil {
		t.Fatal(err)
	}
	text := log.String() + string(encoded)
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		text += fmt.Sprintf(format+format+format, cfg, cfg.Credentials, &cfg)
	}
	for _, hidden := range []string{secret, token} {
		if strings.Contains(text, hidden) {
			t.Errorf("%s is shown in %s", hidden, text)
		}
	}
	for _, shown := range []string{"checkpoints", "s3.example", "AKIA1"} {
		if !strings.Contains(text, shown) {
			t.Errorf("%s is not shown in %s", shown, text)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	notPEM := filepath.Join(t.TempDir(), "ca")
	if err := os.WriteFile(notPEM, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	good := Config{Endpoint: "https://s3.example:9000", Bucket: "my-bucket.1", Prefix: "a/b"}
	if _, err := New(good); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Config){
		"no endpoint":         func(c *Config) { c.Endpoint = "" },
		"no scheme":           func(c *Config) { c.Endpoint = "s3.example" },
		"another scheme":      func(c *Config) { c.Endpoint = "ftp://s3.example" },
		"a path":              func(c *Config) { c.Endpoint = "https://s3.example/x" },
		"a query":             func(c *Config) { c.Endpoint = "https://s3.example?x" },
		"credentials in it":   func(c *Config) { c.Endpoint = "https://a:b@s3.example" },
		"no bucket":           func(c *Config) { c.Bucket = "" },
		"a short bucket":      func(c *Config) { c.Bucket = "ab" },
		"an upper-case one":   func(c *Config) { c.Bucket = "Bucket" },
		"a path as one":       func(c *Config) { c.Bucket = "a/../b" },
		"an address as one":   func(c *Config) { c.Bucket = "192.168.0.1" },
		"dots":                func(c *Config) { c.Bucket = "a..b" },
		"a prefix with a /":   func(c *Config) { c.Prefix = "a/" },
		"a prefix that leads": func(c *Config) { c.Prefix = "../a" },
		"negative attempts":   func(c *Config) { c.Attempts = -1 },
		"a negative pause":    func(c *Config) { c.Backoff = -1 },
		"an absent CA file":   func(c *Config) { c.CAFile = filepath.Join(t.TempDir(), "absent") },
		"no PEM in it":        func(c *Config) { c.CAFile = notPEM },
	} {
		cfg := good
		change(&cfg)
		if _, err := New(cfg); core.CategoryOf(err) != core.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestParseContentRange(t *testing.T) {
	t.Parallel()
	if f, l, n, ok := parseContentRange("bytes 3-9/20"); f != 3 || l != 9 || n != 20 || !ok {
		t.Error(f, l, n, ok)
	}
	for _, s := range []string{"", "bytes", "bytes 3-9", "bytes 3-9/*", "bytes */20", "bytes 9-3/20", "bytes 3-20/20", "bytes -1-3/20", "items 3-9/20", "bytes a-b/c"} {
		if f, l, n, ok := parseContentRange(s); ok {
			t.Errorf("%q: %d, %d, %d", s, f, l, n)
		}
	}
}

// TestMapResponse maps answers that the servers of tests cannot be made to give.
func TestMapResponse(t *testing.T) {
	t.Parallel()
	s, err := New(Config{Endpoint: "https://s3.example", Bucket: "bucket"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		status int
		code   string
		want   core.Code
		remedy remedy
	}{
		{http.StatusForbidden, "RequestTimeTooSkewed", core.CodeStoreUnavailable, final},
		{http.StatusForbidden, "InvalidAccessKeyId", core.CodeStoreAuth, renew},
		{http.StatusForbidden, "AccessDenied", core.CodeStoreAuth, denied},
		{http.StatusForbidden, "WhoeverYouAre", core.CodeStoreAuth, renew},
		{http.StatusBadRequest, "ExpiredToken", core.CodeStoreAuth, renew},
		{http.StatusBadRequest, "400 Bad Request", core.CodeStoreAuth, renew},
		{http.StatusBadRequest, "InvalidArgument", core.CodeStoreUnavailable, final},
		{http.StatusBadRequest, "BadDigest", core.CodeStoreUnavailable, again},
		{http.StatusBadRequest, "RequestTimeout", core.CodeStoreUnavailable, again},
		{http.StatusTooManyRequests, "TooManyRequests", core.CodeStoreUnavailable, again},
		{http.StatusBadGateway, "502 Bad Gateway", core.CodeStoreUnavailable, again},
		{http.StatusInsufficientStorage, "XMinioStorageFull", core.CodeStoreUnavailable, final},
		{http.StatusMovedPermanently, "PermanentRedirect", core.CodeStoreUnavailable, final},
		{http.StatusNotFound, "NoSuchBucket", core.CodeStoreUnavailable, final},
	} {
		r, err := s.mapError("put object k", "k", minio.ErrorResponse{StatusCode: c.status, Code: c.code})
		if core.CodeOf(err) != c.want || r != c.remedy {
			t.Errorf("%d %s: got %v (%s), %d; want %s, %d", c.status, c.code, err, core.CodeOf(err), r, c.want, c.remedy)
		}
	}
}
