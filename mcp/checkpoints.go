package mcp

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// checkpointView is a checkpoint in an answer.
type checkpointView struct {
	ID          string         `json:"id"`
	Name        string         `json:"name,omitempty"`
	State       string         `json:"state"`
	Kind        string         `json:"kind" jsonschema:"template: made by booting an image, the root of a tree; user: all others"`
	Image       string         `json:"image"`
	Parent      string         `json:"parent,omitempty"`
	Workspace   string         `json:"workspace,omitempty" jsonschema:"the workspace that was captured"`
	Children    int            `json:"children" jsonschema:"the number of its direct child checkpoints"`
	PauseMS     float64        `json:"pause_ms" jsonschema:"how long the workspace stood still"`
	DeltaBytes  int64          `json:"delta_bytes" jsonschema:"memory that differs from its base"`
	Pinned      bool           `json:"pinned,omitempty"`
	Labels      map[string]any `json:"labels"`
	Annotations map[string]any `json:"annotations"`
	CreatedAt   time.Time      `json:"created_at"`
	Failure     *failureView   `json:"failure,omitempty"`
}

func viewCheckpoint(cp coppice.Checkpoint) checkpointView {
	v := checkpointView{
		ID: cp.ID, Name: cp.Name, State: string(cp.State), Kind: string(cp.Kind), Image: cp.Image.Name, Parent: cp.ParentID, Workspace: cp.WorkspaceID,
		Children: cp.ChildrenCount, PauseMS: cp.PauseMS, DeltaBytes: cp.DeltaBytes, Pinned: cp.Pinned, Labels: map[string]any{}, Annotations: map[string]any{},
		CreatedAt: cp.CreatedAt, Failure: viewFailure(cp.Failure),
	}
	for k, l := range cp.Labels {
		v.Labels[k] = l
	}
	maps.Copy(v.Annotations, cp.Annotations)
	return v
}

// line is a checkpoint in one line.
func (v checkpointView) line() string {
	s := v.ID
	if v.Name != "" {
		s += " " + v.Name
	}
	s += ": " + v.State
	if v.Kind != string(coppice.CheckpointKindUser) {
		s += ", " + v.Kind + " of image " + visible(v.Image)
	}
	if v.Parent != "" {
		s += ", from " + v.Parent
	}
	return s + facts(v.Annotations)
}

type checkpointIn struct {
	workspaceRef
	Name        string            `json:"name,omitempty" jsonschema:"unique among the checkpoints of the project" length:"1,63"`
	Annotations map[string]any    `json:"annotations,omitempty" jsonschema:"facts about this node, such as {\"score\": 0.8}; tree shows numbers and short texts"`
	Labels      map[string]string `json:"labels,omitempty" jsonschema:"labels to find it by"`
}

type forkIn struct {
	Of           string            `json:"of" jsonschema:"id or name of a checkpoint, or of a workspace, which is checkpointed first" length:"1,64"`
	Count        int               `json:"count,omitempty" jsonschema:"how many copies to start" range:"1,64" default:"1"`
	Name         string            `json:"name,omitempty" jsonschema:"the copies are called NAME-1 and up, or just NAME if count is absent or 1; generated if absent" length:"1,60"`
	AllOrNothing bool              `json:"all_or_nothing,omitempty" jsonschema:"fail, and keep none, if one copy fails"`
	Env          map[string]string `json:"env,omitempty" jsonschema:"environment variables of programs that start in the copies"`
	Labels       map[string]string `json:"labels,omitempty" jsonschema:"labels of the copies"`
	TTLSeconds   int               `json:"ttl_seconds,omitempty" jsonschema:"delete the copies after this many seconds" range:"0,31536000"`
}

type forkOut struct {
	Checkpoint string      `json:"checkpoint" jsonschema:"the checkpoint that the copies were forked from"`
	Children   []childView `json:"children"`
	Ready      int         `json:"ready" jsonschema:"how many copies are ready"`
}

type childView struct {
	Workspace *workspaceView `json:"workspace,omitempty"`
	Failure   *failureView   `json:"failure,omitempty"`
}

