package httpapi

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/httpapi/imageapi"
	"github.com/coppice-dev/coppice/controller/httpapi/stepjson"
	"github.com/coppice-dev/coppice/core"
)

// The wire's types stop here: everything that leaves is made in this file.

func failureOf(f *controller.Failure) *api.Failure {
	if f == nil {
		return nil
	}
	return &api.Failure{Code: string(f.Code), Message: f.Message, RecoverFrom: string(f.RecoverFrom)}
}

func failureOfError(e *core.Error) *api.Failure {
	if e == nil {
		return nil
	}
	return &api.Failure{Code: string(e.Code), Message: e.Msg}
}

func imageRefOf(r controller.ImageRef) api.ImageRef {
	return api.ImageRef{Name: r.Name, Digest: string(r.Digest)}
}

func resourcesOf(r core.Resources) api.Resources {
	return api.Resources{VCPUs: r.VCPUs, MemoryMiB: r.MemoryMiB, DiskGiB: r.DiskGiB}
}

func labelsOf(m map[string]string) api.Labels {
	if m == nil {
		return api.Labels{}
	}
	return m
}

func workspaceOf(w controller.Workspace) api.Workspace {
	out := api.Workspace{
		ID: string(w.ID), Name: w.Name, State: api.WorkspaceState(w.State), Epoch: w.Epoch, Version: w.Version, Image: imageRefOf(w.Image),
		Resources: resourcesOf(w.Resources), Network: api.Network{EgressPolicy: api.EgressPolicy(w.Egress), Allow: w.Rules.Allow, RulesPending: w.RulesPending()}, Env: w.Env, Labels: labelsOf(w.Labels),
		ParentCheckpointID: string(w.Parent), CheckpointID: string(w.Head), RunnerID: string(w.Sandbox.RunnerID), Failure: failureOf(w.Failure),
		CreatedAt: w.CreatedAt, ReadyAt: w.ReadyAt, ExpiresAt: w.ExpiresAt, EndedAt: w.EndedAt,
	}
	out.OnTTL = api.OnTTL(cmp.Or(w.IdlePolicy.OnTTL, controller.IdleTerminate))
	out.IdleSeconds, out.OnIdle, out.AutoResume = int64(w.IdlePolicy.IdleAfter/time.Second), api.OnIdle(w.IdlePolicy.OnIdle), w.IdlePolicy.AutoResume
	switch {
	case w.Unknown:
		out.Condition = api.ConditionUnknown
	case !w.Stall.Since.IsZero():
		out.Condition = api.ConditionStalled
		out.Stall = &api.WorkspaceStall{Since: w.Stall.Since, Code: string(w.Stall.Code), Message: w.Stall.Message}
	}
	if id := w.Sandbox.Identity; w.Sandbox.ID != "" {
		out.Network.Hostname, out.Network.IP, out.Network.MAC = id.Hostname, id.IP.String(), id.MAC
		out.Network.MachineID, out.Network.Generation = id.MachineID, id.Generation
	}
	return out
}

func stepOf(s core.ResealStep) api.ResealStep {
	return api.ResealStep{Name: s.Name, Status: api.ResealStepStatus(s.Status), DurationMS: s.DurationMS, Evidence: s.Evidence, Error: s.Error}
}

func staleOf(p core.StaleProcess) api.StaleProcess {
	return api.StaleProcess{PID: p.PID, Command: p.Command, Runtime: p.Runtime}
}

func resealOf(r *core.ResealReport) *api.ResealReport {
	if r == nil {
		return nil
	}
	return &api.ResealReport{
		Generation: r.Generation, Complete: r.Complete, Steps: convert(r.Steps, stepOf),
		StalePRNGProcesses: convert(r.StaleProcesses, staleOf), DurationMS: r.DurationMS,
	}
}

func recordOf(r controller.ResealRecord) api.ResealRecord {
	return api.ResealRecord{
		WorkspaceID: string(r.WorkspaceID), Epoch: r.Epoch, CheckpointID: string(r.CheckpointID), OperationID: string(r.OperationID),
		Report: *resealOf(&r.Report), CreatedAt: r.CreatedAt,
	}
}

