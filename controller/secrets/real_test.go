//go:build vault

package secrets_test

import (
	"encoding/pem"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/vault/api"

	"github.com/coppice-dev/coppice/controller/secrets"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testaddr"
)

// realVault is a Vault in development mode, behind a proxy that speaks TLS.
type realVault struct {
	t        *testing.T
	root     *api.Client
	url, dir string
}

const devToken = "dev-root-token"

// newReal starts the binary that COPPICE_TEST_VAULT names.
func newReal(t *testing.T) *realVault {
	t.Helper()
	binary := os.Getenv("COPPICE_TEST_VAULT")
	if binary == "" {
		t.Fatal("set COPPICE_TEST_VAULT to the path of a Vault or OpenBao binary")
	}
	v := &realVault{t: t, dir: t.TempDir()}
	addr := strings.TrimSuffix(testaddr.New(), "0") + "8200"
	log, err := os.Create(filepath.Join(v.dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), binary, "server", "-dev", "-dev-no-store-token", "-dev-root-token-id="+devToken, "-dev-listen-address="+addr)
	cmd.Stdout, cmd.Stderr, cmd.Env = log, log, []string{"HOME=" + v.dir, "SKIP_SETCAP=1"}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		if err := log.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("Vault said:\n%s", b)
		}
	})
	cfg := api.DefaultConfig()
	cfg.Address = "http://" + addr
	if v.root, err = api.NewClient(cfg); err != nil {
		t.Fatal(err)
	}
	v.root.SetToken(devToken)
	eventually.True(t, "Vault is up", func() bool {
		h, err := v.root.Sys().HealthWithContext(t.Context())
		return err == nil && h.Initialized && !h.Sealed
	})
	target, err := url.Parse(cfg.Address)
	if err != nil {
		t.Fatal(err)
	}
	front := httptest.NewTLSServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }})
	t.Cleanup(front.Close)
	v.url = front.URL
	v.file("ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: front.Certificate().Raw})))
	return v
}

func (v *realVault) file(name, text string) string {
	v.t.Helper()
	path := filepath.Join(v.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		v.t.Fatal(err)
	}
	return path
}

func (v *realVault) write(path string, data map[string]any) *api.Secret {
	v.t.Helper()
	s, err := v.root.Logical().WriteWithContext(v.t.Context(), path, data)
	if err != nil {
		v.t.Fatal(err)
	}
	return s
}

// setUp mounts the engines that the contract wants, and makes a role whose policy is what docs/OPERATIONS.md says.
func (v *realVault) setUp() {
	v.t.Helper()
	for path, in := range map[string]*api.MountInput{
		"team/old": {Type: "kv", Options: map[string]string{"version": "1"}}, "team/new": {Type: "kv", Options: map[string]string{"version": "2"}}, "keys": {Type: "transit"},
	} {
		if err := v.root.Sys().MountWithContext(v.t.Context(), path, in); err != nil {
			v.t.Fatal(err)
		}
	}
	if err := v.root.Sys().EnableAuthWithOptionsWithContext(v.t.Context(), "approle", &api.EnableAuthOptions{Type: "approle"}); err != nil {
		v.t.Fatal(err)
	}
	if err := v.root.Sys().PutPolicyWithContext(v.t.Context(), "coppice", `
		path "secret/data/coppice/*" { capabilities = ["read"] }
		path "team/old/*" { capabilities = ["read"] }
		path "keys/*" { capabilities = ["read"] }`); err != nil {
		v.t.Fatal(err)
	}
	v.write("auth/approle/role/coppice", map[string]any{"token_policies": "coppice", "token_ttl": "20m", "token_max_ttl": "1h"})
	role, err := v.root.Logical().ReadWithContext(v.t.Context(), "auth/approle/role/coppice/role-id")
	if err != nil {
		v.t.Fatal(err)
	}
	v.file("role", role.Data["role_id"].(string))
	v.file("secret", v.write("auth/approle/role/coppice/secret-id", nil).Data["secret_id"].(string))
	v.file("token", devToken)
}

func (v *realVault) config() secrets.VaultConfig {
	return secrets.VaultConfig{Address: v.url, CAFile: filepath.Join(v.dir, "ca.pem"), Prefix: "secret/coppice/{project}/", TokenFile: filepath.Join(v.dir, "token")}
}

func (v *realVault) appRole() secrets.VaultConfig {
	c := v.config()
	c.TokenFile, c.RoleIDFile, c.SecretIDFile = "", filepath.Join(v.dir, "role"), filepath.Join(v.dir, "secret")
	return c
}

func (v *realVault) put(path string, data map[string]any) {
	v.t.Helper()
	if rest, ok := strings.CutPrefix(path, "secret/"); ok {
		v.write("secret/data/"+rest, map[string]any{"data": data})
		return
	}
	v.write(path, data)
}

func (v *realVault) drop(path string) {
	v.t.Helper()
	if _, err := v.root.Logical().DeleteWithContext(v.t.Context(), "secret/data/"+strings.TrimPrefix(path, "secret/")); err != nil {
		v.t.Fatal(err)
	}
}

// TestRealVault repeats the contract with a real server, and what only one can do: to revoke, to destroy, to seal and to end.
func TestRealVault(t *testing.T) {
	t.Parallel()
	v := newReal(t)
	v.setUp()
	contract(t, v)

	path := "secret/coppice/" + string(project) + "/"
	v.put(path+"a", map[string]any{"key": value})
	v.put(path+"b", map[string]any{"key": value})
	s, c := open(t, v.appRole())
	wantSecret(t, "before", s, own("a", "key"), value)
	if _, err := v.root.Logical().WriteWithContext(t.Context(), "sys/leases/revoke-prefix/auth/approle/", nil); err != nil {
		t.Fatal(err)
	}
	got, err := s.Read(t.Context(), project, own("b", "key"))
	wantCode(t, "a token that was revoked as soon as it was given", got, err, core.CodeSecretUnavailable)
	c.forward(secrets.FreshTime)
	wantSecret(t, "another login", s, own("b", "key"), value)
	v.write("secret/destroy/coppice/"+string(project)+"/b", map[string]any{"versions": []int{1}})
	c.forward(secrets.FreshTime)
	got, err = s.Read(t.Context(), project, own("b", "key"))
	wantCode(t, "destroyed", got, err, core.CodeSecretNotFound)
	if err := v.root.Sys().SealWithContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantSecret(t, "sealed", s, own("a", "key"), value)
	c.forward(secrets.StaleTime)
	got, err = s.Read(t.Context(), project, own("a", "key"))
	wantCode(t, "sealed for an hour", got, err, core.CodeSecretUnavailable)
}
