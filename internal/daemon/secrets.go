package daemon

import (
	"context"
	"log/slog"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/secrets"
	"github.com/coppice-dev/coppice/core"
)

// SecretsConfig says where the secrets of grants are that users do not give to the controller.
type SecretsConfig struct {
	Vault secrets.VaultConfig // without an Address: no Vault
	// Env looks variables of this process up, for development: every project may use those that are called COPPICE_SECRET_.
	Env    bool
	Lookup func(name string) (string, bool) `json:"-"`
}

// validate says what is wrong before anything is started.
func (c SecretsConfig) validate() error {
	v := c.Vault
	if v.Address != "" {
		return v.Validate()
	}
	if v.CAFile+v.Namespace+v.TokenFile+v.RoleIDFile+v.SecretIDFile+v.KubernetesRole+v.KubernetesTokenFile+v.AuthMount != "" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "--vault-addr: how to be known to a Vault is said, but not where it is")
	}
	return nil
}

// Open makes what the configuration says; nil where it says nothing.
func (c SecretsConfig) Open(ctx context.Context, log *slog.Logger) (grants.SecretSource, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	mux := secrets.Mux{}
	if c.Vault.Address != "" {
		c.Vault.Log = log.With("component", "vault")
		v, err := secrets.OpenVault(c.Vault)
		if err != nil {
			return nil, err
		}
		mux["vault"] = v
	}
	if c.Env {
		log.WarnContext(ctx, "every project may use the variables of this process that are called COPPICE_SECRET_: for development only")
		mux["env"] = secrets.Env{Lookup: c.Lookup}
	}
	if len(mux) == 0 {
		return nil, nil
	}
	return mux, nil
}
