package bloburl_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/bloburl"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
)

func TestMain(m *testing.M) { testleak.Main(m) }

func TestParse(t *testing.T) {
	t.Parallel()
	const endpoint = "https://minio.example:9000"
	for raw, want := range map[string]bloburl.Location{
		"dir:/var/lib/store":   {Dir: "/var/lib/store"},
		"dir:///var//lib/../x": {Dir: "/var/x"},
		"dir:/a%20b":           {Dir: "/a b"},
		"s3://bucket?region=eu-central-1": {S3: &s3.Config{
			Bucket: "bucket", Region: "eu-central-1", Endpoint: "https://s3.eu-central-1.amazonaws.com",
		}},
		"s3://bucket/?region=eu-central-1&path_style=1": {S3: &s3.Config{
			Bucket: "bucket", Region: "eu-central-1", Endpoint: "https://s3.eu-central-1.amazonaws.com", PathStyle: true,
		}},
		"s3://bucket/a/b/?endpoint=" + endpoint + "/":              {S3: &s3.Config{Bucket: "bucket", Prefix: "a/b", Endpoint: endpoint, PathStyle: true}},
		"s3://bucket?endpoint=" + endpoint + "&path_style=0&ca=/x": {S3: &s3.Config{Bucket: "bucket", Endpoint: endpoint, CAFile: "/x"}},
		"s3://bucket?endpoint=http://127.0.0.1:9000":               {S3: &s3.Config{Bucket: "bucket", Endpoint: "http://127.0.0.1:9000", PathStyle: true}},
		"s3://bucket?endpoint=http://[::1]:9000":                   {S3: &s3.Config{Bucket: "bucket", Endpoint: "http://[::1]:9000", PathStyle: true}},
		"s3://bucket?endpoint=http://localhost":                    {S3: &s3.Config{Bucket: "bucket", Endpoint: "http://localhost", PathStyle: true}},
		"s3://bucket?endpoint=http://minio:9000&insecure=1":        {S3: &s3.Config{Bucket: "bucket", Endpoint: "http://minio:9000", PathStyle: true}},
	} {
		got, err := bloburl.Parse(raw)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", raw, err, diff)
		}
	}
	for raw, word := range map[string]string{
		"":                                       "dir:/absolute/path or",
		"/var/lib/store":                         "dir:/absolute/path or",
		"gs://bucket":                            "kind",
		"s3:bucket":                              "s3://bucket/prefix",
		"dir:relative":                           "absolute",
		"dir:/":                                  "absolute",
		"dir://host/path":                        "only a directory",
		"dir:/path?x=1":                          "only a directory",
		"s3://bucket":                            "neither",
		"s3://b?region=x":                        "name of a bucket",
		"s3://Bucket?region=x":                   "name of a bucket",
		"s3://bucket:80?region=x":                "name of a bucket",
		"s3://bucket/../a?region=x":              "s3://bucket/prefix",
		"s3://bucket//a?region=x":                "s3://bucket/prefix",
		"s3://bucket/A?region=x":                 "prefix",
		"s3://key:sesame@bucket":                 "credentials",
		"s3://bucket?region=x#y":                 "fragment",
		"s3://bucket?region=x.evil/":             "region",
		"s3://bucket?regoin=x":                   "option",
		"s3://bucket?region=x&region=y":          "once",
		"s3://bucket?region=":                    "once",
		"s3://bucket?region=x&insecure=yes":      "0 or 1",
		"s3://bucket?endpoint=http://minio:9000": "insecure=1",
		"s3://bucket?endpoint=http://127.0.0.1.example":           "insecure=1",
		"s3://bucket?endpoint=http://minio:9000&insecure=0":       "insecure=1",
		"s3://bucket?endpoint=minio:9000":                         "https://host",
		"s3://bucket?endpoint=https://key:sesame@minio":           "credentials",
		"s3://bucket?endpoint=https://minio&ca=relative":          "absolute",
		"s3://bucket?endpoint=https://minio&region=x&path_style=": "once",
	} {
		_, err := bloburl.Parse(raw)
		if core.CategoryOf(err) != core.Invalid || !strings.Contains(core.MessageOf(err), word) || strings.Contains(err.Error(), "sesame") {
			t.Errorf("%s: got %v, want a refusal that says %q and no secret", raw, err, word)
		}
	}
}

func TestOpenDir(t *testing.T) {
	t.Parallel()
	s, err := bloburl.Open(t.Context(), "dir:"+filepath.Join(t.TempDir(), "store"), s3.Credentials{})
	if err != nil {
		t.Fatal(err)
	}
	isUsable(t, s)
	if _, err := bloburl.Open(t.Context(), "dir:"+filepath.Join(t.TempDir(), "absent", "store"), s3.Credentials{}); core.CodeOf(err) != core.CodeStoreUnavailable {
		t.Error(err)
	}
}

