package secrets_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/secrets"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

var (
	_ grants.SecretSource = secrets.Mux(nil)

	project = core.NewID[core.ProjectID]()
	other   = core.NewID[core.ProjectID]()
)

const value = "sk-live-0123456789abcdef"

// clock is one that tests put forward.
type clock struct{ ahead atomic.Int64 }

func (c *clock) now() time.Time          { return time.Now().Add(time.Duration(c.ahead.Load())) }
func (c *clock) forward(d time.Duration) { c.ahead.Add(int64(d)) }

func open(t *testing.T, cfg secrets.VaultConfig) (*secrets.Vault, *clock) {
	t.Helper()
	cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	v, err := secrets.OpenVault(cfg)
	if err != nil {
		t.Fatal(err)
	}
	c := &clock{}
	v.SetNow(c.now)
	return v, c
}

func at(path, field string) string { return "vault://" + path + "#" + field }

func own(name, field string) string { return at("secret/coppice/"+string(project)+"/"+name, field) }

// wantCode fails unless an error has a code, and says nothing that nobody may see.
func wantCode(t *testing.T, what string, got grant.Secret, err error, code core.Code) {
	t.Helper()
	if core.CodeOf(err) != code || got.Reveal() != "" {
		t.Errorf("%s: %v, want %s and no secret", what, err, code)
	}
	for e := err; e != nil; e = errors.Unwrap(e) {
		for _, no := range []string{value, "hvs.", "root-token", "the-secret-id", "what Vault wrote"} {
			if strings.Contains(e.Error(), no) {
				t.Errorf("%s: the error has %q: %v", what, no, e)
			}
		}
	}
}

func wantSecret(t *testing.T, what string, v secrets.Source, ref, want string) {
	t.Helper()
	got, err := v.Read(t.Context(), project, ref)
	if err != nil || got.Reveal() != want {
		t.Errorf("%s: %q, %v; want %q", what, got.Reveal(), err, want)
	}
}

// server is a Vault, real or not, with a version 2 engine at secret/ and one of version 1 at team/old/.
type server interface {
	config() secrets.VaultConfig // with a token
	appRole() secrets.VaultConfig
	put(path string, data map[string]any)
	drop(path string) // the latest version
}

// contract is what is expected of any server.
func contract(t *testing.T, s server) {
	t.Helper()
	p2, p1 := "secret/coppice/"+string(project)+"/", "team/old/"+string(project)+"/"
	s.put(p2+"openai", map[string]any{"key": value, "number": 12345678, "short": "x", "line": value + "\n", "nested": map[string]any{"key": value}})
	s.put(p1+"a/b", map[string]any{"key": value + "-1"})
	for name, cfg := range map[string]secrets.VaultConfig{"token": s.config(), "AppRole": s.appRole()} {
		v, _ := open(t, cfg)
		wantSecret(t, name+", version 2", v, own("openai", "key"), value)
		for what, ref := range map[string]string{
			"no field": own("openai", "none"), "a number": own("openai", "number"), "too short": own("openai", "short"), "a line's end": own("openai", "line"),
			"an object": own("openai", "nested"), "no path": own("none", "key"),
		} {
			got, err := v.Read(t.Context(), project, ref)
			wantCode(t, name+", "+what, got, err, core.CodeSecretNotFound)
		}
		cfg.Prefix = "team/old/{project}"
		v, _ = open(t, cfg)
		wantSecret(t, name+", version 1, a mount of two segments", v, at(p1+"a/b", "key"), value+"-1")
		got, err := v.Read(t.Context(), project, at(p1+"a", "key"))
		wantCode(t, name+", no path in version 1", got, err, core.CodeSecretNotFound)
		cfg.Prefix = "keys/{project}"
		v, _ = open(t, cfg)
		got, err = v.Read(t.Context(), project, at("keys/"+string(project)+"/a", "key"))
		wantCode(t, name+", another engine", got, err, core.CodeSecretUnavailable)
		cfg.Prefix = "nowhere/{project}"
		v, _ = open(t, cfg)
		got, err = v.Read(t.Context(), project, at("nowhere/"+string(project)+"/a", "key"))
		wantCode(t, name+", no engine", got, err, core.CodeSecretUnavailable)
	}
	v, c := open(t, s.config())
	wantSecret(t, "before", v, own("openai", "key"), value)
	s.put(p2+"openai", map[string]any{"key": value + "-new"})
	wantSecret(t, "kept", v, own("openai", "key"), value)
	c.forward(secrets.FreshTime)
	wantSecret(t, "read again", v, own("openai", "key"), value+"-new")
	s.drop(p2 + "openai")
	c.forward(secrets.FreshTime)
	got, err := v.Read(t.Context(), project, own("openai", "key"))
	wantCode(t, "deleted", got, err, core.CodeSecretNotFound)
	s.put(p2+"openai", map[string]any{"key": value})
	wantSecret(t, "put again", v, own("openai", "key"), value)

	cfg := s.config()
	cfg.Namespace = "elsewhere"
	v, _ = open(t, cfg)
	if got, err = v.Read(t.Context(), project, own("openai", "key")); err != nil { // a server without namespaces heeds none
		wantCode(t, "another namespace", got, err, core.CodeSecretUnavailable)
	}
}

