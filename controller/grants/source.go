package grants

import (
	"context"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// SecretSource has the secrets of grants that are not in the database. It is safe for concurrent use.
type SecretSource interface {
	// Check refuses a text that cannot name a secret of a project. It asks nobody.
	Check(project core.ProjectID, ref string) error
	// Read returns the present secret. It fails with SECRET_NOT_FOUND, or with SECRET_UNAVAILABLE if the source cannot be asked.
	Read(ctx context.Context, project core.ProjectID, ref string) (grant.Secret, error)
}

func (m *Manager) secretSource() (SecretSource, error) {
	if m.cfg.Source == nil {
		return nil, core.Errorf(core.Unavailable, core.CodeSecretUnavailable,
			"vault_ref: this controller has no source of secrets; start controllers with --vault-addr, or give the secret itself")
	}
	return m.cfg.Source, nil
}

func (m *Manager) readSource(ctx context.Context, project core.ProjectID, ref string) (grant.Secret, error) {
	source, err := m.secretSource()
	if err != nil {
		return grant.Secret{}, err
	}
	return source.Read(ctx, project, ref)
}