func classOf(c runnerapi.RunnerClass) api.RunnerClass {
	return api.RunnerClass{
		Arch: c.Arch, Accelerator: c.Accelerator, CPUModel: c.CPUModel, VMM: c.VMM, VMMVersion: c.VMMVersion, MachineType: c.MachineType,
	}
}

func checkpointOf(c controller.Checkpoint) api.Checkpoint {
	out := api.Checkpoint{
		ID: string(c.ID), Name: c.Name, State: api.CheckpointState(c.State), Kind: api.CheckpointKind(c.Kind), ParentID: string(c.Parent),
		WorkspaceID: string(c.WorkspaceID), Labels: labelsOf(c.Labels), Annotations: annotationsOf(c.Annotations), Pinned: c.Pinned, Version: c.Version, Image: imageRefOf(c.Image),
		Resources: resourcesOf(c.Resources), RunnerID: string(c.RunnerID), BaseID: string(c.Base), DeltaBytes: c.DeltaBytes,
		DeviceStateBytes: c.DeviceStateBytes, DiskBytes: c.DiskBytes, PauseMS: c.PauseMS, ParentReseal: convert(c.ParentReseal, stepOf),
		StalePRNGProcesses: convert(c.StaleProcesses, staleOf), Timings: stepjson.TimingsOf(c.Timings), ChildrenCount: c.ChildrenCount,
		OperationID: string(c.OperationID), Failure: failureOf(c.Failure), CreatedAt: c.CreatedAt, CapturedAt: c.CapturedAt,
		SealedAt: c.SealedAt, StoredBytes: c.StoredBytes,
	}
	if im := c.Imported; im != nil {
		out.Imported = &api.Imported{CheckpointID: string(im.CheckpointID), ImageDigest: string(im.Image), CapturedAt: im.CapturedAt}
	}
	if c.Seal != nil {
		out.Seal = &api.Seal{State: api.SealState(c.Seal.State), Attempt: c.Seal.Attempt, Problem: failureOf(c.Seal.Problem)}
	}
	if c.Class != nil {
		class := classOf(*c.Class)
		out.RunnerClass = &class
	}
	return out
}

func ancestorOf(c controller.Ancestor) api.Ancestor {
	return api.Ancestor{
		ID: string(c.ID), Name: c.Name, State: api.CheckpointState(c.State), Kind: api.CheckpointKind(c.Kind), ParentID: string(c.Parent), Depth: c.Depth,
		WorkspaceID: string(c.WorkspaceID), Annotations: c.Annotations, Pinned: c.Pinned, CreatedAt: c.CreatedAt, CapturedAt: c.CapturedAt,
	}
}

func annotationsOf(m map[string]json.RawMessage) api.Annotations {
	out := make(api.Annotations, len(m))
	for k, v := range m {
		out[k] = v
	}
	return out
}

func nodeOf(n controller.TreeNode) api.TreeNode {
	return api.TreeNode{
		Checkpoint: checkpointOf(n.Checkpoint), Depth: n.Depth, EffectsCount: n.Effects,
		Workspaces: convert(n.Workspaces, func(w controller.Workspace) api.TreeWorkspace {
			return api.TreeWorkspace{ID: string(w.ID), Name: w.Name, State: api.WorkspaceState(w.State), CreatedAt: w.CreatedAt}
		}),
	}
}

func forkResultOf(a controller.Answer) api.ForkResult {
	out := api.ForkResult{OperationID: string(a.Operation.ID), CheckpointID: string(a.Operation.CheckpointID), Timings: stepjson.TimingsOf(a.Operation.Timings)}
	if a.Operation.Kind == controller.OpForkWorkspace && a.Result.Checkpoint != nil {
		cp := checkpointOf(*a.Result.Checkpoint)
		out.Checkpoint = &cp
	}
	out.Children = convert(a.Result.Children, func(c controller.Child) api.ForkChild {
		child := api.ForkChild{ResealReport: resealOf(c.Reseal), Timings: stepjson.TimingsOf(c.Timings), Problem: failureOfError(c.Problem)}
		if c.Workspace != nil {
			w := workspaceOf(*c.Workspace)
			child.Workspace = &w
		}
		return child
	})
	return out
}

func restoreResultOf(a controller.Answer) api.RestoreResult {
	return api.RestoreResult{
		OperationID: string(a.Operation.ID), Workspace: workspaceIn(a), ResealReport: resealOf(a.Result.Reseal), Timings: stepjson.TimingsOf(a.Operation.Timings),
	}
}