func TestContract(t *testing.T) {
	t.Parallel()
	contract(t, newFake(t))
}

// TestIsolation: what a project names is looked at before anybody is asked.
func TestIsolation(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.fail(func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("Vault was asked for %s", r.URL)
		w.WriteHeader(http.StatusTeapot)
	})
	v, _ := open(t, f.config())
	mux := secrets.Mux{"vault": v}
	base := "secret/coppice/" + string(project)
	for _, ref := range []string{
		"", "vault://", "vault", "http://" + base + "/a#key", "vault:" + base + "/a#key", "VAULT://" + base + "/a#key",
		at("secret/coppice/"+string(other)+"/a", "key"), at("secret/coppice/a", "key"), at("secret/a", "key"), at(base, "key"), at(base+"x/a", "key"), at(base+"/", "key"),
		at(base+"/../"+string(other)+"/a", "key"), at(base+"/./a", "key"), at(base+"/a/..", "key"), at(base+"//a", "key"), at("/"+base+"/a", "key"), at(base+"/a/", "key"),
		at(base+"/%2e%2e/a", "key"), at(base+"/a%2fb", "key"), at(base+"/a?version=1", "key"), at(base+"/a;b", "key"), at(base+"/a b", "key"), at(base+`/..\a`, "key"),
		at(base+"/a\n", "key"), at(base+"/a\x00", "key"), at(base+"/ä", "key"), at(base+"/-a", "key"), at(base+"/a", ""), "vault://" + base + "/a", at(base+"/a", "k/y"),
		at(base+"/a", "key#b"), at(base+"/a", " key"), at(base+"/"+strings.Repeat("a", 600), "key"), at(base+"/a", strings.Repeat("k", 129)),
		at("secret/data/coppice/"+string(project)+"/a", "key"), at("sys/"+base+"/a", "key"), at("user@"+base+"/a", "key"),
	} {
		if err := mux.Check(project, ref); core.CodeOf(err) != core.CodeInvalidField || len(core.MessageOf(err)) > 400 {
			t.Errorf("%q: %v", ref, err)
		}
		if got, err := mux.Read(t.Context(), project, ref); core.CodeOf(err) != core.CodeInvalidField || got.Reveal() != "" {
			t.Errorf("%q was read: %v", ref, err)
		}
	}
	for _, project := range []core.ProjectID{"", "prj_x", core.ProjectID("../" + string(other))} {
		if err := v.Check(project, at("secret/coppice/"+string(project)+"/a", "key")); err == nil {
			t.Errorf("project %q may read", project)
		}
	}
	for _, ref := range []string{own("a", "key"), own("a/b.c/d_e-f", "api.key"), own("1", "2")} {
		if err := mux.Check(project, ref); err != nil {
			t.Errorf("%q: %v", ref, err)
		}
	}
}

