package daemon_test

import (
	"crypto/x509"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
)

// command runs a client command of the coppice that is tested, with the administrator's key from its file.
func (c *cluster) command(args ...string) (string, error) {
	c.t.Helper()
	binary, err := program()
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.CommandContext(c.t.Context(), binary, args...)
	cmd.Env = append(os.Environ(), "COPPICE_SERVER="+c.ready.Server, "COPPICE_TOKEN_FILE="+c.cfg.APIKeyFile)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestUnattendedJoin starts a runner as a compose file or a pod does: whatever its data directory holds, the same two commands.
func TestUnattendedJoin(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	m := &member{cfg: c.runnerConfig()}
	dir, token := m.cfg.Runner.DataDir, filepath.Join(t.TempDir(), "token")
	ensure := func() (made bool, id core.RunnerID) {
		t.Helper()
		out, err := c.command("runner-token", "ensure", "--json", "--data-dir", dir, "--out", token)
		var said struct {
			RunnerID  core.RunnerID `json:"runner_id"`
			TokenMade bool          `json:"token_made"`
		}
		if err != nil || json.Unmarshal([]byte(out), &said) != nil {
			t.Fatal(out, err)
		}
		return said.TokenMade, said.RunnerID
	}
	run := func() {
		t.Helper()
		b, err := os.ReadFile(token)
		if err != nil {
			t.Fatal(err)
		}
		m.cfg.Runner.JoinToken = strings.TrimSpace(string(b))
		m.process = begin(t, "runner", m.cfg, &m.ready)
	}

	made, first := ensure()
	if info, err := os.Stat(token); !made || err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("a new runner: made %v, %v, %v", made, info, err)
	}
	run()
	if m.ready.RunnerID != first {
		t.Errorf("the runner joined as %s with a token for %s", m.ready.RunnerID, first)
	}
	if made, id := ensure(); made || id != first {
		t.Errorf("for a member: made %v for %s", made, id)
	}
	m.stop(t)

	lapse(t, filepath.Join(dir, "member.json"))
	if needed, id, err := daemon.NeedsToken(dir); !needed || id != first || err != nil {
		t.Fatalf("with an expired certificate: %v, %s, %v", needed, id, err)
	}
	if made, id := ensure(); !made || id != first {
		t.Errorf("for an expired member: made %v for %s", made, id)
	}
	run()
	if m.ready.RunnerID != first {
		t.Errorf("the runner came back as %s, it was %s", m.ready.RunnerID, first)
	}
	if err := os.WriteFile(filepath.Join(dir, "member.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := daemon.NeedsToken(dir); core.CodeOf(err) != core.CodeInternal {
		t.Errorf("a membership without a key: %v", err)
	}
}

// lapse replaces a kept certificate by one of the same name that has expired.
func lapse(t *testing.T, path string) {
	t.Helper()
	var kept map[string]any
	if err := atomicfile.ReadJSON(path, &kept); err != nil {
		t.Fatal(err)
	}
	authority, err := mtls.NewAuthority("another")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := authority.IssueNew(mtls.RunnerName(core.RunnerID(kept["runner_id"].(string))), -time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(cert.Key)
	if err != nil {
		t.Fatal(err)
	}
	kept["authority"], kept["certificate"], kept["key"] = authority.Certificate(), cert.DER, key
	if err := atomicfile.WriteJSON(path, kept, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestMigrateCommand(t *testing.T) {
	t.Parallel()
	binary, err := program()
	if err != nil {
		t.Fatal(err)
	}
	dsn := testpg.New(t, nil)
	file := filepath.Join(t.TempDir(), "database")
	if err := os.WriteFile(file, []byte(dsn+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		args []string
		says string
		ok   bool
	}{
		{[]string{"--check"}, "run the migrations first", false},
		{nil, "has schema version", true},
		{nil, "has schema version", true},
		{[]string{"--check"}, "has schema version", true},
	} {
		cmd := exec.CommandContext(t.Context(), binary, append([]string{"migrate"}, step.args...)...)
		cmd.Env = append(os.Environ(), "COPPICE_DATABASE_FILE="+file)
		out, err := cmd.CombinedOutput()
		if (err == nil) != step.ok || !strings.Contains(string(out), step.says) {
			t.Errorf("migrate %v: %v\n%s", step.args, err, out)
		}
	}
	if err := migrations.Check(t.Context(), dsn); err != nil {
		t.Error(err)
	}
}