// workspaceIn is the workspace of an answer, with the stages of its operation.
func workspaceIn(a controller.Answer) api.Workspace {
	if a.Result.Workspace == nil {
		return api.Workspace{}
	}
	w := workspaceOf(*a.Result.Workspace)
	w.Timings = stepjson.TimingsOf(a.Operation.Timings)
	return w
}

func checkpointIn(a controller.Answer) api.Checkpoint {
	if a.Result.Checkpoint == nil {
		return api.Checkpoint{}
	}
	return checkpointOf(*a.Result.Checkpoint)
}

// answered answers a request that begins an operation: with the result if the operation has succeeded, and with 202 and the operation if it
// has not ended.
func answered[R any](a controller.Answer, err error, accepted func(api.AcceptedJSONResponse) R, done func() R) (out R, _ error) {
	if err != nil {
		return out, err
	}
	if a.Done {
		return done(), nil
	}
	op, err := operationOf(a)
	return accepted(api.AcceptedJSONResponse(op)), err
}

// unfinishedOf is an operation without its result.
func unfinishedOf(o controller.Operation) api.Operation {
	return api.Operation{
		ID: string(o.ID), Kind: api.OperationKind(o.Kind), State: api.OperationState(o.State), Step: o.Step, WorkspaceID: string(o.WorkspaceID),
		CheckpointID: string(o.CheckpointID), Timings: stepjson.TimingsOf(o.Timings), Problem: failureOfError(o.Problem),
		WorkspaceIDs:      convert(controller.WorkspacesOf(o), func(id core.WorkspaceID) api.WorkspaceID { return string(id) }),
		CancelRequestedAt: o.CancelAt, CreatedAt: o.CreatedAt, StartedAt: o.StartedAt, EndedAt: o.EndedAt,
	}
}

func operationOf(a controller.Answer) (api.Operation, error) {
	o := a.Operation
	out := unfinishedOf(o)
	if o.State != core.OperationSucceeded && (!o.State.Done() || o.Kind != controller.OpStepCheckpoint && (o.Kind != controller.OpStepWorkspace || len(a.Result.Steps) == 0)) {
		return out, nil
	}
	var body any
	switch o.Kind {
	case controller.OpCreateWorkspace, controller.OpTerminateWorkspace, controller.OpSuspendWorkspace, controller.OpResumeWorkspace:
		body = workspaceIn(a)
	case controller.OpCreateCheckpoint:
		if a.Result.Checkpoint != nil { // else it was deleted since
			body = checkpointIn(a)
		}
	case controller.OpForkCheckpoint, controller.OpForkWorkspace:
		body = forkResultOf(a)
	case controller.OpRestoreWorkspace, controller.OpRestoreCheckpoint:
		body = restoreResultOf(a)
	case controller.OpPruneCheckpoints:
		body = pruneResultOf(a.Result.Prune)
	case controller.OpStepCheckpoint:
		body = stepjson.ResultOf(a.Operation, a.Result.Steps)
	case controller.OpStepWorkspace:
		body = stepjson.OneOf(a.Operation, a.Result.Steps)
	case controller.OpBuildImage:
		body = imageapi.ResultOf(a)
	case controller.OpCreateTemplate:
	}
	if body == nil {
		return out, nil
	}
	b, err := json.Marshal(body)
	if err != nil {
		return out, fmt.Errorf("encode result of operation %s: %w", o.ID, err)
	}
	out.Result = b
	return out, nil
}

func sessionOf(v controller.SessionView) api.Session {
	g := v.Guest
	out := api.Session{
		ID: string(v.ID), WorkspaceID: string(v.WorkspaceID), Epoch: v.Epoch, Command: g.Command, Cwd: g.Cwd, User: g.User,
		State: api.SessionRunning, PTY: g.PTY, PID: g.PID, ExitCode: g.ExitCode, Signal: g.Signal, TimedOut: g.TimedOut, StdinOpen: g.StdinOpen,
		StdoutBytes: g.StdoutBytes, StderrBytes: g.StderrBytes, StdoutFirst: g.StdoutFirst, StderrFirst: g.StderrFirst, StartedAt: g.StartedAt,
	}
	if out.Command == nil {
		out.Command = []string{}
	}
	if g.State == controller.GuestExited {
		out.State = api.SessionExited
	}
	if g.EndedAt != nil {
		out.EndedAt = *g.EndedAt
	}
	return out
}