// TestConfig: what would give tokens away, or all projects the same secrets, does not start.
func TestConfig(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	for name, change := range map[string]func(*secrets.VaultConfig){
		"no address":           func(c *secrets.VaultConfig) { c.Address = "" },
		"without TLS":          func(c *secrets.VaultConfig) { c.Address = "http://vault.example:8200" },
		"a user":               func(c *secrets.VaultConfig) { c.Address = "https://a:b@vault.example" },
		"a path":               func(c *secrets.VaultConfig) { c.Address = "https://vault.example/v1" },
		"no project":           func(c *secrets.VaultConfig) { c.Prefix = "secret/coppice" },
		"no prefix":            func(c *secrets.VaultConfig) { c.Prefix = "" },
		"no mount":             func(c *secrets.VaultConfig) { c.Prefix = "{project}/secret" },
		"a part of a segment":  func(c *secrets.VaultConfig) { c.Prefix = "secret/a{project}" },
		"a way up":             func(c *secrets.VaultConfig) { c.Prefix = "secret/../{project}" },
		"nobody":               func(c *secrets.VaultConfig) { c.TokenFile = "" },
		"two at once":          func(c *secrets.VaultConfig) { c.KubernetesRole = "a" },
		"half a role":          func(c *secrets.VaultConfig) { c.TokenFile, c.RoleIDFile = "", "role" },
		"a token for no role":  func(c *secrets.VaultConfig) { c.KubernetesTokenFile = "jwt" },
		"a bad mount":          func(c *secrets.VaultConfig) { c.AuthMount = "a/../b" },
		"no authorities":       func(c *secrets.VaultConfig) { c.CAFile = f.file("token", "") },
		"authorities not here": func(c *secrets.VaultConfig) { c.CAFile = f.file("none", "") },
	} {
		cfg := f.config()
		change(&cfg)
		if _, err := secrets.OpenVault(cfg); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s: %v", name, err)
		}
	}
	cfg := f.config()
	cfg.Address = "http://127.0.0.1:8100"
	if _, err := secrets.OpenVault(cfg); err != nil {
		t.Errorf("an agent on loopback: %v", err)
	}
}

// TestAway: a secret that was read is used for a while when nobody can say whether it still may be, and not after; what Vault says is shown
// to nobody.
func TestAway(t *testing.T) {
	t.Parallel()
	status := func(s int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { refuse(w, s, fakeBody) }
	}
	for name, fault := range map[string]http.HandlerFunc{
		"too much": status(http.StatusTooManyRequests), "broken": status(http.StatusInternalServerError),
		"sealed": status(http.StatusServiceUnavailable), "a bad gateway": status(http.StatusBadGateway), "a bad request": status(http.StatusBadRequest),
		"another program's 403": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusForbidden)
			_, _ = w.Write([]byte(fakeBody))
		},
		"another program's 404": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write([]byte(fakeBody))
		},
		"no JSON": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(fakeBody)) },
		"nothing": func(http.ResponseWriter, *http.Request) {},
		"null":    func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("null")) },
		"elsewhere": func(w http.ResponseWriter, _ *http.Request) {
			answer(w, map[string]any{"data": map[string]any{"path": "", "type": "kv"}})
		},
		"a redirect": func(w http.ResponseWriter, r *http.Request) {
			if strings.HasPrefix(r.URL.Path, "/elsewhere") {
				t.Error("the token followed a redirect")
			}
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		},
		"a huge answer": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(`{"data":{"key":"`))
			for range 64 {
				_, _ = w.Write([]byte(strings.Repeat("a", 64<<10)))
			}
			_, _ = w.Write([]byte(`"}}`))
		},
		"a reset": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			f.put("secret/coppice/"+string(project)+"/a", map[string]any{"key": value})
			v, c := open(t, f.config())
			wantSecret(t, "before", v, own("a", "key"), value)
			f.fail(fault)
			c.forward(secrets.FreshTime)
			wantSecret(t, "while it is unreachable", v, own("a", "key"), value)
			got, err := v.Read(t.Context(), project, own("b", "key"))
			wantCode(t, "one that was not read before", got, err, core.CodeSecretUnavailable)
			c.forward(secrets.StaleTime - secrets.FreshTime - time.Minute)
			wantSecret(t, "shortly before the end", v, own("a", "key"), value)
			c.forward(time.Minute)
			got, err = v.Read(t.Context(), project, own("a", "key"))
			wantCode(t, "after it", got, err, core.CodeSecretUnavailable)
			f.fail(nil)
			c.forward(secrets.PauseTime)
			wantSecret(t, "when it is back", v, own("a", "key"), value)
		})
	}
}

