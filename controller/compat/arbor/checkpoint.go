package arbor

import (
	"iter"
	"net/http"
	"net/url"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// fullVM is the only kind of checkpoint: the whole machine.
const fullVM = "full_vm"

// maxCheckpoints bounds a list, which has no pages.
const maxCheckpoints = 1000

type checkpointRequest struct {
	Name  string `json:"name"`
	Mode  string `json:"mode"`
	Notes string `json:"notes"`
}

func checkpoint(r *http.Request, c call) (answer, error) {
	var q checkpointRequest
	if err := c.read(&q); err != nil {
		return answer{}, err
	}
	if q.Mode != "" && q.Mode != fullVM {
		return answer{}, unsupported("mode is %q: a checkpoint is always of the whole machine (%s)", shared.Clip(q.Mode), fullVM)
	}
	req := coppice.CreateCheckpointRequest{Name: q.Name}
	if q.Notes != "" {
		req.Annotations = coppice.Annotations{"notes": q.Notes}
	}
	op, err := c.begin(r.Context(), "/v1/workspaces/"+url.PathEscape(c.id)+"/checkpoints", req)
	if err != nil {
		return answer{}, err
	}
	return answer{http.StatusAccepted, map[string]any{"checkpoint_id": op.CheckpointID, "operation_id": op.ID, "state": "pending"}}, nil
}

// checkpoints lists the newest checkpoints of a workspace.
func checkpoints(r *http.Request, c call) (answer, error) {
	if _, err := c.Workspace(r.Context(), c.id); err != nil {
		return answer{}, err
	}
	newest, err := first(c.Checkpoints(r.Context(), coppice.CheckpointFilter{WorkspaceID: c.id}), maxCheckpoints)
	if err != nil {
		return answer{}, err
	}
	list := []map[string]any{}
	for _, cp := range newest {
		view, err := with(cp, map[string]any{"checkpoint_id": cp.ID, "mode": fullVM, "notes": cp.Annotations["notes"]})
		if err != nil {
			return answer{}, err
		}
		list = append(list, view)
	}
	return answer{http.StatusOK, list}, nil
}

// first returns the first items of a list.
func first[T any](list iter.Seq2[T, error], most int) (out []T, err error) {
	for item, err := range list {
		if err != nil {
			return nil, err
		}
		if out = append(out, item); len(out) == most {
			break
		}
	}
	return out, nil
}

type branchRequest struct {
	BranchName    string         `json:"branch_name"`
	WorkspaceName string         `json:"workspace_name"`
	Target        string         `json:"target"`
	Labels        coppice.Labels `json:"labels"`
	TTLSeconds    int64          `json:"ttl_seconds"`
	PostRestore   struct {
		Quarantine     *bool `json:"quarantine"`
		IdentityReseal *bool `json:"identity_reseal"`
	} `json:"post_restore"`
}

// readBranch reads the request of a fork or a restore. Coppice always does what post_restore asks for, and never less.
func (c call) readBranch() (q branchRequest, err error) {
	if err := c.read(&q); err != nil {
		return q, err
	}
	for field, on := range map[string]*bool{"post_restore.quarantine": q.PostRestore.Quarantine, "post_restore.identity_reseal": q.PostRestore.IdentityReseal} {
		if on != nil && !*on {
			return q, unsupported("%s is false: every fork is quarantined and gets an identity of its own", field)
		}
	}
	if q.Target != "" && q.Target != "new_workspace" {
		return q, unsupported("target is %q: through this API, a checkpoint is restored as a new_workspace", shared.Clip(q.Target))
	}
	return q, nil
}

func fork(r *http.Request, c call) (answer, error) {
	q, err := c.readBranch()
	if err != nil {
		return answer{}, err
	}
	if q.BranchName == "" {
		q.BranchName = q.WorkspaceName
	}
	req := coppice.ForkCheckpointRequest{BranchName: q.BranchName, Labels: q.Labels, TTLSeconds: q.TTLSeconds}
	return c.branch(r, "fork", req)
}

func restore(r *http.Request, c call) (answer, error) {
	q, err := c.readBranch()
	if err != nil {
		return answer{}, err
	}
	if q.BranchName != "" {
		return answer{}, shared.Failf(http.StatusBadRequest, "branch_name is for a fork; a restore takes workspace_name")
	}
	return c.branch(r, "restore", coppice.RestoreCheckpointRequest{WorkspaceName: q.WorkspaceName, Labels: q.Labels, TTLSeconds: q.TTLSeconds})
}

func (c call) branch(r *http.Request, how string, req any) (answer, error) {
	op, err := c.begin(r.Context(), "/v1/checkpoints/"+url.PathEscape(c.id)+"/"+how, req)
	if err != nil {
		return answer{}, err
	}
	return c.begun(op, "restoring")
}
