// Package tests3 gives tests a real S3 server on a loopback address, and a proxy that makes it fail (Proxy).
//
// The server is versitygw, or MinIO where COPPICE_TEST_S3 says so; `make` builds either and keeps it by version, outside the tree.
package tests3

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/require"
	"github.com/coppice-dev/coppice/internal/testaddr"
)

// Variable chooses the server: versitygw, which is meant when it is empty, or minio.
const Variable = "COPPICE_TEST_S3"

// The versions that the Makefile builds, which a test compares.
const (
	versitygwVersion = "v1.8.0"
	minioVersion     = "v0.0.0-20260212201848-7aac2a2c5b7c"
)

// Region is the servers'.
const Region = "us-east-1"

const startTimeout = time.Minute

// Server is a running server. It ends with its test, or with the process.
type Server struct {
	Address              string // host and port; plain HTTP
	AccessKey, SecretKey string
	// MinIO reports whether it is MinIO.
	MinIO bool

	process *os.Process
	ended   chan struct{}
	log     string
}

// kind is how a server is run.
type kind struct {
	name, version, target string
	command               func(dir, address string) (args, env []string)
}

var kinds = map[string]kind{
	"": versitygw, "versitygw": versitygw, "minio": minIO,
}

var versitygw = kind{"versitygw", versitygwVersion, "s3-server", func(dir, address string) ([]string, []string) {
	return []string{"--port", address, "--region", Region, "--keep-alive", "--quiet", "posix", dir}, nil
}}

var minIO = kind{"minio", minioVersion, "minio", func(dir, address string) ([]string, []string) {
	return []string{"server", "--address", address, "--quiet", dir},
		[]string{"MINIO_BROWSER=off", "MINIO_UPDATE=off", "MINIO_CALLHOME_ENABLE=off", "HOME=" + dir}
}}

// Start starts a server for the test and its subtests. Without its program the test is skipped; the requirement's name is "s3".
func Start(tb testing.TB) *Server {
	tb.Helper()
	k, ok := kinds[os.Getenv(Variable)]
	if !ok {
		tb.Fatalf("%s is %q, which is no server that is known", Variable, os.Getenv(Variable))
	}
	program, err := k.program()
	require.That(tb, "s3", err == nil, "make "+k.target)
	s := &Server{
		AccessKey: "test-" + rand.Text()[:12], SecretKey: rand.Text() + rand.Text(), MinIO: k.name == minIO.name,
		ended: make(chan struct{}), log: filepath.Join(tb.TempDir(), "log"),
	}
	s.Address = freeAddress(tb)
	args, env := k.command(tb.TempDir(), s.Address)
	s.run(tb, program, args, append(env,
		"ROOT_ACCESS_KEY="+s.AccessKey, "ROOT_SECRET_KEY="+s.SecretKey, "MINIO_ROOT_USER="+s.AccessKey, "MINIO_ROOT_PASSWORD="+s.SecretKey))
	s.await(tb)
	return s
}

// program is the path at which the Makefile keeps it.
func (k kind) program() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return exec.LookPath(filepath.Join(cache, "coppice", "tools", k.name+"-"+k.version))
}

// freeAddress is one that nobody else asks for, because the servers do not say which port they were given.
func freeAddress(tb testing.TB) string {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", testaddr.New())
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// NoAddress is one at which nobody listens.
func NoAddress(tb testing.TB) string {
	tb.Helper()
	return freeAddress(tb)
}

// run starts the program and ends it with the test. The kernel ends it with this process, should that be killed.
func (s *Server) run(tb testing.TB, program string, args, env []string) {
	tb.Helper()
	log, err := os.OpenFile(s.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		tb.Fatal(err)
	}
	cmd := exec.Command(program, args...) //nolint:gosec,noctx // G204: our own program; it ends with the test
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = env, "/", log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	osthread.Go(func() { // the signal is sent when the thread ends
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
			close(s.ended)
		}
	})
	err = <-started
	_ = log.Close()
	if err != nil {
		tb.Fatal(err)
	}
	s.process = cmd.Process
	tb.Cleanup(func() {
		_ = s.process.Kill()
		<-s.ended
		if tb.Failed() {
			tb.Logf("the server's log ends with:\n%s", s.tail())
		}
	})
}

func (s *Server) tail() string {
	b, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-4000):])
}

// await returns when the server answers.
func (s *Server) await(tb testing.TB) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), startTimeout)
	defer cancel()
	client := s.Client(tb)
	for {
		_, err := client.ListBuckets(ctx)
		if err == nil {
			return
		}
		select {
		case <-s.ended:
			tb.Fatalf("the S3 server ended:\n%s", s.tail())
		case <-ctx.Done():
			tb.Fatalf("the S3 server does not answer: %v\n%s", err, s.tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Client returns a client of the server's owner, for what tests do behind the back of the code that they test.
func (s *Server) Client(tb testing.TB) *minio.Core {
	tb.Helper()
	c, err := minio.NewCore(s.Address, &minio.Options{
		Creds: credentials.NewStaticV4(s.AccessKey, s.SecretKey, ""), Region: Region, BucketLookup: minio.BucketLookupPath, MaxRetries: 1,
	})
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// Bucket makes a bucket and returns its name.
func (s *Server) Bucket(tb testing.TB) string {
	tb.Helper()
	name := "test-" + strings.ToLower(rand.Text()[:16])
	if err := s.Client(tb).MakeBucket(tb.Context(), name, minio.MakeBucketOptions{}); err != nil {
		tb.Fatal(err)
	}
	return name
}

// URL is that of a store in a bucket, as coppice is given it.
func (s *Server) URL(bucket string) string {
	return fmt.Sprintf("s3://%s?endpoint=http://%s&region=%s", bucket, s.Address, Region)
}
