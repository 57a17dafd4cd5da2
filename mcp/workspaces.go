package mcp

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// workspaceView is a workspace in an answer. It has the names of the environment's variables only: values may be secrets.
type workspaceView struct {
	ID               string            `json:"id"`
	Name             string            `json:"name"`
	State            string            `json:"state"`
	Condition        string            `json:"condition,omitempty" jsonschema:"unknown or stalled, if something is wrong with the machine"`
	Image            string            `json:"image"`
	Epoch            int64             `json:"epoch" jsonschema:"grows with each restore and resume"`
	Checkpoint       string            `json:"checkpoint,omitempty" jsonschema:"the checkpoint that it stands on"`
	ParentCheckpoint string            `json:"parent_checkpoint,omitempty" jsonschema:"the checkpoint that it was forked from"`
	VCPUs            int               `json:"vcpus"`
	MemoryMiB        int               `json:"memory_mib"`
	DiskGiB          int               `json:"disk_gib"`
	EgressPolicy     string            `json:"egress_policy"`
	Allow            []string          `json:"allow" jsonschema:"the hosts that it may reach"`
	EnvNames         []string          `json:"env_names" jsonschema:"names of its environment variables"`
	Labels           map[string]string `json:"labels"`
	CreatedAt        time.Time         `json:"created_at"`
	ExpiresAt        *time.Time        `json:"expires_at,omitempty"`
	Failure          *failureView      `json:"failure,omitempty"`
}

// failureView is why something failed. Its message may quote a guest.
type failureView struct {
	Code        string     `json:"code"`
	Message     guestBytes `json:"message"`
	RecoverFrom string     `json:"recover_from,omitempty" jsonschema:"the newest checkpoint that can still be forked"`
}

func viewFailure(f *coppice.Failure) *failureView {
	if f == nil {
		return nil
	}
	return &failureView{Code: f.Code, Message: newGuestBytes([]byte(clip(f.Message, maxDetail))), RecoverFrom: f.RecoverFrom}
}

func viewWorkspace(ws coppice.Workspace) workspaceView {
	v := workspaceView{
		ID: ws.ID, Name: ws.Name, State: string(ws.State), Condition: string(ws.Condition), Image: ws.Image.Name, Epoch: ws.Epoch,
		Checkpoint: ws.CheckpointID, ParentCheckpoint: ws.ParentCheckpointID,
		VCPUs: ws.Resources.VCPUs, MemoryMiB: ws.Resources.MemoryMiB, DiskGiB: ws.Resources.DiskGiB,
		EgressPolicy: string(ws.Network.EgressPolicy), Allow: append([]string{}, ws.Network.Allow...),
		EnvNames: slices.AppendSeq([]string{}, maps.Keys(ws.Env)), Labels: map[string]string{}, CreatedAt: ws.CreatedAt, Failure: viewFailure(ws.Failure),
	}
	slices.Sort(v.EnvNames)
	maps.Copy(v.Labels, ws.Labels)
	if !ws.ExpiresAt.IsZero() {
		v.ExpiresAt = &ws.ExpiresAt
	}
	return v
}

// line is a workspace in one line.
func (v workspaceView) line() string {
	s := fmt.Sprintf("%s %s: %s, image %s, epoch %d", v.ID, v.Name, v.State, visible(v.Image), v.Epoch)
	if v.Condition != "" {
		s += ", " + v.Condition
	}
	if v.Checkpoint != "" {
		s += ", on " + v.Checkpoint
	}
	if v.Failure != nil {
		s += ", failed: " + v.Failure.Code
		if v.Failure.RecoverFrom != "" {
			s += ", fork " + v.Failure.RecoverFrom + " to recover"
		}
	}
	return s
}

// text is a workspace in several lines.
func (v workspaceView) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n%d vCPUs, %d MiB of memory, %d GiB of disk\nnetwork: %s", v.line(), v.VCPUs, v.MemoryMiB, v.DiskGiB, v.EgressPolicy)
	if len(v.Allow) > 0 {
		fmt.Fprintf(&b, ", allowed: %s", visible(strings.Join(v.Allow, " ")))
	}
	if len(v.EnvNames) > 0 {
		fmt.Fprintf(&b, "\nenvironment variables: %s", visible(strings.Join(v.EnvNames, " ")))
	}
	for _, k := range slices.Sorted(maps.Keys(v.Labels)) {
		fmt.Fprintf(&b, "\nlabel %s=%s", visible(k), visible(v.Labels[k]))
	}
	if v.ExpiresAt != nil {
		fmt.Fprintf(&b, "\nends at %s", v.ExpiresAt.Format(time.RFC3339))
	}
	if v.Failure != nil && v.Failure.Message.Text != "" {
		b.WriteString("\n" + quote("failure; it may quote the workspace", v.Failure.Message.Text))
	}
	return b.String()
}

type workspaceRef struct {
	Workspace string `json:"workspace" jsonschema:"id or name of a workspace" length:"1,64"`
}

type workspaceCreateIn struct {
	Name       string            `json:"name,omitempty" jsonschema:"1 to 63 lower-case letters, digits or hyphens; generated if absent" length:"1,63"`
	Image      string            `json:"image,omitempty" jsonschema:"name or digest of an image; the default is base" length:"1,128"`
	VCPUs      int               `json:"vcpus,omitempty" jsonschema:"virtual processors" range:"1,64"`
	MemoryMiB  int               `json:"memory_mib,omitempty" jsonschema:"memory in MiB" range:"64,1048576"`
	DiskGiB    int               `json:"disk_gib,omitempty" jsonschema:"size of the disk in GiB" range:"1,65536"`
	Allow      []string          `json:"allow,omitempty" jsonschema:"hosts that the workspace may reach, such as api.example.com, *.example.com or bundle:python; none if absent" items:"0,256"`
	Env        map[string]string `json:"env,omitempty" jsonschema:"environment variables of its programs"`
	Labels     map[string]string `json:"labels,omitempty" jsonschema:"labels to find it by"`
	TTLSeconds int               `json:"ttl_seconds,omitempty" jsonschema:"delete the workspace after this many seconds" range:"0,31536000"`
}

