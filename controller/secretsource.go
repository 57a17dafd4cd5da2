package controller

import (
	"context"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// SecretSource is where the secrets of grants are that are not kept in the database. It is safe for concurrent use.
type SecretSource interface {
	// Check refuses what cannot name a secret of a project, without asking anybody.
	Check(project core.ProjectID, ref string) error
	// Read returns the secret that is there now; SECRET_NOT_FOUND, or SECRET_UNAVAILABLE when nobody can say.
	Read(ctx context.Context, project core.ProjectID, ref string) (grant.Secret, error)
}
