package s3

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/blobtest"
)

const writerEnv = "S3_TEST_STORE" // makes the test binary put a large object into this store

func TestMain(m *testing.M) {
	if raw := os.Getenv(writerEnv); raw != "" {
		putLarge(raw)
	}
	testleak.Main(m)
}

// putLarge is the child process of TestKilledInTheMiddle.
func putLarge(raw string) {
	var cfg struct {
		Config
		AccessKey, SecretKey string
	}
	err := json.Unmarshal([]byte(raw), &cfg)
	cfg.Credentials = Credentials{AccessKey: cfg.AccessKey, SecretKey: cfg.SecretKey}
	var s *Store
	if err == nil {
		s, err = New(cfg.Config)
	}
	if err == nil {
		err = blobtest.Put(context.Background(), s, object, blobtest.Bytes(1, 5*partSize))
	}
	fmt.Println("the child has ended:", err)
	os.Exit(1)
}

// TestKilledInTheMiddle kills a process that has sent some parts of an object: nothing is visible, Sweep removes the
// parts, and another process puts the whole object.
func TestKilledInTheMiddle(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server)
	third := make(chan struct{})
	var parts atomic.Int32
	s.proxy.Add(tests3.Fault{Kind: tests3.StallRequest, Skip: 2, Of: func(r *http.Request) bool {
		if tests3.Parts(r) && parts.Add(1) == 3 {
			close(third)
		}
		return tests3.Parts(r)
	}})
	raw, err := json.Marshal(map[string]any{
		"Endpoint": s.cfg.Endpoint, "Bucket": s.cfg.Bucket, "Prefix": s.cfg.Prefix, "PathStyle": true,
		"AccessKey": server.AccessKey, "SecretKey": server.SecretKey,
	})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), writerEnv+"="+string(raw)), &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	select {
	case <-third:
	case <-ended:
		t.Fatalf("the child ended: %s", out.String())
	}
	_ = cmd.Process.Kill()
	<-ended
	s.proxy.Clear()
	if _, err := s.Stat(t.Context(), object); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("got %v, want nothing", err)
	}
	if n := uploads(t, server, s); n != 1 {
		t.Errorf("%d uploads", n)
	}
	if err := s.Sweep(t.Context(), time.Now().Add(time.Hour)); err != nil {
		t.Error(err)
	}
	if n := uploads(t, server, s); n != 0 {
		t.Errorf("%d uploads after a sweep", n)
	}
	data := blobtest.Bytes(1, 5*partSize)
	if err := blobtest.Put(t.Context(), s, object, data); err != nil {
		t.Fatal(err)
	}
	if got, err := blobtest.Get(t.Context(), s, object, 0, 6*partSize); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// open opens a store through an address: the server's own, or that of a proxy.
func open(tb testing.TB, server *tests3.Server, address, bucket, prefix string, change ...func(*Config)) *Store {
	tb.Helper()
	cfg := Config{
		Endpoint: "http://" + address, Region: tests3.Region, Bucket: bucket, Prefix: prefix, PathStyle: true,
		Credentials: Credentials{AccessKey: server.AccessKey, SecretKey: server.SecretKey},
	}
	for _, c := range change {
		c(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

func TestSuite(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	for name, prefix := range map[string]string{"bucket": "", "prefix": "stores/one"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			blobtest.Run(t, func(tb testing.TB) blobtest.Store {
				tb.Helper()
				bucket, client := server.Bucket(tb), server.Client(tb)
				s := open(tb, server, server.Address, bucket, prefix)
				return blobtest.Store{
					Blobs: s,
					Abandon: func(tb testing.TB, key string) {
						tb.Helper()
						id, err := client.NewMultipartUpload(tb.Context(), bucket, s.name(key), minio.PutObjectOptions{})
						if err == nil {
							_, err = client.PutObjectPart(tb.Context(), bucket, s.name(key), id, 1, bytes.NewReader([]byte("part")), 4, minio.PutObjectPartOptions{})
						}
						if err != nil {
							tb.Fatal(err)
						}
					},
					Leftovers: func(tb testing.TB) int {
						tb.Helper()
						found, err := client.ListMultipartUploads(tb.Context(), bucket, "", "", "", "", page)
						if err != nil {
							tb.Fatal(err)
						}
						return len(found.Uploads)
					},
				}
			})
		})
	}
}

// TestTLS uses a server whose certificate the system does not trust.
func TestTLS(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	bucket := server.Bucket(t)
	front := httptest.NewTLSServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", server.Address, r.In.Host
		},
	})
	t.Cleanup(front.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: front.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	overTLS := func(c *Config) { c.Endpoint = front.URL }
	s := open(t, server, "", bucket, "", overTLS, func(c *Config) { c.CAFile = ca })
	if err := blob.Probe(t.Context(), s); err != nil {
		t.Error(err)
	}
	data := blobtest.Bytes(1, partSize+1)
	if err := blobtest.Put(t.Context(), s, object, data); err != nil {
		t.Error(err)
	}
	if got, err := blobtest.Get(t.Context(), s, object, 0, partSize+1); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	err := blob.Probe(t.Context(), open(t, server, "", bucket, "", overTLS))
	if core.CodeOf(err) != core.CodeStoreUnavailable || !strings.Contains(core.MessageOf(err), "certificate is not trusted") {
		t.Errorf("without the CA: %v", err)
	}
}
