package pass_test

import (
	"encoding/base64"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pass"
)

func signer(t testing.TB) *pass.Signer {
	t.Helper()
	s, err := pass.NewSigner()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestPass(t *testing.T) {
	t.Parallel()
	ours, theirs := signer(t), signer(t)
	runner := core.NewID[core.RunnerID]()
	claims := pass.Claims{Runner: runner, Workspace: core.NewID[core.WorkspaceID](), Sandbox: core.NewID[core.SandboxID](), Epoch: 3, Scope: pass.Attach, Session: core.NewID[core.SessionID]()}
	v := pass.NewVerifier(runner)
	v.Learn([][]byte{ours.Public(), []byte("no key")})
	sign := func(s *pass.Signer, change func(*pass.Claims)) string {
		c := claims
		change(&c)
		token, _, err := s.Sign(c, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	same := func(*pass.Claims) {}
	now := time.Now().Add(time.Millisecond)
	good := sign(ours, same)
	got, err := v.Verify(good, pass.Attach, now)
	if err != nil || got.Sandbox != claims.Sandbox || got.Epoch != 3 || got.Session != claims.Session || got.ID == "" {
		t.Fatalf("%+v, %v", got, err)
	}
	head, tail, _ := strings.Cut(sign(ours, same), ".")
	forged := "cpp_" + base64.RawURLEncoding.EncodeToString([]byte(`{"scope":"attach"}`)) + "." + tail
	files := sign(ours, func(c *pass.Claims) { c.Scope = pass.Files })
	for name, c := range map[string]struct {
		token string
		scope pass.Scope
		now   time.Time
	}{
		"a second time":          {good, pass.Attach, now},
		"of another cluster":     {sign(theirs, same), pass.Attach, now},
		"for another runner":     {sign(ours, func(c *pass.Claims) { c.Runner = core.NewID[core.RunnerID]() }), pass.Attach, now},
		"for something else":     {files, pass.Attach, now},
		"attach for files":       {sign(ours, same), pass.Files, now},
		"too late":               {sign(ours, same), pass.Attach, now.Add(time.Hour)},
		"too early":              {sign(ours, same), pass.Attach, now.Add(-time.Hour)},
		"empty":                  {"", pass.Attach, now},
		"no signature":           {head + ".", pass.Attach, now},
		"with another signature": {forged, pass.Attach, now},
		"without its prefix":     {strings.TrimPrefix(sign(ours, same), "cpp_"), pass.Attach, now},
		"endless":                {sign(ours, same) + strings.Repeat("A", 4096), pass.Attach, now},
	} {
		if _, err := v.Verify(c.token, c.scope, c.now); core.CodeOf(err) != core.CodeUnauthenticated {
			t.Errorf("%s: %v", name, err)
		}
	}
	// One for files is good until it ends, and a runner that has started again takes none for one use from before.
	for range 2 {
		if _, err := v.Verify(files, pass.Files, now); err != nil {
			t.Error(err)
		}
	}
	early := sign(ours, same)
	<-time.After(2 * time.Millisecond) // the clock must have moved on
	again := pass.NewVerifier(runner)
	again.Learn([][]byte{ours.Public()})
	if _, err := again.Verify(early, pass.Attach, time.Now()); core.CodeOf(err) != core.CodeUnauthenticated {
		t.Errorf("a pass from before the runner's start: %v", err)
	}
	if _, err := again.Verify(files, pass.Files, time.Now()); err != nil {
		t.Error(err)
	}
	if _, err := pass.NewVerifier(runner).Verify(files, pass.Files, now); core.CodeOf(err) != core.CodeUnauthenticated {
		t.Errorf("without a key: %v", err)
	}
	kept, err := pass.LoadSigner(ours.Seed())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.Verify(sign(kept, func(c *pass.Claims) { c.Scope = pass.Files }), pass.Files, time.Now()); err != nil {
		t.Error(err)
	}
}

func FuzzVerify(f *testing.F) {
	s := signer(f)
	runner := core.NewID[core.RunnerID]()
	token, _, err := s.Sign(pass.Claims{Runner: runner, Scope: pass.Files}, time.Hour)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(token)
	f.Add("cpp_.")
	f.Add("cpp_e30.AAAA")
	v := pass.NewVerifier(runner)
	v.Learn([][]byte{s.Public()})
	f.Fuzz(func(t *testing.T, other string) {
		if _, err := v.Verify(other, pass.Files, time.Now()); err == nil && other != token {
			t.Errorf("%q is taken", other)
		}
	})
}