type workspaceListIn struct {
	Label  string `json:"label,omitempty" jsonschema:"only workspaces with this label: key or key=value" length:"1,320"`
	State  string `json:"state,omitempty" jsonschema:"only workspaces in this state; all but terminated ones if absent" enum:"creating|ready|checkpointing|restoring|quarantined|suspended|failed|lost|terminating|terminated"`
	Limit  int    `json:"limit,omitempty" jsonschema:"how many to list" range:"1,200" default:"50"`
	Offset int    `json:"offset,omitempty" jsonschema:"how many to pass over" range:"0,100000"`
}

type workspaceListOut struct {
	Workspaces []workspaceView `json:"workspaces"`
	NextOffset int             `json:"next_offset,omitempty" jsonschema:"the offset for the rest, if there is one"`
}

type setStateIn struct {
	workspaceRef
	State string `json:"state" jsonschema:"suspended: checkpoint the workspace and stop it, at no cost of memory; ready: resume it, its programs go on" enum:"suspended|ready"`
}

func (r *registry) addWorkspaceTools() {
	add(r, tool{
		name: "workspace_create", title: "Create a workspace", kind: adds, open: true,
		about: "Start a workspace (a microVM) from an image and wait until it is ready. The first one of an image boots it, every later one is a fork. It reaches no network but the hosts in allow.",
	}, r.createWorkspace)
	add(r, tool{
		name: "workspace_list", title: "List workspaces", kind: reads,
		about: "List the workspaces of the project, newest first.",
	}, r.listWorkspaces)
	add(r, tool{
		name: "workspace_show", title: "Show a workspace", kind: reads,
		about: "Show one workspace: its state, resources, network rules, and the checkpoint it stands on.",
	}, func(ctx context.Context, in workspaceRef) (workspaceView, string, error) {
		ws, err := r.workspace(ctx, in.Workspace)
		v := viewWorkspace(ws)
		return v, v.text(), err
	})
	add(r, tool{
		name: "workspace_delete", title: "Delete a workspace", kind: destroys, idempotent: true,
		about: "Stop a workspace for good. What is not in a checkpoint is lost. Its checkpoints stay and can be forked.",
	}, func(ctx context.Context, in workspaceRef) (workspaceView, string, error) {
		id, err := r.workspaceID(ctx, in.Workspace)
		if err != nil {
			return workspaceView{}, "", err
		}
		ws, err := r.client.TerminateWorkspace(ctx, id)
		v := viewWorkspace(ws)
		return v, v.line(), err
	})
	add(r, tool{
		name: "workspace_set_state", title: "Suspend or resume a workspace", kind: adds, idempotent: true, open: true,
		about: "Suspend a workspace (its whole machine becomes a checkpoint and takes no memory), or resume a suspended one, whose programs go on where they stood.",
	}, func(ctx context.Context, in setStateIn) (workspaceView, string, error) {
		id, err := r.workspaceID(ctx, in.Workspace)
		if err != nil {
			return workspaceView{}, "", err
		}
		change := r.client.ResumeWorkspace
		if in.State == "suspended" {
			change = r.client.SuspendWorkspace
		}
		ws, err := change(ctx, id)
		v := viewWorkspace(ws)
		return v, v.line(), err
	})
}

func (r *registry) createWorkspace(ctx context.Context, in workspaceCreateIn) (workspaceView, string, error) {
	req := coppice.CreateWorkspaceRequest{Name: in.Name, Image: in.Image, Env: in.Env, Labels: in.Labels, TTLSeconds: int64(in.TTLSeconds)}
	for _, x := range []struct {
		from int
		to   **int
	}{{in.VCPUs, &req.Resources.VCPUs}, {in.MemoryMiB, &req.Resources.MemoryMiB}, {in.DiskGiB, &req.Resources.DiskGiB}} {
		if x.from > 0 {
			*x.to = &x.from
		}
	}
	if len(in.Allow) > 0 {
		req.Network.Allow = &in.Allow
	}
	ws, err := r.client.CreateWorkspace(ctx, req)
	v := viewWorkspace(ws)
	return v, v.text(), err
}

func (r *registry) listWorkspaces(ctx context.Context, in workspaceListIn) (workspaceListOut, string, error) {
	var f coppice.WorkspaceFilter
	if in.Label != "" {
		f.Labels = []string{in.Label}
	}
	if in.State != "" {
		f.States = []coppice.WorkspaceState{coppice.WorkspaceState(in.State)}
	}
	found, more, err := take(r.client.Workspaces(ctx, f), in.Offset, in.Limit)
	if err != nil {
		return workspaceListOut{}, "", err
	}
	out := workspaceListOut{Workspaces: []workspaceView{}}
	var b strings.Builder
	for _, ws := range found {
		v := viewWorkspace(ws)
		out.Workspaces = append(out.Workspaces, v)
		b.WriteString(v.line() + "\n")
	}
	if len(found) == 0 {
		b.WriteString("No workspaces here. workspace_create makes one.\n")
	}
	if more {
		out.NextOffset = in.Offset + in.Limit
		fmt.Fprintf(&b, "There are more: workspace_list with offset %d.\n", out.NextOffset)
	}
	return out, b.String(), nil
}
