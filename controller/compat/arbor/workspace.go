package arbor

import (
	"errors"
	"maps"
	"net/http"
	"net/url"
	"strings"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Labels keep what a client has said and Coppice has no field for.
const (
	labelRunnerClass  = "arbor/runner-class"
	labelRepoProvider = "arbor/repo-provider"
	labelRepoURL      = "arbor/repo-url"
	labelRepoRef      = "arbor/repo-ref"
	labelRepoCommit   = "arbor/repo-commit"
	labelImage        = "arbor/image"
)

// The egress policies of Arbor, which has only the first.
const (
	defaultDeny = "default-deny"
	allowAll    = "allow-all"
)

type repo struct {
	Provider string `json:"provider,omitempty"`
	URL      string `json:"url,omitempty"`
	Ref      string `json:"ref,omitempty"`
	Commit   string `json:"commit,omitempty"`
}

type createRequest struct {
	Name    string `json:"name"`
	Repo    *repo  `json:"repo"`
	Runtime struct {
		RunnerClass string `json:"runner_class"`
		VCPUs       *int   `json:"vcpu_count"`
		MemoryMiB   *int   `json:"memory_mib"`
		DiskGB      *int   `json:"disk_gb"`
	} `json:"runtime"`
	Image struct {
		BaseImageID string `json:"base_image_id"`
	} `json:"image"`
	Network struct {
		EgressPolicy string         `json:"egress_policy"`
		Allow        *coppice.Allow `json:"allow"`
	} `json:"network"`
	Env        coppice.Env    `json:"env"`
	Labels     coppice.Labels `json:"labels"`
	TTLSeconds int64          `json:"ttl_seconds"`
}

// create begins the making of a workspace. The repository is kept and shown, and not cloned, as Arbor does.
func create(r *http.Request, c call) (answer, error) {
	var q createRequest
	if err := c.read(&q); err != nil {
		return answer{}, err
	}
	network, err := networkOf(q)
	if err != nil {
		return answer{}, err
	}
	image, err := c.image(r, q.Image.BaseImageID)
	if err != nil {
		return answer{}, err
	}
	req := coppice.CreateWorkspaceRequest{
		Name: q.Name, Image: image, Env: q.Env, TTLSeconds: q.TTLSeconds, Network: network,
		Resources: coppice.ResourcesRequest{VCPUs: q.Runtime.VCPUs, MemoryMiB: q.Runtime.MemoryMiB, DiskGiB: q.Runtime.DiskGB}, Labels: labelsOf(q),
	}
	op, err := c.begin(r.Context(), "/v1/workspaces", req)
	if err != nil {
		return answer{}, err
	}
	return c.begun(op, "creating")
}

func networkOf(q createRequest) (n coppice.NetworkRequest, err error) {
	n.Allow = q.Network.Allow
	switch q.Network.EgressPolicy {
	case "", defaultDeny, string(coppice.EgressDenyAll):
		n.EgressPolicy = coppice.EgressDenyAll
	case allowAll:
		n.EgressPolicy = coppice.EgressAllowAll
	default:
		return n, shared.Failf(http.StatusBadRequest, "network.egress_policy is %q; it is %s or %s", shared.Clip(q.Network.EgressPolicy), defaultDeny, allowAll)
	}
	return n, nil
}

// image is the image of a new workspace: the one of this name, or the default one. Arbor itself takes no notice of the name.
func (c call) image(r *http.Request, name string) (string, error) {
	if name == "" {
		return "", nil
	}
	for image, err := range c.Images(r.Context()) {
		if errors.Is(err, coppice.CodePermissionDenied) { // a key that makes workspaces need not see the images
			return "", nil
		}
		if err != nil {
			return "", err
		}
		if image.Name == name {
			return name, nil
		}
	}
	return "", nil
}

func labelsOf(q createRequest) coppice.Labels {
	labels := coppice.Labels{}
	maps.Copy(labels, q.Labels)
	keep := map[string]string{labelRunnerClass: q.Runtime.RunnerClass, labelImage: q.Image.BaseImageID}
	if q.Repo != nil {
		keep[labelRepoProvider], keep[labelRepoURL], keep[labelRepoRef], keep[labelRepoCommit] = q.Repo.Provider, q.Repo.URL, q.Repo.Ref, q.Repo.Commit
	}
	for k, v := range keep {
		if v != "" {
			labels[k] = v
		}
	}
	return labels
}

// begun is the answer to a request that has begun to make workspaces.
func (c call) begun(op coppice.Operation, state string) (answer, error) {
	if len(op.WorkspaceIDs) == 0 {
		return answer{}, errors.New("operation " + op.ID + " makes no workspace")
	}
	return answer{http.StatusAccepted, map[string]any{"workspace_id": op.WorkspaceIDs[0], "operation_id": op.ID, "state": state}}, nil
}

// states are Arbor's names of states, where they differ.
var states = map[coppice.WorkspaceState]string{coppice.WorkspaceFailed: "error", coppice.WorkspaceLost: "error"}

func describe(r *http.Request, c call) (answer, error) {
	ws, err := c.Workspace(r.Context(), c.id)
	if err != nil {
		return answer{}, err
	}
	body, err := workspaceView(ws)
	return answer{http.StatusOK, body}, err
}

// workspaceView is Arbor's Workspace, and all fields of Coppice's.
func workspaceView(ws coppice.Workspace) (map[string]any, error) {
	state := string(ws.State)
	if name := states[ws.State]; name != "" {
		state = name
	}
	fields := map[string]any{
		"workspace_id": ws.ID, "state": state, "coppice_state": ws.State, "current_checkpoint_id": ws.CheckpointID, "identity_epoch": ws.Epoch,
		"network_epoch": ws.Epoch,
		"runtime": map[string]any{
			"runner_class": ws.Labels[labelRunnerClass], "vcpu_count": ws.Resources.VCPUs, "memory_mib": ws.Resources.MemoryMiB, "disk_gb": ws.Resources.DiskGiB,
		},
	}
	if at := ws.Labels[labelRepoURL]; at != "" {
		fields["repo"] = map[string]any{
			"provider": ws.Labels[labelRepoProvider], "url": at, "ref": ws.Labels[labelRepoRef], "commit": ws.Labels[labelRepoCommit], "cloned": false,
		}
	}
	return with(ws, fields)
}

func terminate(r *http.Request, c call) (answer, error) {
	op, err := c.begin(r.Context(), "/v1/workspaces/"+url.PathEscape(c.id)+"/terminate", struct{}{})
	if err != nil {
		return answer{}, err
	}
	if op.ID == "" {
		return answer{http.StatusAccepted, map[string]any{"status": "succeeded"}}, nil // it was terminated before
	}
	return answer{http.StatusAccepted, map[string]any{"operation_id": op.ID, "status": "pending"}}, nil
}

// colon serves the actions that Arbor writes behind a colon. Go's mux has no pattern for them.
func colon(r *http.Request, c call) (answer, error) {
	id, action, _ := strings.Cut(c.id, ":")
	if action != "terminate" {
		return answer{}, shared.Failf(http.StatusNotFound, "there is no route %s %s here", r.Method, shared.Clip(r.URL.Path))
	}
	c.id = id
	return terminate(r, c)
}

func operation(r *http.Request, c call) (answer, error) {
	op, err := c.Operation(r.Context(), c.id)
	if err != nil {
		return answer{}, err
	}
	fields := map[string]any{"operation_id": op.ID, "op_type": op.Kind, "status": op.State, "progress_pct": 0, "updated_at": op.CreatedAt}
	for _, id := range append([]string{op.WorkspaceID, op.CheckpointID}, op.WorkspaceIDs...) {
		if id != "" {
			fields["target_id"] = id
			break
		}
	}
	if op.Done() {
		fields["progress_pct"], fields["updated_at"] = 100, op.EndedAt
	}
	if op.Problem != nil {
		fields["error"] = envelope{Code: nameOf(coppice.Code(op.Problem.Code)), Message: op.Problem.Message, Details: map[string]string{"coppice_code": op.Problem.Code}}
	}
	body, err := with(op, fields)
	return answer{http.StatusOK, body}, err
}

func runners(r *http.Request, c call) (answer, error) {
	list := []map[string]any{}
	for runner, err := range c.Runners(r.Context()) {
		if err != nil {
			return answer{}, err
		}
		view, err := with(runner, map[string]any{"runner_id": runner.ID, "healthy": runner.State == coppice.RunnerReady, "last_heartbeat": runner.HeartbeatAt})
		if err != nil {
			return answer{}, err
		}
		list = append(list, view)
	}
	return answer{http.StatusOK, list}, nil
}