// TestDenied: a denial of Vault ends the use of a secret at the next read, and a fault of Vault after it does not bring the secret back.
func TestDenied(t *testing.T) {
	t.Parallel()
	path := "secret/coppice/" + string(project) + "/a"
	for name, deny := range map[string]func(f *fakeVault){
		"the policy withdrawn": func(f *fakeVault) {
			f.fail(func(w http.ResponseWriter, _ *http.Request) { refuse(w, http.StatusForbidden, "permission denied") })
		},
		"the token revoked": func(f *fakeVault) { f.do(func() { f.tokens = nil }) },
		"the engine unmounted": func(f *fakeVault) {
			f.fail(func(w http.ResponseWriter, _ *http.Request) { refuse(w, http.StatusNotFound, "no handler for route") })
		},
		"another engine":             func(f *fakeVault) { f.do(func() { f.mounts["secret/"] = "transit" }) },
		"the latest version deleted": func(f *fakeVault) { f.drop(path) },
		"the secret destroyed":       func(f *fakeVault) { f.do(func() { delete(f.data, path) }) },
		"no login any more": func(f *fakeVault) {
			f.do(func() { f.tokens = nil })
			f.file("secret", "another\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			f.put(path, map[string]any{"key": value})
			cfg := f.config()
			if name == "no login any more" {
				cfg = f.appRole()
			}
			v, c := open(t, cfg)
			wantSecret(t, "before", v, own("a", "key"), value)
			deny(f)
			c.forward(secrets.FreshTime)
			if got, err := v.Read(t.Context(), project, own("a", "key")); err == nil || got.Reveal() != "" {
				t.Errorf("a secret that was denied is used: %v", err)
			}
			f.fail(func(w http.ResponseWriter, _ *http.Request) { refuse(w, http.StatusServiceUnavailable) })
			c.forward(secrets.PauseTime)
			got, err := v.Read(t.Context(), project, own("a", "key"))
			wantCode(t, "sealed after the denial", got, err, core.CodeSecretUnavailable)
		})
	}
}

// TestKeptSecrets: what is remembered has a bound, and a project that names many secrets takes none of what others have.
func TestKeptSecrets(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	theirs := at("secret/coppice/"+string(other)+"/a", "key")
	f.put("secret/coppice/"+string(other)+"/a", map[string]any{"key": value})
	v, c := open(t, f.config())
	if _, err := v.Read(t.Context(), other, theirs); err != nil {
		t.Fatal(err)
	}
	for i := range secrets.MaxKeptOf + 64 {
		name := fmt.Sprintf("n%d", i)
		f.put("secret/coppice/"+string(project)+"/"+name, map[string]any{"key": value})
		wantSecret(t, name, v, own(name, "key"), value)
	}
	if kept := v.Kept(); kept != secrets.MaxKeptOf+1 {
		t.Errorf("%d secrets are remembered, want %d", kept, secrets.MaxKeptOf+1)
	}
	f.fail(func(w http.ResponseWriter, _ *http.Request) { refuse(w, http.StatusServiceUnavailable) })
	c.forward(secrets.FreshTime)
	if got, err := v.Read(t.Context(), other, theirs); err != nil || got.Reveal() != value {
		t.Errorf("another project's secret was forgotten: %v", err)
	}
}

// TestStalled: an answer that does not come has an end, and who asks next does not wait for it again.
func TestStalled(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	var asked atomic.Int64
	f.fail(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		_, _ = w.Write([]byte(`{"data":{"key":`))
		_ = http.NewResponseController(w).Flush()
		select {
		case <-release:
		case <-r.Context().Done():
		}
	})
	v, _ := open(t, f.config())
	began := time.Now()
	got, err := v.Read(t.Context(), project, own("a", "key"))
	wantCode(t, "stalled", got, err, core.CodeSecretUnavailable)
	if took := time.Since(began); took > secrets.AskTime+5*time.Second {
		t.Errorf("it took %v", took)
	}
	before := asked.Load()
	got, err = v.Read(t.Context(), project, own("b", "key"))
	wantCode(t, "another, at once", got, err, core.CodeSecretUnavailable)
	if asked.Load() != before {
		t.Error("it was asked again at once")
	}
}

// TestTrust: who is not certified gets no token.
func TestTrust(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.fail(func(http.ResponseWriter, *http.Request) { t.Error("Vault was asked") })
	cfg := f.config()
	cfg.CAFile = ""
	v, _ := open(t, cfg)
	got, err := v.Read(t.Context(), project, own("a", "key"))
	wantCode(t, "another authority", got, err, core.CodeSecretUnavailable)
	if !strings.Contains(core.MessageOf(err), "--vault-ca-file") {
		t.Errorf("it says %v", err)
	}
}