func execResultOf(r controller.ExecResult) api.ExecResult {
	g := r.View.Guest
	out := api.ExecResult{
		Session: sessionOf(r.View), Signal: g.Signal, TimedOut: g.TimedOut, Stdout: string(r.Stdout), Stderr: string(r.Stderr), Encoding: api.EncodingUTF8,
		StdoutTruncated: r.StdoutTruncated, StderrTruncated: r.StderrTruncated, Timings: stepjson.TimingsOf(r.Timings),
	}
	if g.ExitCode != nil {
		out.ExitCode = *g.ExitCode
	}
	if !utf8.Valid(r.Stdout) || !utf8.Valid(r.Stderr) {
		out.Encoding = api.EncodingBase64
		out.Stdout, out.Stderr = base64.StdEncoding.EncodeToString(r.Stdout), base64.StdEncoding.EncodeToString(r.Stderr)
	}
	return out
}

func portOf(p controller.Port) api.Port {
	out := api.Port{ID: string(p.ID), WorkspaceID: string(p.WorkspaceID), GuestPort: p.GuestPort, Listen: p.Listen, Visibility: api.Visibility(p.Visibility), CreatedAt: p.CreatedAt}
	if p.ExpiresAt != nil {
		out.ExpiresAt = *p.ExpiresAt
	}
	if p.Closed {
		out.Problem = &api.Failure{Code: string(core.CodePortClosed), Message: fmt.Sprintf("no program in the workspace listens on port %d yet", p.GuestPort)}
	}
	return out
}

func imageOf(i controller.Image) api.Image {
	return api.Image{
		Name: i.Name, Digest: string(i.Digest), SizeBytes: i.SizeBytes, CreatedAt: i.BuiltAt,
		RunnerIDs: convert(i.Runners, func(id core.RunnerID) api.RunnerID { return string(id) }),
	}
}

func capacityOf(c runnerapi.Capacity) api.Capacity {
	return api.Capacity{Sandboxes: c.Sandboxes, VCPUs: c.VCPUs, MemoryMiB: c.MemoryMiB}
}

func runnerOf(r controller.Runner) api.Runner {
	out := api.Runner{
		ID: string(r.Info.RunnerID), Hostname: r.Info.Hostname, State: api.RunnerReady, Class: classOf(r.Info.Class), Capacity: capacityOf(r.Info.Capacity),
		Allocated: capacityOf(r.Info.Allocated), DiskFreeMB: r.Info.DiskFreeMB, KVM: r.Info.KVM, StartedAt: r.Info.StartedAt, HeartbeatAt: r.HeartbeatAt,
	}
	switch {
	case !r.Fresh:
		out.State = api.RunnerUnreachable
	case r.Draining:
		out.State = api.RunnerDraining
	}
	return out
}

func processOf(p controller.Process) api.Process {
	return api.Process{PID: p.PID, PPID: p.PPID, Comm: p.Comm, Cmdline: p.Cmdline, State: p.State, RSSBytes: p.RSSBytes}
}

func flowOf(f flows.Flow) api.Flow {
	return api.Flow{
		ID: f.ID, WorkspaceID: string(f.WorkspaceID), Epoch: f.Epoch, At: f.At, Protocol: api.FlowProtocol(f.Spoken), Host: f.Host, Port: int(f.Port),
		Method: f.Method, Path: f.Path, Outcome: api.FlowOutcome(f.Outcome), Opaque: f.Opaque || f.Method == "" && !f.Counted, Counted: f.Counted, Rule: f.Rule, GrantID: f.Grant, Reason: f.Reason, EndedAt: f.Ended,
		Status: f.Status, SentBytes: f.Sent, ReceivedBytes: f.Received, Count: f.Flows(), LastAt: f.Last,
	}
}

func effectOf(e flows.Effect) api.Effect {
	return api.Effect{CheckpointID: string(e.CheckpointID), Depth: e.Depth, Flow: flowOf(e.Flow)}
}

func seconds(n int64) time.Duration { return time.Duration(n) * time.Second }
