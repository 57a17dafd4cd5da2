package mcp

import (
	"context"
	"encoding/base64"
	"fmt"
	"iter"
	"strings"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

type diffIn struct {
	From   string `json:"from" jsonschema:"id or name of a checkpoint" length:"1,64"`
	To     string `json:"to" jsonschema:"id or name of another checkpoint of the same tree" length:"1,64"`
	Limit  int    `json:"limit,omitempty" jsonschema:"how many files to list" range:"1,1000" default:"200"`
	Offset int    `json:"offset,omitempty" jsonschema:"how many files to pass over" range:"0,100000"`
}

type diffOut struct {
	Untrusted          bool          `json:"untrusted" jsonschema:"always true: paths and command lines come from inside the workspaces"`
	From               string        `json:"from"`
	To                 string        `json:"to"`
	Files              []changeView  `json:"files"`
	NextOffset         int           `json:"next_offset,omitempty" jsonschema:"the offset for the rest, if there is one"`
	FilesComplete      bool          `json:"files_complete" jsonschema:"false: the files may lack what was written in the half minute before a checkpoint"`
	IdentityUnknown    bool          `json:"identity_unknown,omitempty" jsonschema:"true: changes to /etc/hosts, hostname, machine-id and resolv.conf may be missing"`
	Started            []processView `json:"started" jsonschema:"processes that run only in the second one"`
	Gone               []processView `json:"gone" jsonschema:"processes that run only in the first one"`
	ProcessesComplete  bool          `json:"processes_complete"`
	MemoryChangedBytes int64         `json:"memory_changed_bytes"`
}

type changeView struct {
	Path            string   `json:"path"`
	PathBase64      string   `json:"path_base64,omitempty" jsonschema:"the path's bytes if they are not UTF-8"`
	Change          string   `json:"change" jsonschema:"added, changed or removed"`
	Type            string   `json:"type"`
	SizeBytes       int64    `json:"size_bytes"`
	SizeBeforeBytes int64    `json:"size_before_bytes"`
	What            []string `json:"what" jsonschema:"what differs in a changed file"`
}

type processView struct {
	PID     int    `json:"pid"`
	Command string `json:"command"`
	Args    string `json:"args,omitempty"`
}

type effectsIn struct {
	Of     string `json:"of" jsonschema:"id or name of a checkpoint, for what happened on its path from the root, or of a workspace, for everything that it sent or tried to send" length:"1,64"`
	Limit  int    `json:"limit,omitempty" jsonschema:"how many to list" range:"1,500" default:"100"`
	Offset int    `json:"offset,omitempty" jsonschema:"how many to pass over" range:"0,100000"`
}

type effectsOut struct {
	Untrusted  bool       `json:"untrusted" jsonschema:"always true: hosts, methods and paths come from inside the workspace"`
	Effects    []flowView `json:"effects"`
	NextOffset int        `json:"next_offset,omitempty" jsonschema:"the offset for the rest, if there is one"`
}

// flowView is a connection or request that left a workspace, or was denied.
type flowView struct {
	At         time.Time `json:"at"`
	Workspace  string    `json:"workspace"`
	Checkpoint string    `json:"checkpoint,omitempty" jsonschema:"the first checkpoint after it"`
	Protocol   string    `json:"protocol"`
	Host       string    `json:"host"`
	Port       int       `json:"port"`
	Method     string    `json:"method,omitempty"`
	Path       string    `json:"path,omitempty"`
	Status     int       `json:"status,omitempty"`
	Outcome    string    `json:"outcome" jsonschema:"denied: nothing was sent; failed: it could not be carried; cut: it was ended on the way"`
	Reason     string    `json:"reason,omitempty"`
	Grant      string    `json:"grant,omitempty" jsonschema:"the grant whose secret it was given"`
	Count      int64     `json:"count" jsonschema:"how many flows this row stands for"`
	Opaque     bool      `json:"opaque,omitempty" jsonschema:"its requests are not visible"`
	SentBytes  int64     `json:"sent_bytes"`
}

// maxPath bounds a path, a host or a command line in these answers, in bytes.
const maxPath = 1024

func (r *registry) addHistoryTools() {
	add(r, tool{
		name: "diff", title: "Compare two checkpoints", kind: reads,
		about: "Compare two checkpoints of a tree: files, processes, and how much memory differs.",
	}, r.diff)
	add(r, tool{
		name: "effects", title: "Show what left the sandbox", kind: reads,
		about: "List what may have changed outside on the path to a checkpoint, or everything that a workspace sent or tried to send. No restore undoes it.",
	}, r.effects)
}

func (r *registry) diff(ctx context.Context, in diffIn) (diffOut, string, error) {
	out := diffOut{Untrusted: true, Files: []changeView{}, Started: []processView{}, Gone: []processView{}, FilesComplete: true}
	var err error
	if out.From, err = r.checkpointID(ctx, in.From); err != nil {
		return out, "", err
	}
	if out.To, err = r.checkpointID(ctx, in.To); err != nil {
		return out, "", err
	}
	var failed error
	files := func(yield func(coppice.FileChange, error) bool) {
		for page, err := range r.client.DiffCheckpoints(ctx, out.From, out.To) {
			if failed = err; err != nil {
				return
			}
			out.FilesComplete, out.IdentityUnknown = out.FilesComplete && page.FilesComplete, out.IdentityUnknown || page.IdentityUnknown
			if page.MemoryChangedBytes != nil {
				out.MemoryChangedBytes = *page.MemoryChangedBytes
			}
			if p := page.Processes; p != nil {
				out.Started, out.Gone, out.ProcessesComplete = viewProcesses(p.Started), viewProcesses(p.Gone), p.Complete
			}
			for _, f := range page.Items {
				if !yield(f, nil) {
					return
				}
			}
		}
	}
	changes, more, _ := take(iter.Seq2[coppice.FileChange, error](files), in.Offset, in.Limit)
	if failed != nil {
		return out, "", failed
	}
	for _, f := range changes {
		out.Files = append(out.Files, viewChange(f))
	}
	if more {
		out.NextOffset = in.Offset + in.Limit
	}
	return out, out.text(), nil
}

func viewChange(f coppice.FileChange) changeView {
	v := changeView{
		Path: clip(f.Path, maxPath), Change: string(f.Change), Type: string(f.Type), SizeBytes: f.SizeBytes, SizeBeforeBytes: f.SizeBeforeBytes, What: []string{},
	}
	if b, err := base64.StdEncoding.DecodeString(f.PathBase64); err == nil && len(b) <= maxPath {
		v.PathBase64 = f.PathBase64
	}
	for _, w := range f.What {
		v.What = append(v.What, string(w))
	}
	return v
}

// maxProcesses bounds the processes in an answer.
const maxProcesses = 200

func viewProcesses(list []coppice.WorkloadProcess) []processView {
	views := []processView{}
	for _, p := range list[:min(len(list), maxProcesses)] {
		views = append(views, processView{PID: p.PID, Command: clip(p.Command, maxPath), Args: clip(p.Args, maxPath)})
	}
	return views
}

// text is a diff for a model.
func (d diffOut) text() string {
	var lines strings.Builder
	for _, f := range d.Files {
		fmt.Fprintf(&lines, "%s %s", f.Change, visible(f.Path))
		if len(f.What) > 0 {
			fmt.Fprintf(&lines, " (%s)", strings.Join(f.What, ", "))
		}
		lines.WriteString("\n")
	}
	for _, p := range d.Started {
		fmt.Fprintf(&lines, "started process %d %s %s\n", p.PID, visible(p.Command), visible(p.Args))
	}
	for _, p := range d.Gone {
		fmt.Fprintf(&lines, "gone process %d %s %s\n", p.PID, visible(p.Command), visible(p.Args))
	}
	text := fmt.Sprintf("from %s to %s, %d bytes of memory differ:\n", d.From, d.To, d.MemoryChangedBytes)
	if lines.Len() == 0 {
		text += "No files and processes differ here.\n"
	} else {
		text += quote("paths and processes", lines.String()) + "\n"
	}
	if !d.FilesComplete {
		text += "The files may lack what was written in the half minute before a checkpoint.\n"
	}
	if d.IdentityUnknown {
		text += "Changes to /etc/hosts, hostname, machine-id and resolv.conf may be missing.\n"
	}
	if d.NextOffset > 0 {
		text += fmt.Sprintf("There are more files: diff with offset %d.\n", d.NextOffset)
	}
	return text
}

func (r *registry) effects(ctx context.Context, in effectsIn) (effectsOut, string, error) {
	out := effectsOut{Untrusted: true, Effects: []flowView{}}
	ws, cp, err := r.node(ctx, in.Of)
	if err != nil {
		return out, "", err
	}
	var more bool
	if ws != nil {
		var flows []coppice.Flow
		flows, more, err = take(r.client.Egress(ctx, ws.ID, coppice.EgressFilter{}), in.Offset, in.Limit)
		for _, f := range flows {
			out.Effects = append(out.Effects, viewFlow(f, ""))
		}
	} else {
		var effects []coppice.Effect
		effects, more, err = take(r.client.Effects(ctx, cp), in.Offset, in.Limit)
		for _, e := range effects {
			out.Effects = append(out.Effects, viewFlow(e.Flow, e.CheckpointID))
		}
	}
	if err != nil {
		return out, "", err
	}
	if len(out.Effects) == 0 {
		return out, "Nothing left here that is recorded.", nil
	}
	var lines strings.Builder
	for _, f := range out.Effects {
		lines.WriteString(f.line() + "\n")
	}
	text := quote("flows", lines.String()) + "\n"
	if more {
		out.NextOffset = in.Offset + in.Limit
		text += fmt.Sprintf("There are more: effects with offset %d.\n", out.NextOffset)
	}
	return out, text, nil
}

func viewFlow(f coppice.Flow, checkpoint string) flowView {
	return flowView{
		At: f.At, Workspace: f.WorkspaceID, Checkpoint: checkpoint, Protocol: string(f.Protocol), Host: clip(f.Host, maxPath), Port: f.Port, Method: clip(f.Method, 64),
		Path: clip(f.Path, maxPath), Status: f.Status, Outcome: string(f.Outcome), Reason: clip(f.Reason, maxPath), Grant: f.GrantID, Count: f.Count, Opaque: f.Opaque, SentBytes: f.SentBytes,
	}
}

func (f flowView) line() string {
	s := fmt.Sprintf("%s %s %s %s:%d", f.At.Format(time.RFC3339), f.Outcome, f.Protocol, visible(f.Host), f.Port)
	if f.Method != "" {
		s += fmt.Sprintf(" %s %s -> %d", visible(f.Method), visible(f.Path), f.Status)
	}
	if f.Count > 1 {
		s += fmt.Sprintf(" (%d times)", f.Count)
	}
	if f.Reason != "" {
		s += ", " + visible(f.Reason)
	}
	if f.Grant != "" {
		s += ", with the grant " + visible(f.Grant)
	}
	return s
}
