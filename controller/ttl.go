package controller

import (
	"context"

	"github.com/coppice-dev/coppice/core"
)

// TTLTx has the statements for workspaces that are suspended at the end of their time.
type TTLTx interface {
	// RenewTTL gives a workspace that is suspended at the end of its time all of its time again.
	RenewTTL(ctx context.Context, id core.WorkspaceID) error
}
