package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Operations lists the operations of a project, newest first, without their results.
func (c *Controller) Operations(ctx context.Context, project core.ProjectID, f OperationFilter) ([]Operation, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]Operation, error) { return tx.Operations(ctx, f) })
}

// cancelable are the kinds of operations that can be canceled: they make workspaces, and to undo that changes nothing that was there before.
var cancelable = map[OperationKind]bool{OpCreateWorkspace: true, OpForkCheckpoint: true, OpForkWorkspace: true, OpRestoreCheckpoint: true, OpStepCheckpoint: true, OpBuildImage: true, OpStepWorkspace: true}

// CancelOperation ends an operation before its time: what it has begun is undone, and it fails with OPERATION_CANCELED. The capture of a
// fork of a workspace is finished first. It is no error if the operation has ended.
func (c *Controller) CancelOperation(ctx context.Context, project core.ProjectID, id core.OperationID, wait time.Duration) (Answer, error) {
	return c.operations.Cancel(ctx, project, id, wait)
}