// TestPlaces: what is wrong with one path is nothing to the others.
func TestPlaces(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	path := "secret/coppice/" + string(project) + "/"
	f.put(path+"huge", map[string]any{"key": strings.Repeat("a", 2<<20)})
	f.put(path+"long", map[string]any{"key": strings.Repeat("a", grant.MaxSecret+1)})
	f.put(path+"a", map[string]any{"key": value})
	v, _ := open(t, f.config())
	got, err := v.Read(t.Context(), project, own("huge", "key"))
	wantCode(t, "huge", got, err, core.CodeSecretUnavailable)
	got, err = v.Read(t.Context(), project, own("long", "key"))
	wantCode(t, "long", got, err, core.CodeSecretNotFound)
	wantSecret(t, "another", v, own("a", "key"), value)
}

// TestRemounted: an engine that was upgraded, or replaced, is found out.
func TestRemounted(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.put("secret/coppice/"+string(project)+"/a", map[string]any{"key": value})
	f.do(func() { f.mounts["secret/"] = "1" })
	v, c := open(t, f.config())
	wantSecret(t, "version 1", v, own("a", "key"), value)
	f.do(func() { f.mounts["secret/"] = "2" })
	c.forward(secrets.FreshTime)
	wantSecret(t, "version 2", v, own("a", "key"), value)
}

// TestTokenFile: the file is read again, and a file that is missing gives nobody another identity.
func TestTokenFile(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.put("secret/coppice/"+string(project)+"/a", map[string]any{"key": value})
	f.put("secret/coppice/"+string(project)+"/b", map[string]any{"key": value})
	v, c := open(t, f.config())
	wantSecret(t, "the first token", v, own("a", "key"), value)
	f.do(func() { f.tokens = map[string]bool{"hvs.second": true} })
	got, err := v.Read(t.Context(), project, own("b", "key"))
	wantCode(t, "an old token", got, err, core.CodeSecretUnavailable)
	f.file("token", "hvs.second\n")
	wantSecret(t, "the second token", v, own("b", "key"), value)
	f.file("token", "\n")
	c.forward(secrets.FreshTime + secrets.PauseTime)
	got, err = v.Read(t.Context(), project, own("c", "key"))
	wantCode(t, "an empty file", got, err, core.CodeSecretUnavailable)
}

// TestCredentialsAreBounded: no more than 16 KiB of a file are read, whatever it is. One that is longer is refused, and nothing of it is sent; with a
// good one in its place all goes on.
func TestCredentialsAreBounded(t *testing.T) {
	t.Parallel()
	const most = 16 << 10
	long := func(text string, n int) string { return text + strings.Repeat("\n", n-len(text)) }
	for name, tc := range map[string]struct {
		file, good string
		config     func(*fakeVault) secrets.VaultConfig
	}{
		"token":     {"token", "root-token", (*fakeVault).config},
		"role":      {"role", "the-role", (*fakeVault).appRole},
		"secret id": {"secret", "the-secret-id", (*fakeVault).appRole},
		"Kubernetes": {"jwt", "the.service.account", func(f *fakeVault) secrets.VaultConfig {
			c := f.config()
			c.TokenFile, c.KubernetesRole, c.KubernetesTokenFile, c.AuthMount = "", "coppice", f.file("jwt", ""), "cluster-2/kubernetes"
			return c
		}},
	} {
		f := newFake(t)
		for _, secret := range []string{"a", "b", "c", "d"} {
			f.put("secret/coppice/"+string(project)+"/"+secret, map[string]any{"key": value})
		}
		cfg := tc.config(f)
		var asked atomic.Int64
		refused := func(what, secret string) {
			t.Helper()
			v, _ := open(t, cfg)
			f.fail(func(w http.ResponseWriter, _ *http.Request) { asked.Add(1) })
			got, err := v.Read(t.Context(), project, own(secret, "key"))
			f.fail(nil)
			wantCode(t, name+", "+what, got, err, core.CodeSecretUnavailable)
			if !strings.Contains(core.MessageOf(err), "longer than 16 KiB") || asked.Load() != 0 {
				t.Errorf("%s, %s: Vault was asked %d times, and it says %v", name, what, asked.Load(), err)
			}
		}
		works := func(what, secret string) {
			t.Helper()
			v, _ := open(t, cfg)
			wantSecret(t, name+", "+what, v, own(secret, "key"), value)
		}
		f.file(tc.file, long(tc.good, most))
		works("the longest", "a")
		f.file(tc.file, long(tc.good, most+1))
		refused("one byte more", "b")
		f.file(tc.file, tc.good)
		works("a good one again", "c")
		path := f.file(tc.file, "")
		if err := errors.Join(os.Remove(path), os.Symlink("/dev/zero", path)); err != nil {
			t.Fatal(err)
		}
		refused("a file without an end", "d")
	}
}

