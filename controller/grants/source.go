package grants

import (
	"context"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// SecretSource has the secrets of grants that the database does not keep. It is safe for concurrent use.
type SecretSource interface {
	// Check refuses what cannot name a secret of a project, without asking anybody.
	Check(project core.ProjectID, ref string) error
	// Read returns the secret that is there now; SECRET_NOT_FOUND, or SECRET_UNAVAILABLE when nobody can say.
	Read(ctx context.Context, project core.ProjectID, ref string) (grant.Secret, error)
}

func (m *Manager) secretSource() (SecretSource, error) {
	if m.cfg.Source == nil {
		return nil, core.Errorf(core.Unavailable, core.CodeSecretUnavailable,
			"vault_ref: this controller knows no place that secrets are in; start controllers with --vault-addr, or give the secret itself")
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
