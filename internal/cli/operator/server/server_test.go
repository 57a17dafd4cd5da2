package server

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

// TestServerFlags comes as far as the first refusal: the flags and the environment are read, and what is wrong is said at once.
func TestServerFlags(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	dsn := filepath.Join(dir, "dsn")
	if err := os.WriteFile(dsn, []byte("postgres://127.0.0.1:1/x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args   []string
		env    map[string]string
		status int
		says   string
	}{
		"nothing":                        {[]string{"controller"}, nil, exit.BadInput, "--database"},
		"in clear, by the environment":   {[]string{"controller"}, map[string]string{"COPPICE_LISTEN": "0.0.0.0:7070", "COPPICE_DATABASE": "x", "COPPICE_KEY_FILE": "k"}, exit.BadInput, "--plain-http"},
		"a flag wins":                    {[]string{"controller", "--listen", "127.0.0.1:0", "--database-wait", "1ms", "--key-file", "k", "--database-file", dsn}, map[string]string{"COPPICE_LISTEN": "0.0.0.0:7070"}, exit.Unavailable, "database"},
		"two databases":                  {[]string{"controller", "--database", "x", "--database-file", dsn}, nil, exit.Usage, "exclude each other"},
		"a bad variable":                 {[]string{"controller"}, map[string]string{"COPPICE_DATABASE_WAIT": "soon"}, exit.Usage, "COPPICE_DATABASE_WAIT"},
		"a Vault in clear":               {[]string{"controller", "--database", "postgres://127.0.0.1:1/x", "--key-file", "k"}, map[string]string{"COPPICE_VAULT_ADDR": "http://vault.example:8200", "COPPICE_VAULT_TOKEN_FILE": "t"}, exit.BadInput, "--vault-addr"},
		"no Vault":                       {[]string{"controller", "--database", "postgres://127.0.0.1:1/x", "--key-file", "k", "--vault-token-file", "t"}, nil, exit.BadInput, "--vault-addr"},
		"attestations that are not kept": {[]string{"controller", "--database", "postgres://127.0.0.1:1/x", "--key-file", "k", "--attestation-retention", "1h"}, nil, exit.BadInput, "--attestation-retention"},
		"flows that are not kept":        {[]string{"controller", "--database", "postgres://127.0.0.1:1/x", "--key-file", "k", "--flow-retention", "1h"}, nil, exit.BadInput, "--flow-retention"},
		"no key for all":                 {[]string{"controller", "--database", "postgres://127.0.0.1:1/x", "--key-file", "k", "--plain-http", "--arrakis-key-file", "k"}, map[string]string{"COPPICE_ARRAKIS_LISTEN": "0.0.0.0:7000"}, exit.BadInput, "--arrakis-listen"},
		"a bad level":                    {[]string{"runner", "--log-level", "loud", "--accel", "tcg"}, nil, exit.Usage, "--log-level"},
		"a bad way to fetch":             {[]string{"runner", "--accel", "tcg"}, map[string]string{"COPPICE_FETCH": "slowly"}, exit.Usage, "--fetch"},
		"a bad floor":                    {[]string{"runner", "--accel", "tcg"}, map[string]string{"COPPICE_DISK_FLOOR": "high"}, exit.Usage, "--disk-floor"},
		"two forward addresses":          {[]string{"runner", "--accel", "tcg", "--forward-bind", "0.0.0.0", "--forward-address", "10.0.0.1", "--forward-address", "10.0.0.2"}, nil, exit.Usage, "--forward-address"},
		"no forward address":             {[]string{"runner", "--accel", "tcg", "--forward-bind", "0.0.0.0"}, nil, exit.Usage, "--forward-address"},
		"no controller":                  {[]string{"runner", "--data-dir", dir, "--accel", "tcg"}, nil, exit.BadInput, "--controller"},
		"two controllers, no data":       {[]string{"runner", "--data-dir", dir, "--accel", "tcg"}, map[string]string{"COPPICE_CONTROLLER": "https://a:1,https://b:1", "COPPICE_DATA_URL": "https://c:1"}, exit.BadInput, "--data-listen"},
	} {
		a, _, stderr := clitest.App(c.env)
		if got := a.Run(t.Context(), c.args, NewControllerCommand, NewRunnerCommand); got != c.status || !strings.Contains(stderr.String(), c.says) {
			t.Errorf("%s: status %d, want %d; %s", name, got, c.status, stderr)
		}
	}
}