// TestLogin: a token is renewed while it can be, and made again when it has ended or was revoked, once for all who ask.
func TestLogin(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	path := "secret/coppice/" + string(project) + "/"
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g"} {
		f.put(path+name, map[string]any{"key": value})
	}
	kube := f.config()
	kube.TokenFile, kube.KubernetesRole, kube.KubernetesTokenFile, kube.AuthMount = "", "coppice", f.file("jwt", ""), "cluster-2/kubernetes"
	v, _ := open(t, kube)
	wantSecret(t, "Kubernetes", v, own("a", "key"), value)
	f.do(func() { f.logins = 0 })

	v, c := open(t, f.appRole())
	counts := func(what string, logins, renewals int) {
		t.Helper()
		f.do(func() {
			if f.logins != logins || f.renewals != renewals {
				t.Errorf("%s: %d logins, %d renewals; want %d, %d", what, f.logins, f.renewals, logins, renewals)
			}
		})
	}
	wantSecret(t, "a login", v, own("a", "key"), value)
	wantSecret(t, "the same token", v, own("b", "key"), value)
	counts("the first", 1, 0)
	c.forward(50 * time.Minute)
	wantSecret(t, "a renewal", v, own("c", "key"), value)
	counts("renewed", 1, 1)
	f.do(func() { f.lease = 600 }) // the end of its longest life is near
	c.forward(50 * time.Minute)
	wantSecret(t, "little more", v, own("d", "key"), value)
	counts("near its end", 2, 2)
	c.forward(time.Hour)
	wantSecret(t, "after its end", v, own("e", "key"), value)
	counts("after its end", 3, 2)
	f.do(func() { f.tokens = map[string]bool{} })
	c.forward(time.Minute)
	wantSecret(t, "revoked", v, own("f", "key"), value)
	counts("revoked", 4, 2)
	f.do(func() { f.tokens = map[string]bool{} })
	f.file("secret", "another\n")
	c.forward(time.Minute)
	got, err := v.Read(t.Context(), project, own("g", "key"))
	wantCode(t, "refused", got, err, core.CodeSecretUnavailable)
	if !strings.Contains(core.MessageOf(err), "log in") {
		t.Errorf("it says %v", err)
	}
	got, err = v.Read(t.Context(), project, own("f", "key"))
	wantCode(t, "what was read before the login was refused", got, err, core.CodeSecretUnavailable)
}

// TestTogether: a burst of readers of one secret asks once.
func TestTogether(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.put("secret/coppice/"+string(project)+"/a", map[string]any{"key": value})
	v, _ := open(t, f.appRole())
	done := make(chan struct{})
	for range 32 {
		go func() {
			defer func() { done <- struct{}{} }()
			wantSecret(t, "one of many", v, own("a", "key"), value)
		}()
	}
	for range 32 {
		<-done
	}
	f.do(func() {
		if f.logins != 1 || f.reads > 2 {
			t.Errorf("%d logins and %d reads", f.logins, f.reads)
		}
	})
}

// TestEnv: only variables that are meant to be given away are.
func TestEnv(t *testing.T) {
	t.Parallel()
	vars := map[string]string{"COPPICE_SECRET_A": value, "COPPICE_SECRET_SHORT": "x", "COPPICE_DATABASE": value, "PATH": value}
	mux := secrets.Mux{"env": secrets.Env{Lookup: func(n string) (string, bool) { v, ok := vars[n]; return v, ok }}}
	wantSecret(t, "a variable", mux, "env://COPPICE_SECRET_A", value)
	for ref, code := range map[string]core.Code{
		"env://COPPICE_SECRET_NONE": core.CodeSecretNotFound, "env://COPPICE_SECRET_SHORT": core.CodeSecretNotFound, "env://COPPICE_DATABASE": core.CodeInvalidField,
		"env://PATH": core.CodeInvalidField, "env://COPPICE_SECRET_": core.CodeInvalidField, "env://COPPICE_SECRET_A\n": core.CodeInvalidField, "env://": core.CodeInvalidField,
		own("a", "key"): core.CodeInvalidField,
	} {
		got, err := mux.Read(t.Context(), project, ref)
		wantCode(t, ref, got, err, code)
	}
}
