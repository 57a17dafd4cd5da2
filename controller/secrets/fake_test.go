package secrets_test

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/controller/secrets"
)

// fakeVault answers as Vault's HTTP API is documented to: mounts of both versions, tokens that end, AppRole, Kubernetes, namespaces.
type fakeVault struct {
	t      *testing.T
	server *httptest.Server
	dir    string

	mu        sync.Mutex
	mounts    map[string]string // version by path; "transit" is no key-value engine
	data      map[string]map[string]any
	deleted   map[string]bool // the latest version, of version 2
	tokens    map[string]bool
	renewable bool
	lease     int
	namespace string
	logins    int
	renewals  int
	reads     int
	fault     http.HandlerFunc // instead of everything
}

const fakeBody = "what Vault wrote, hvs.token and all"

func newFake(t *testing.T) *fakeVault {
	t.Helper()
	f := &fakeVault{
		t: t, dir: t.TempDir(), mounts: map[string]string{"secret/": "2", "team/old/": "1", "team/": "2", "keys/": "transit"}, data: map[string]map[string]any{}, deleted: map[string]bool{},
		tokens: map[string]bool{"root-token": true}, lease: 3600, renewable: true,
	}
	f.server = httptest.NewTLSServer(f)
	t.Cleanup(f.server.Close)
	f.file("ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.server.Certificate().Raw})))
	f.file("token", "root-token\n")
	f.file("role", "the-role\n")
	f.file("secret", "the-secret-id\n")
	f.file("jwt", "the.service.account\n")
	return f
}

func (f *fakeVault) file(name, text string) string {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	if text != "" {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			f.t.Fatal(err)
		}
	}
	return path
}

// do changes what the server does.
func (f *fakeVault) do(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeVault) config() secrets.VaultConfig {
	return secrets.VaultConfig{Address: f.server.URL, CAFile: f.file("ca.pem", ""), Prefix: "secret/coppice/{project}/", TokenFile: f.file("token", "")}
}

func (f *fakeVault) appRole() secrets.VaultConfig {
	c := f.config()
	c.TokenFile, c.RoleIDFile, c.SecretIDFile = "", f.file("role", ""), f.file("secret", "")
	return c
}

func (f *fakeVault) put(path string, data map[string]any) {
	f.do(func() { f.data[path], f.deleted[path] = data, false })
}

func (f *fakeVault) drop(path string) { f.do(func() { f.deleted[path] = true }) }

func (f *fakeVault) fail(h http.HandlerFunc) { f.do(func() { f.fault = h }) }

func (f *fakeVault) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fault != nil {
		h := f.fault
		f.mu.Unlock()
		defer f.mu.Lock()
		h(w, r)
		return
	}
	path := strings.TrimPrefix(r.URL.Path, "/v1/")
	if r.URL.RawQuery != "" || r.Header.Get("X-Vault-Request") != "true" {
		refuse(w, http.StatusBadRequest, "not as the library asks")
		return
	}
	if r.Header.Get("X-Vault-Namespace") != f.namespace {
		refuse(w, http.StatusNotFound, fmt.Sprintf("no handler for route %q. route entry not found.", path))
		return
	}
	if strings.HasPrefix(path, "auth/") && strings.HasSuffix(path, "/login") {
		f.login(w, r, path)
		return
	}
	token := r.Header.Get("X-Vault-Token")
	if !f.tokens[token] {
		refuse(w, http.StatusForbidden, "permission denied")
		return
	}
	if path == "auth/token/renew-self" {
		f.renewals++
		answer(w, map[string]any{"auth": map[string]any{"client_token": token, "lease_duration": f.lease, "renewable": f.renewable}})
		return
	}
	if rest, ok := strings.CutPrefix(path, "sys/internal/ui/mounts/"); ok {
		mount, version := f.mountOf(rest)
		if mount == "" {
			refuse(w, http.StatusForbidden, "preflight capability check returned 403")
			return
		}
		data := map[string]any{"path": mount, "type": "kv", "options": map[string]any{"version": version}}
		if version == "transit" {
			data["type"], data["options"] = "transit", nil
		}
		answer(w, map[string]any{"data": data})
		return
	}
	f.read(w, path)
}

func (f *fakeVault) mountOf(path string) (mount, version string) {
	for m, v := range f.mounts {
		if strings.HasPrefix(path, m) && len(m) > len(mount) {
			mount, version = m, v
		}
	}
	return mount, version
}

func (f *fakeVault) read(w http.ResponseWriter, path string) {
	f.reads++
	mount, version := f.mountOf(path)
	rest := strings.TrimPrefix(path, mount)
	switch version {
	case "1":
		if data, ok := f.data[path]; ok && !f.deleted[path] {
			answer(w, map[string]any{"lease_duration": 2764800, "data": data})
			return
		}
		refuse(w, http.StatusNotFound)
	case "2":
		name, ok := strings.CutPrefix(rest, "data/")
		data, there := f.data[mount+name]
		meta := map[string]any{"version": 3, "deletion_time": "", "destroyed": false}
		switch {
		case !ok:
			w.WriteHeader(http.StatusNotFound)
			answer(w, map[string]any{"warnings": []string{"Invalid path for a versioned K/V secrets engine."}})
		case !there:
			refuse(w, http.StatusNotFound)
		case f.deleted[mount+name]:
			meta["deletion_time"] = "2026-01-01T00:00:00Z"
			w.WriteHeader(http.StatusNotFound)
			answer(w, map[string]any{"data": map[string]any{"data": nil, "metadata": meta}})
		default:
			answer(w, map[string]any{"data": map[string]any{"data": data, "metadata": meta}})
		}
	default:
		refuse(w, http.StatusNotFound, "no handler for route")
	}
}

func (f *fakeVault) login(w http.ResponseWriter, r *http.Request, path string) {
	var in map[string]string
	if err := json.NewDecoder(io.LimitReader(r.Body, 1<<16)).Decode(&in); err != nil {
		refuse(w, http.StatusBadRequest, "no JSON")
		return
	}
	ok := path == "auth/approle/login" && in["role_id"] == "the-role" && in["secret_id"] == "the-secret-id" ||
		path == "auth/cluster-2/kubernetes/login" && in["role"] == "coppice" && in["jwt"] == "the.service.account"
	if !ok {
		refuse(w, http.StatusBadRequest, "invalid role or secret ID")
		return
	}
	f.logins++
	token := fmt.Sprintf("hvs.login-%d", f.logins)
	f.tokens[token] = true
	answer(w, map[string]any{"auth": map[string]any{"client_token": token, "lease_duration": f.lease, "renewable": f.renewable}})
}

func answer(w http.ResponseWriter, v any) { _ = json.NewEncoder(w).Encode(v) }

// refuse answers as Vault does: a 404 without errors is "there is nothing".
func refuse(w http.ResponseWriter, status int, errs ...string) {
	w.WriteHeader(status)
	if errs == nil {
		errs = []string{}
	}
	answer(w, map[string]any{"errors": errs})
}
