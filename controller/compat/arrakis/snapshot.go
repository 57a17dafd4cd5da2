package arrakis

import (
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func takeSnapshot(r *http.Request, c call) (any, error) {
	var q struct {
		SnapshotID string `json:"snapshotId"`
	}
	if err := readJSON(c.body, &q); err != nil {
		return nil, err
	}
	ws, err := c.running(r)
	if err != nil {
		return nil, err
	}
	if q.SnapshotID == "" { // as py-arrakis makes it
		q.SnapshotID = "snapshot-" + c.name + "-" + time.Now().UTC().Format("20060102-150405")
	}
	if f := checkName("snapshot id", q.SnapshotID, maxSnapshot); f != nil {
		return nil, f
	}
	cp, err := c.CreateCheckpoint(r.Context(), ws.ID, coppice.CreateCheckpointRequest{
		Name: coppiceName(q.SnapshotID), Labels: coppice.Labels{labelSnapshot: q.SnapshotID, labelOf: c.name},
	})
	if err != nil {
		return nil, err
	}
	return map[string]string{"snapshotId": q.SnapshotID, "checkpointId": cp.ID}, nil
}

// restore starts a VM from a snapshot. The VM of the snapshot may go on running: the new one has an identity of its own. A snapshot
// of the VM with this name sets this VM back, in place. A snapshot of another VM never replaces a VM.
func (c call) restore(r *http.Request, name, snapshot string, present coppice.Workspace) (coppice.Workspace, error) {
	cp, err := c.snapshot(r, snapshot, present.ID)
	if err != nil {
		return present, err
	}
	if present.ID != "" && present.State != coppice.WorkspaceLost {
		if cp.Labels[labelOf] != name && cp.WorkspaceID != present.ID {
			return present, shared.Failf(http.StatusConflict, "VM %q exists already, and snapshot %q is not one of its own; destroy the VM or choose another name", shared.Clip(name), shared.Clip(snapshot))
		}
		result, err := c.RestoreWorkspace(r.Context(), present.ID, cp.ID)
		return result.Workspace, err
	}
	req := coppice.RestoreCheckpointRequest{WorkspaceName: coppiceName(name), Labels: coppice.Labels{labelName: name}}
	if !c.layer.OpenEgress {
		req.Network = c.layer.network() // otherwise it reaches what the VM of the snapshot may reach
	}
	result, err := c.RestoreCheckpoint(r.Context(), cp.ID, req)
	return result.Workspace, err
}

// snapshot finds a snapshot by its id. The name of any other checkpoint of the VM is good, too, and for a client with a key that of any
// checkpoint of the project. Without a key, that would open what other clients have made.
func (c call) snapshot(r *http.Request, id string, vm coppice.WorkspaceID) (coppice.Checkpoint, error) {
	if f := checkName("snapshot id", id, maxSnapshot); f != nil {
		return coppice.Checkpoint{}, f
	}
	for cp, err := range c.Checkpoints(r.Context(), coppice.CheckpointFilter{Name: coppiceName(id)}) {
		if err == nil && c.open && cp.Labels[labelSnapshot] != id && cp.WorkspaceID != vm {
			break
		}
		return cp, err
	}
	return coppice.Checkpoint{}, shared.Failf(http.StatusNotFound, "snapshot %q was not found", shared.Clip(id))
}