type restoreIn struct {
	workspaceRef
	Checkpoint string `json:"checkpoint" jsonschema:"id or name of a checkpoint" length:"1,64"`
}

func (r *registry) addCheckpointTools() {
	add(r, tool{
		name: "checkpoint", title: "Checkpoint a workspace", kind: adds,
		about: "Record a running workspace (memory, disk, processes) as a node of the tree. The workspace pauses for milliseconds and goes on. Note a score as an annotation to find the best node later.",
	}, r.createCheckpoint)
	add(r, tool{
		name: "fork", title: "Fork", kind: adds, open: true,
		about: "Start copies of a checkpoint, or of a running workspace as it is now. Each copy has the same processes and files, and an identity of its own. Give the copies different things to try, then compare them.",
	}, r.fork)
	add(r, tool{
		name: "restore", title: "Restore a workspace in place", kind: destroys, open: true,
		about: "Set a workspace back to a checkpoint. What it did since then is lost, unless another checkpoint has it. What it sent out stays sent: see effects.",
	}, r.restore)
}

func (r *registry) createCheckpoint(ctx context.Context, in checkpointIn) (checkpointView, string, error) {
	id, err := r.workspaceID(ctx, in.Workspace)
	if err != nil {
		return checkpointView{}, "", err
	}
	cp, err := r.client.CreateCheckpoint(ctx, id, coppice.CreateCheckpointRequest{Name: in.Name, Annotations: in.Annotations, Labels: in.Labels})
	v := viewCheckpoint(cp)
	return v, fmt.Sprintf("%s; the workspace paused for %.1f ms", v.line(), v.PauseMS), err
}

func (r *registry) fork(ctx context.Context, in forkIn) (forkOut, string, error) {
	ws, cp, err := r.node(ctx, in.Of)
	if err != nil {
		return forkOut{}, "", err
	}
	var res coppice.ForkResult
	if ws != nil {
		res, err = r.client.ForkWorkspace(ctx, ws.ID, coppice.ForkWorkspaceRequest{
			Count: &in.Count, BranchName: in.Name, AllOrNothing: in.AllOrNothing, Env: in.Env, Labels: in.Labels, TTLSeconds: int64(in.TTLSeconds),
		})
	} else {
		res, err = r.client.ForkCheckpoint(ctx, cp, coppice.ForkCheckpointRequest{
			Count: &in.Count, BranchName: in.Name, AllOrNothing: in.AllOrNothing, Env: in.Env, Labels: in.Labels, TTLSeconds: int64(in.TTLSeconds),
		})
	}
	if err != nil {
		return forkOut{}, "", err
	}
	out := forkOut{Checkpoint: res.CheckpointID, Children: []childView{}}
	var lines strings.Builder
	for i, child := range res.Children {
		var v childView
		if child.Workspace != nil {
			w := viewWorkspace(*child.Workspace)
			v.Workspace = &w
		}
		if v.Failure = viewFailure(child.Problem); v.Failure != nil {
			fmt.Fprintf(&lines, "copy %d failed: %s\n%s\n", i+1, v.Failure.Code, quote("failure; it may quote the workspace", v.Failure.Message.Text))
		} else if v.Workspace != nil {
			out.Ready++
			lines.WriteString(v.Workspace.line() + "\n")
		}
		out.Children = append(out.Children, v)
	}
	return out, fmt.Sprintf("%d of %d copies of %s are ready:\n%s", out.Ready, len(res.Children), out.Checkpoint, lines.String()), nil
}

func (r *registry) restore(ctx context.Context, in restoreIn) (workspaceView, string, error) {
	id, err := r.workspaceID(ctx, in.Workspace)
	if err != nil {
		return workspaceView{}, "", err
	}
	cp, err := r.checkpointID(ctx, in.Checkpoint)
	if err != nil {
		return workspaceView{}, "", err
	}
	res, err := r.client.RestoreWorkspace(ctx, id, cp)
	v := viewWorkspace(res.Workspace)
	return v, v.line(), err
}
