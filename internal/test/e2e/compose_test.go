package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/migrations"
)

// TestComposeStore makes the bucket with the very command of deploy/docker-compose.yml, on the S3 server that is in it, and starts a controller with
// the store that its services are given. Only addresses and keys are others.
func TestComposeStore(t *testing.T) {
	t.Parallel()
	require.Program(t, "curl", "curl")
	b, err := os.ReadFile("../../../deploy/docker-compose.yml")
	if err != nil {
		t.Fatal(err)
	}
	s3 := tests3.Start(t)
	here := strings.NewReplacer("http://s3:9000", "http://"+s3.Address, "$$", "$")
	command := regexp.MustCompile(`(?s)- >-\n( +status=.*?)\n    environment:`).FindStringSubmatch(string(b))
	store := regexp.MustCompile(`COPPICE_STORE: (s3://\S+)`).FindStringSubmatch(string(b))
	if command == nil || store == nil {
		t.Fatal("docker-compose.yml has no bucket's command, or no store, as this test knows them")
	}
	for _, want := range []string{"200", "409"} { // new, and there already
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", here.Replace(strings.Join(strings.Fields(command[1]), " ")))
		cmd.Env = append(os.Environ(), "S3_ACCESS_KEY="+s3.AccessKey, "S3_SECRET_KEY="+s3.SecretKey)
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "status "+want) {
			t.Fatalf("make the bucket: %v, %s, want status %s", err, out, want)
		}
	}
	dir := t.TempDir()
	// The secrets as docs/OPERATIONS.md makes them, before there is a cluster.
	key, api := filepath.Join(dir, "cluster.key"), filepath.Join(dir, "api.key")
	for path, text := range map[string]string{key: strings.Repeat("5e", 32), api: "coppice_" + strings.Repeat("a7", 32)} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c := &server{name: "controller", binary: "env", log: filepath.Join(dir, "log"), args: []string{
		"COPPICE_STORE=" + here.Replace(store[1]), "COPPICE_STORE_ACCESS_KEY=" + s3.AccessKey, "COPPICE_STORE_SECRET_KEY=" + s3.SecretKey,
		program(t, "cmd/coppice"), "--json", "controller", "--allow-weak-database=fsync,full_page_writes,synchronous_commit", "--database", testpg.New(t, migrations.Up), "--key-file", key, "--api-key-file", api,
		"--listen", freeAddress(t), "--runner-listen", freeAddress(t),
	}}
	if err := c.start(""); err != nil {
		t.Fatalf("%v\n%s", err, c.tail())
	}
	if _, err := connect(t, c.ready.Server, api).Self(t.Context()); err != nil {
		t.Error(err)
	}
	c.kill()
	if log := c.tail(); strings.Contains(log, "the store of checkpoints cannot be reached") {
		t.Error(log)
	}
}
