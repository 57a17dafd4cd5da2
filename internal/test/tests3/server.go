// Package tests3 gives tests and benchmarks a real S3 server on a loopback address, and tests a proxy that causes
// faults (Proxy).
//
// The server is versitygw, or MinIO if COPPICE_TEST_S3 says so; `make` builds either and keeps it by version, outside
// the tree.
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
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testaddr"
)

// Variable chooses the server: versitygw, also when it is empty, or minio.
const Variable = "COPPICE_TEST_S3"

// The versions that the Makefile builds. A test compares them.
const (
	versitygwVersion = "v1.8.0"
	minioVersion     = "v0.0.0-20260212201848-7aac2a2c5b7c"
)

// Region is the region of the servers.
const Region = "us-east-1"

const startTimeout = time.Minute

// Server is a running server. It ends with its test, by Close, or with the process.
type Server struct {
	Address              string // host and port; plain HTTP
	AccessKey, SecretKey string
	Program              string // name and version
	// MinIO reports whether it is MinIO.
	MinIO bool

	process *os.Process
	ended   chan struct{}
	log     string
}

// kind says how to run a server.
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

// Start starts a server for the test and its subtests. If its program is missing, the test is skipped; the
// requirement's name is "s3".
func Start(tb testing.TB) *Server {
	tb.Helper()
	k, ok := kinds[os.Getenv(Variable)]
	if !ok {
		tb.Fatalf("%s is %q, which is not a known server", Variable, os.Getenv(Variable))
	}
	_, err := k.program()
	require.That(tb, "s3", err == nil, "make "+k.target)
	s, err := k.open(tb.Context(), tb.TempDir())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		s.Close()
		if tb.Failed() {
			tb.Logf("the server's log ends with:\n%s", s.tail())
		}
	})
	return s
}

// Open starts versitygw on an existing empty directory, for programs that are not tests. Close ends it.
func Open(ctx context.Context, dir string) (*Server, error) { return versitygw.open(ctx, dir) }

func (k kind) open(ctx context.Context, dir string) (*Server, error) {
	program, err := k.program()
	if err != nil {
		return nil, fmt.Errorf("%w; run make %s", err, k.target)
	}
	s := &Server{
		AccessKey: "test-" + rand.Text()[:12], SecretKey: rand.Text() + rand.Text(), MinIO: k.name == minIO.name,
		Program: k.name + " " + k.version, ended: make(chan struct{}), log: filepath.Join(dir, "log"),
	}
	data := filepath.Join(dir, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		return nil, err
	}
	if s.Address, err = freeAddress(ctx); err != nil {
		return nil, err
	}
	args, env := k.command(data, s.Address)
	if err := s.run(program, args, append(env,
		"ROOT_ACCESS_KEY="+s.AccessKey, "ROOT_SECRET_KEY="+s.SecretKey, "MINIO_ROOT_USER="+s.AccessKey, "MINIO_ROOT_PASSWORD="+s.SecretKey)); err != nil {
		return nil, err
	}
	if err := s.await(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Close ends the server and returns when it has ended.
func (s *Server) Close() {
	_ = s.process.Kill() // it may have ended
	<-s.ended
}

// program returns the path at which the Makefile keeps the program.
func (k kind) program() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return exec.LookPath(filepath.Join(cache, "coppice", "tools", k.name+"-"+k.version))
}

// freeAddress returns an address that nothing else uses, because the servers do not report which port they got.
func freeAddress(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", testaddr.New())
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// NoAddress returns an address at which nobody listens.
func NoAddress(tb testing.TB) string {
	tb.Helper()
	address, err := freeAddress(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return address
}

// run starts the program. The kernel ends it if this process is killed.
func (s *Server) run(program string, args, env []string) error {
	log, err := os.OpenFile(s.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(program, args...) //nolint:gosec,noctx // G204: our own program, which Close ends
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
	s.process = cmd.Process
	return err
}

func (s *Server) tail() string {
	b, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-4000):])
}

// await returns when the server answers.
func (s *Server) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	client, err := s.core()
	if err != nil {
		return err
	}
	for {
		_, err := client.ListBuckets(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-s.ended:
			return fmt.Errorf("the S3 server ended:\n%s", s.tail())
		case <-ctx.Done():
			return fmt.Errorf("the S3 server does not answer: %w\n%s", err, s.tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *Server) core() (*minio.Core, error) {
	return minio.NewCore(s.Address, &minio.Options{
		Creds: credentials.NewStaticV4(s.AccessKey, s.SecretKey, ""), Region: Region, BucketLookup: minio.BucketLookupPath, MaxRetries: 1,
	})
}

// Client returns a client with the owner's credentials, for what tests do without the tested code.
func (s *Server) Client(tb testing.TB) *minio.Core {
	tb.Helper()
	c, err := s.core()
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// MakeBucket makes a bucket and returns its name.
func (s *Server) MakeBucket(ctx context.Context) (string, error) {
	c, err := s.core()
	if err != nil {
		return "", err
	}
	name := "test-" + strings.ToLower(rand.Text()[:16])
	return name, c.MakeBucket(ctx, name, minio.MakeBucketOptions{})
}

// Bucket is MakeBucket for a test.
func (s *Server) Bucket(tb testing.TB) string {
	tb.Helper()
	name, err := s.MakeBucket(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return name
}

// URL is the URL of a store in a bucket, as for coppice.
func (s *Server) URL(bucket string) string {
	return fmt.Sprintf("s3://%s?endpoint=http://%s&region=%s", bucket, s.Address, Region)
}