// isUsable checks that a probe left nothing behind.
func isUsable(t *testing.T, s bloburl.Store) {
	t.Helper()
	for info, err := range s.List(t.Context(), "") {
		t.Errorf("%+v, %v is there", info, err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestOpenS3(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	bucket := server.Bucket(t)
	good := s3.Credentials{AccessKey: server.AccessKey, SecretKey: server.SecretKey}
	s, err := bloburl.Open(t.Context(), server.URL(bucket), good)
	if err != nil {
		t.Fatal(err)
	}
	isUsable(t, s)
	for name, c := range map[string]struct {
		url         string
		credentials s3.Credentials
		want        core.Code
		word        string
	}{
		"a wrong secret":  {server.URL(bucket), s3.Credentials{AccessKey: server.AccessKey, SecretKey: "wrong-secret"}, core.CodeStoreAuth, "refuses the credentials"},
		"an unknown key":  {server.URL(bucket), s3.Credentials{AccessKey: "nobody", SecretKey: server.SecretKey}, core.CodeStoreAuth, "refuses the credentials"},
		"no credentials":  {server.URL(bucket), s3.Credentials{}, core.CodeStoreAuth, "refuses the credentials"},
		"no such bucket":  {server.URL("absent-bucket"), good, core.CodeStoreUnavailable, "no such bucket"},
		"not over TLS":    {strings.Replace(server.URL(bucket), "http:", "https:", 1), good, core.CodeStoreUnavailable, "TLS"},
		"nobody listens":  {"s3://bucket?endpoint=http://" + tests3.NoAddress(t), good, core.CodeStoreUnavailable, "cannot be reached"},
		"no URL of ours":  {"gs://bucket", good, core.CodeInvalidField, "kind"},
		"a broken source": {server.URL(bucket), s3.Credentials{Renew: broken}, core.CodeStoreAuth, "source"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := bloburl.Open(t.Context(), c.url, c.credentials)
			if core.CodeOf(err) != c.want || !strings.Contains(core.MessageOf(err), c.word) {
				t.Errorf("got %v (%s), want %s, %q", err, core.CodeOf(err), c.want, c.word)
			}
			for _, secret := range []string{server.SecretKey, "wrong-secret"} {
				if err != nil && strings.Contains(err.Error(), secret) {
					t.Errorf("the error shows a secret: %v", err)
				}
			}
		})
	}
}

func broken(context.Context) (s3.Credentials, error) {
	return s3.Credentials{}, errors.New("the metadata service is unreachable")
}

// TestStoreThatOverwrites probes a store that ignores the condition of a request.
func TestStoreThatOverwrites(t *testing.T) {
	t.Parallel()
	if err := blob.Probe(t.Context(), careless{}); core.CodeOf(err) != core.CodeUnsupported || !strings.Contains(core.MessageOf(err), "If-None-Match") {
		t.Errorf("got %v, want that it overwrites", err)
	}
}

// careless is a store that accepts every Put.
type careless struct{ blob.Blobs }

func (careless) Put(context.Context, string, io.ReaderAt, int64, core.Digest) error { return nil }
func (careless) Delete(context.Context, ...string) error                            { return nil }

// TestNotS3 opens a server that speaks only HTTP.
func TestNotS3(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]core.Code{
		http.StatusOK: core.CodeUnsupported, http.StatusNotFound: core.CodeStoreUnavailable, http.StatusTeapot: core.CodeStoreUnavailable,
		http.StatusForbidden: core.CodeStoreAuth,
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.WriteHeader(status)
			_, _ = w.Write(bytes.Repeat([]byte("<html>hello</html>"), 10))
		}))
		_, err := bloburl.Open(t.Context(), "s3://bucket?endpoint="+server.URL, s3.Credentials{AccessKey: "a", SecretKey: "b"})
		if core.CodeOf(err) != want {
			t.Errorf("status %d: got %v (%s), want %s", status, err, core.CodeOf(err), want)
		}
		server.CloseClientConnections()
		server.Close()
	}
}

// FuzzParse checks that New accepts every accepted URL, that plain http is accepted only where it is allowed, and that
// nothing panics.
func FuzzParse(f *testing.F) {
	for _, raw := range []string{
		"dir:/a", "s3://bucket/p?endpoint=http://127.0.0.1:1&region=x", "s3://bucket?region=eu-west-1&ca=/x&path_style=0&insecure=1",
		"s3://a:b@bucket", "dir:a", "s3://bucket?endpoint=http://x", "%", "s3://bucket/%2e%2e?region=x",
	} {
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		at, err := bloburl.Parse(raw)
		if err != nil {
			if core.CategoryOf(err) != core.Invalid {
				t.Errorf("%q: %v is no refusal", raw, err)
			}
			return
		}
		if (at.Dir == "") == (at.S3 == nil) || at.S3 == nil && !filepath.IsAbs(at.Dir) {
			t.Errorf("%q: %+v", raw, at)
		}
		if at.S3 == nil {
			return
		}
		if err := at.S3.Check(); err != nil {
			t.Errorf("%q was taken, but %v", raw, err)
		}
		if at.S3.Prefix != "" && !blob.ValidKey(at.S3.Prefix) {
			t.Errorf("%q: prefix %q", raw, at.S3.Prefix)
		}
		endpoint := strings.ToLower(at.S3.Endpoint)
		if !strings.HasPrefix(endpoint, "https://") && !strings.Contains(raw, "insecure") &&
			!strings.HasPrefix(endpoint, "http://127.") && !strings.HasPrefix(endpoint, "http://localhost") && !strings.HasPrefix(endpoint, "http://[") {
			t.Errorf("%q: %s without being asked", raw, at.S3.Endpoint)
		}
	})
}
