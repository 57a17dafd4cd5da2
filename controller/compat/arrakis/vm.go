package arrakis

import (
	"errors"
	"net/http"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The states of a VM. Those that Arrakis does not have say why a VM cannot be used.
const (
	statusRunning = "RUNNING"
	statusPaused  = "PAUSED"
	statusStopped = "STOPPED"
	statusCreated = "CREATED" // it does not run yet
	statusLost    = "LOST"    // its machine has ended without a request
)

// The values of labelState.
const (
	asPaused  = "paused"
	asStopped = "stopped"
)

// vmView is Arrakis' VM. The id of the workspace is an addition: Coppice's own clients can use it.
type vmView struct {
	VMName        string     `json:"vmName"`
	Status        string     `json:"status"`
	IP            string     `json:"ip"`
	TapDeviceName string     `json:"tapDeviceName"`
	PortForwards  []portView `json:"portForwards,omitempty"` // never null: clients iterate over it
	WorkspaceID   string     `json:"workspaceId"`
}

func view(ws coppice.Workspace) vmView {
	v := vmView{VMName: ws.Labels[labelName], Status: statusOf(ws), WorkspaceID: ws.ID}
	if ws.Network.IP != "" {
		v.IP = ws.Network.IP + "/32" // Arrakis' clients expect a mask
	}
	return v
}

func statusOf(ws coppice.Workspace) string {
	switch ws.State {
	case coppice.WorkspaceReady, coppice.WorkspaceCheckpointing:
		return statusRunning
	case coppice.WorkspaceSuspended:
		if ws.Labels[labelState] == asStopped {
			return statusStopped
		}
		return statusPaused
	case coppice.WorkspaceLost:
		return statusLost
	case coppice.WorkspaceCreating, coppice.WorkspaceRestoring, coppice.WorkspaceQuarantined:
	case coppice.WorkspaceTerminating, coppice.WorkspaceTerminated, coppice.WorkspaceFailed: // these are not shown
	}
	return statusCreated
}

// shown are the states of the workspaces that are VMs. A lost one stays until somebody destroys it: it must not vanish silently.
var shown = []coppice.WorkspaceState{
	coppice.WorkspaceCreating, coppice.WorkspaceRestoring, coppice.WorkspaceQuarantined, coppice.WorkspaceReady, coppice.WorkspaceCheckpointing,
	coppice.WorkspaceSuspended, coppice.WorkspaceLost,
}

// vms returns the workspaces of a VM, newest first: at most one that lives, and those that were lost before.
func (c call) vms(r *http.Request, name string) (out []coppice.Workspace, err error) {
	for ws, err := range c.Workspaces(r.Context(), coppice.WorkspaceFilter{Name: coppiceName(name), Labels: []string{labelName}, States: shown}) {
		if err != nil {
			return nil, err
		}
		if ws.Labels[labelName] == name {
			out = append(out, ws)
		}
	}
	return out, nil
}

// vm returns the workspace of the call's VM.
func (c call) vm(r *http.Request) (coppice.Workspace, error) {
	all, err := c.vms(r, c.name)
	if err != nil {
		return coppice.Workspace{}, err
	}
	if len(all) == 0 {
		return coppice.Workspace{}, notFound(c.name)
	}
	return all[0], nil
}

// running returns the workspace of the call's VM if commands can run in it.
func (c call) running(r *http.Request) (coppice.Workspace, error) {
	ws, err := c.vm(r)
	if err != nil {
		return ws, err
	}
	switch status := statusOf(ws); status {
	case statusPaused, statusStopped:
		return ws, shared.Failf(http.StatusConflict, "VM %q is %s; resume it first (PATCH with status resume)", shared.Clip(c.name), status)
	case statusLost:
		return ws, lost(c.name)
	}
	return ws, nil
}

func lost(name string) *shared.StatusError {
	return shared.Failf(http.StatusConflict, "the machine of VM %q has ended, and its memory and disk are lost; destroy the VM, or restore a snapshot under this name", shared.Clip(name))
}

func list(r *http.Request, c call) (any, error) {
	vms, seen := []vmView{}, map[string]bool{}
	for ws, err := range c.Workspaces(r.Context(), coppice.WorkspaceFilter{Labels: []string{labelName}, States: shown}) {
		if err != nil {
			return nil, err
		}
		if name := ws.Labels[labelName]; !seen[name] {
			seen[name] = true
			vms = append(vms, view(ws))
		}
	}
	return map[string]any{"vms": vms}, nil
}

func describe(r *http.Request, c call) (any, error) {
	ws, err := c.vm(r)
	if err != nil {
		return nil, err
	}
	return c.describe(r, ws)
}

// describe shows a VM with its ports, which a list leaves out.
func (c call) describe(r *http.Request, ws coppice.Workspace) (vmView, error) {
	v := view(ws)
	if v.Status != statusRunning {
		return v, nil
	}
	var err error
	v.PortForwards, err = c.forwards(r, ws)
	return v, err
}

type startRequest struct {
	VMName     string `json:"vmName"`
	SnapshotID string `json:"snapshotId"`
	Kernel     string `json:"kernel"`
	Initramfs  string `json:"initramfs"`
	Rootfs     string `json:"rootfs"`
	// entryPoint is ignored, as Arrakis does
}

// start makes a VM, restores one from a snapshot, or starts a stopped one.
func start(r *http.Request, c call) (any, error) {
	var q startRequest
	if err := readJSON(c.body, &q); err != nil {
		return nil, err
	}
	if f := checkName("vm name", q.VMName, maxName); f != nil {
		return nil, f
	}
	for field, value := range map[string]string{"kernel": q.Kernel, "initramfs": q.Initramfs, "rootfs": q.Rootfs} {
		if value != "" {
			return nil, shared.Failf(http.StatusNotImplemented, "%s: Coppice takes no paths of its host from clients; the operator chooses the image of new VMs (--arrakis-image)", field)
		}
	}
	all, err := c.vms(r, q.VMName)
	if err != nil {
		return nil, err
	}
	var ws coppice.Workspace
	if len(all) > 0 {
		ws = all[0]
	}
	if q.SnapshotID != "" {
		ws, err = c.restore(r, q.VMName, q.SnapshotID, ws)
	} else {
		ws, err = c.start(r, q.VMName, ws)
	}
	if err != nil {
		return nil, err
	}
	if err := c.prepare(r, ws); err != nil {
		return nil, err
	}
	return c.describe(r, ws)
}

// start starts a VM under a name. The workspace is the present one with this name, or empty.
func (c call) start(r *http.Request, name string, present coppice.Workspace) (coppice.Workspace, error) {
	if present.ID == "" {
		return c.CreateWorkspace(r.Context(), coppice.CreateWorkspaceRequest{
			Name: coppiceName(name), Image: c.layer.Image, Labels: coppice.Labels{labelName: name}, Network: c.layer.network(),
		})
	}
	switch status := statusOf(present); status {
	case statusStopped:
		return c.ResumeWorkspace(r.Context(), present.ID)
	case statusLost:
		return present, lost(name)
	default:
		return present, shared.Failf(http.StatusConflict, "VM %q exists already, and is %s", shared.Clip(name), status)
	}
}

// network says what a new VM may reach.
func (l *layer) network() coppice.NetworkRequest {
	if l.OpenEgress {
		return coppice.NetworkRequest{EgressPolicy: coppice.EgressAllowAll}
	}
	return coppice.NetworkRequest{EgressPolicy: coppice.EgressDenyAll}
}

// patch pauses, stops or resumes a VM. Paused and stopped are the same for Coppice: memory and disk are kept, and the VM uses no
// processor and no memory.
func patch(r *http.Request, c call) (any, error) {
	var q struct {
		Status string `json:"status"`
	}
	if err := readJSON(c.body, &q); err != nil {
		return nil, err
	}
	state := map[string]string{"paused": asPaused, "stopped": asStopped, "resume": "", "resumed": "", "running": ""}
	as, ok := state[q.Status]
	if !ok {
		return nil, shared.Failf(http.StatusBadRequest, "Invalid status value: %q is none of paused, stopped and resume", shared.Clip(q.Status))
	}
	ws, err := c.vm(r)
	if err != nil {
		return nil, err
	}
	if statusOf(ws) == statusLost {
		return nil, lost(c.name)
	}
	if as == "" {
		_, err = c.ResumeWorkspace(r.Context(), ws.ID)
		return done, err
	}
	// The label comes first: nobody shall see the VM in the other state. While it runs, the label means nothing.
	if _, err := c.PatchWorkspace(r.Context(), ws.ID, coppice.PatchWorkspaceRequest{Labels: coppice.LabelsPatch{labelState: &as}}); err != nil {
		return nil, err
	}
	_, err = c.SuspendWorkspace(r.Context(), ws.ID)
	return done, err
}

func destroy(r *http.Request, c call) (any, error) {
	all, err := c.vms(r, c.name)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, notFound(c.name)
	}
	return c.terminate(r, all)
}

// destroyAll destroys the VMs of this layer. The other workspaces of the project stay.
func destroyAll(r *http.Request, c call) (any, error) {
	var all []coppice.Workspace
	for ws, err := range c.Workspaces(r.Context(), coppice.WorkspaceFilter{Labels: []string{labelName}, States: shown}) {
		if err != nil {
			return nil, err
		}
		all = append(all, ws)
	}
	return c.terminate(r, all)
}

// terminate ends workspaces. One that fails does not keep the others.
func (c call) terminate(r *http.Request, all []coppice.Workspace) (any, error) {
	const together = 8
	var (
		group errgroup.Group
		mu    sync.Mutex // guards errs
		errs  []error
	)
	group.SetLimit(together)
	for _, ws := range all {
		group.Go(func() error {
			if _, err := c.TerminateWorkspace(r.Context(), ws.ID); err != nil && !errors.Is(err, coppice.CodeWorkspaceNotFound) {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
			return nil
		})
	}
	_ = group.Wait() // the errors are in errs
	return done, errors.Join(errs...)
}
