package tests3

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// TestVersions compares the versions with those that the Makefile builds.
func TestVersions(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile(filepath.Join("..", "..", "..", "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Join(strings.Fields(string(makefile)), " ")
	for name, version := range map[string]string{"VERSITYGW": versitygwVersion, "MINIO": minioVersion} {
		if want := fmt.Sprintf("%s_VERSION := %s ", name, version); !strings.Contains(got, want) {
			t.Errorf("the Makefile lacks %q", want)
		}
	}
}

// TestServer checks a server and its buckets.
func TestServer(t *testing.T) {
	t.Parallel()
	s := Start(t)
	one, other := s.Bucket(t), s.Bucket(t)
	for bucket, want := range map[string]bool{one: true, other: true, "absent-bucket": false} {
		if got, err := s.Client(t).BucketExists(t.Context(), bucket); err != nil || got != want {
			t.Errorf("%s: %v, %v", bucket, got, err)
		}
	}
	if !strings.HasPrefix(s.Address, "127.") {
		t.Errorf("it listens on %s", s.Address)
	}
}
