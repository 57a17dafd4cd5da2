package daemon

import (
	"log/slog"
	"testing"

	"github.com/coppice-dev/coppice/controller/secrets"
	"github.com/coppice-dev/coppice/core"
)

// TestSecretsConfig: what is not asked for is not there, and what is works.
func TestSecretsConfig(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	project, value := core.NewID[core.ProjectID](), "a value of the environment"
	lookup := func(string) (string, bool) { return value, true }
	if s, err := (SecretsConfig{Lookup: lookup}).Open(t.Context(), log); s != nil || err != nil {
		t.Errorf("nothing is %v, %v", s, err)
	}
	s, err := SecretsConfig{Env: true, Lookup: lookup}.Open(t.Context(), log)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := s.Read(t.Context(), project, "env://COPPICE_SECRET_A"); err != nil || got.Reveal() != value {
		t.Errorf("the environment: %v, %v", got, err)
	}
	ref := "vault://secret/coppice/" + string(project) + "/a#key"
	if err := s.Check(project, ref); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("a Vault that is none: %v", err)
	}
	v := secrets.VaultConfig{Address: "https://127.0.0.1:1", TokenFile: "/nowhere", Prefix: "secret/coppice/{project}/"}
	if s, err = (SecretsConfig{Vault: v, Lookup: lookup}).Open(t.Context(), log); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(project, "env://COPPICE_SECRET_A"); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("the environment, which was not asked for: %v", err)
	}
	if _, err := s.Read(t.Context(), project, ref); core.CodeOf(err) != core.CodeSecretUnavailable {
		t.Errorf("without a token: %v", err)
	}
	v.Address = ""
	if _, err := (SecretsConfig{Vault: v}).Open(t.Context(), log); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("a token for no Vault: %v", err)
	}
}
