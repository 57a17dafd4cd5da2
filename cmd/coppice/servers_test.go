package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
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
		"nothing":                        {[]string{"controller"}, nil, exitBadInput, "--database"},
		"in clear, by the environment":   {[]string{"controller"}, map[string]string{"COPPICE_LISTEN": "0.0.0.0:7070", "COPPICE_DATABASE": "x", "COPPICE_KEY_FILE": "k"}, exitBadInput, "--plain-http"},
		"a flag wins":                    {[]string{"controller", "--listen", "127.0.0.1:0", "--database-wait", "1ms", "--key-file", "k", "--database-file", dsn}, map[string]string{"COPPICE_LISTEN": "0.0.0.0:7070"}, exitUnavailable, "database"},
		"two databases":                  {[]string{"controller", "--database", "x", "--database-file", dsn}, nil, exitUsage, "exclude each other"},
		"a bad variable":                 {[]string{"controller"}, map[string]string{"COPPICE_DATABASE_WAIT": "soon"}, exitUsage, "COPPICE_DATABASE_WAIT"},
		"a Vault in clear":               {[]string{"controller", "--database", "postgres://127.0.0.1:1/x", "--key-file", "k"}, map[string]string{"COPPICE_VAULT_ADDR": "http://vault.example:8200", "COPPICE_VAULT_TOKEN_FILE": "t"}, exitBadInput, "--vault-addr"},
		"no Vault":                       {[]string{"controller", "--database", "postgres://127.0.0.1:1/x", "--key-file", "k", "--vault-token-file", "t"}, nil, exitBadInput, "--vault-addr"},
		"attestations that are not kept": {[]string{"controller", "--database", "postgres://127.0.0.1:1/x", "--key-file", "k", "--attestation-retention", "1h"}, nil, exitBadInput, "--attestation-retention"},
		"flows that are not kept":        {[]string{"controller", "--database", "postgres://127.0.0.1:1/x", "--key-file", "k", "--flow-retention", "1h"}, nil, exitBadInput, "--flow-retention"},
		"a bad level":                    {[]string{"runner", "--log-level", "loud", "--accel", "tcg"}, nil, exitUsage, "--log-level"},
		"a bad way to fetch":             {[]string{"runner", "--accel", "tcg"}, map[string]string{"COPPICE_FETCH": "slowly"}, exitUsage, "--fetch"},
		"a bad floor":                    {[]string{"runner", "--accel", "tcg"}, map[string]string{"COPPICE_DISK_FLOOR": "high"}, exitUsage, "--disk-floor"},
		"no controller":                  {[]string{"runner", "--data-dir", dir, "--accel", "tcg"}, nil, exitBadInput, "--controller"},
		"two controllers, no data":       {[]string{"runner", "--data-dir", dir, "--accel", "tcg"}, map[string]string{"COPPICE_CONTROLLER": "https://a:1,https://b:1", "COPPICE_DATA_URL": "https://c:1"}, exitBadInput, "--data-listen"},
	} {
		a, _, stderr := testApp(c.env)
		if got := run(t.Context(), a, c.args); got != c.status || !strings.Contains(stderr.String(), c.says) {
			t.Errorf("%s: status %d, want %d; %s", name, got, c.status, stderr)
		}
	}
}
