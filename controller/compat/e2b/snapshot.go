package e2b

import (
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/e2b/template"
	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// make creates the workspace: from a snapshot if the template is the id of one, else from an image, else from a named snapshot.
func (n newSandbox) make(r *http.Request, c call) (coppice.Workspace, error) {
	ctx := r.Context()
	if id, ok := checkpointID(n.template); ok {
		return n.fork(r, c, id)
	}
	absent := shared.Failf(http.StatusNotFound, "template %q was not found: there is no image and no snapshot with this name", shared.Clip(n.template))
	if err := n.defaults(r, c); err != nil {
		return coppice.Workspace{}, err
	}
	for _, image := range imagesOf(n.template) {
		ws, err := c.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{
			Image: image, TTLSeconds: n.ttl, Env: n.env, Labels: n.labels, Network: n.network, OnTTL: n.onTTL, AutoResume: n.autoResume,
		})
		if !errors.Is(err, coppice.CodeImageNotFound) {
			return ws, err
		}
	}
	cp, err := c.namedSnapshot(r, n.template)
	if err != nil {
		return coppice.Workspace{}, err
	}
	if cp == nil {
		return coppice.Workspace{}, absent
	}
	return n.fork(r, c, cp.ID)
}

// defaults labels the sandbox with the user and the directory that its template has for processes.
func (n newSandbox) defaults(r *http.Request, c call) error {
	if isSnapshotName(strings.TrimSuffix(n.template, ":"+defaultTag)) {
		return nil
	}
	image, err := c.builtImage(r, n.template)
	if err != nil {
		if status := shared.Translate(err).Status; status == http.StatusNotFound || status == http.StatusForbidden { // a key that may not read images can use them nevertheless
			return nil
		}
		return err
	}
	for label, value := range map[string]string{labelUser: image.Config.User, labelDir: image.Config.Workdir} {
		if value != "" && len(value) <= partBytes {
			n.labels[label] = value
		}
	}
	return nil
}

// imagesOf are the images that a template's name can mean.
func imagesOf(named string) []string {
	name := strings.TrimSuffix(named, ":"+defaultTag)
	if isSnapshotName(name) {
		return nil
	}
	if built := template.ImageName(name); built != name {
		return []string{built, name}
	}
	return []string{name}
}

func (n newSandbox) fork(r *http.Request, c call, id coppice.CheckpointID) (coppice.Workspace, error) {
	result, err := c.ForkCheckpoint(r.Context(), id, coppice.ForkCheckpointRequest{
		TTLSeconds: n.ttl, Env: n.env, Labels: n.labels, Network: n.network, OnTTL: n.onTTL, AutoResume: n.autoResume, AllOrNothing: true,
	})
	if errors.Is(err, coppice.CodeCheckpointNotFound) {
		return coppice.Workspace{}, shared.Failf(http.StatusNotFound, "template %q was not found", shared.Clip(n.template))
	}
	if err != nil {
		return coppice.Workspace{}, err
	}
	if len(result.Children) != 1 || result.Children[0].Workspace == nil {
		return coppice.Workspace{}, shared.Failf(http.StatusInternalServerError, "the snapshot could not be started")
	}
	return *result.Children[0].Workspace, nil
}

// namedSnapshot finds a snapshot by the name that a client gave it, with or without namespace and tag; nil if there is none.
func (c call) namedSnapshot(r *http.Request, name string) (*coppice.Checkpoint, error) {
	name = name[strings.LastIndex(name, "/")+1:]
	name, tag, tagged := strings.Cut(name, ":")
	if tagged && tag != defaultTag || !legalName(name) {
		return nil, nil //nolint:nilnil // none is not a fault
	}
	f := coppice.CheckpointFilter{Labels: []string{labelSnapshot}}
	if coppiceName(name) { // it is the checkpoint's own name
		f.Name = name
	} else {
		f.Labels = []string{labelSnapshot, labelName + "=" + name}
	}
	for cp, err := range c.Checkpoints(r.Context(), f) {
		return &cp, err
	}
	return nil, nil //nolint:nilnil // none is not a fault
}

const alphabet = "abcdefghijklmnopqrstuvwxyz0123456789-"

// legalName reports whether a client may give a snapshot a name. E2B's names may have underscores, too.
func legalName(name string) bool {
	const most = 63
	return name != "" && len(name) <= most && strings.Trim(name, alphabet+"_") == ""
}

// coppiceName reports whether a legal name can be that of a checkpoint. Others are in a label, so one may be used again: then the
// newest snapshot counts.
func coppiceName(name string) bool {
	return strings.Trim(name, alphabet) == "" && !strings.HasPrefix(name, "-") && !strings.HasSuffix(name, "-")
}

func nameOfSnapshot(cp coppice.Checkpoint) string {
	if cp.Name != "" {
		return cp.Name
	}
	return cp.Labels[labelName]
}

const (
	maxForks    = 100
	forkFailure = http.StatusInternalServerError
)

// fork forks a running sandbox. A child lives as long as its parent unless the request says otherwise.
func fork(w http.ResponseWriter, r *http.Request, c call) error {
	var q struct {
		Timeout *int64 `json:"timeout"`
		Count   *int   `json:"count"`
	}
	if err := readJSON(r, &q); err != nil {
		return err
	}
	count := 1
	if q.Count != nil {
		count = *q.Count
	}
	if count < 1 || count > maxForks {
		return shared.Failf(http.StatusBadRequest, "count: %d is not between 1 and %d", count, maxForks)
	}
	key, err := c.Self(r.Context())
	if err != nil {
		return err
	}
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	if paused(ws) {
		return shared.Failf(http.StatusConflict, "sandbox %q is paused; connect to it first", c.sandbox)
	}
	var ttl int64
	if !ws.ExpiresAt.IsZero() {
		ttl = max(int64(time.Until(ws.ExpiresAt).Seconds()), 1)
	}
	if q.Timeout != nil {
		if ttl, err = seconds(q.Timeout, 0); err != nil {
			return err
		}
	}
	result, err := c.ForkWorkspace(r.Context(), ws.ID, coppice.ForkWorkspaceRequest{
		Count: &count, TTLSeconds: ttl, OnTTL: ws.OnTTL, AutoResume: ws.AutoResume, Labels: inherited(ws.Labels),
	})
	if err != nil {
		return err
	}
	type forkError struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}
	type forked struct {
		Sandbox *sandboxView `json:"sandbox,omitempty"`
		Error   *forkError   `json:"error,omitempty"`
	}
	out := make([]forked, len(result.Children))
	for i, child := range result.Children {
		if child.Workspace != nil && child.Problem == nil {
			view := c.layer.sandboxView(*child.Workspace, key.ID)
			out[i].Sandbox = &view
			continue
		}
		out[i].Error = &forkError{forkFailure, "the fork failed"}
		if child.Problem != nil {
			out[i].Error.Message = child.Problem.Message + " (" + child.Problem.Code + ")"
		}
	}
	writeJSON(w, http.StatusCreated, out)
	return nil
}

type snapshotView struct {
	SnapshotID string   `json:"snapshotID"`
	Names      []string `json:"names"`
}

func viewSnapshot(cp coppice.Checkpoint) snapshotView {
	v := snapshotView{SnapshotID: snapshotID(cp.ID), Names: []string{}}
	if name := nameOfSnapshot(cp); name != "" {
		v.Names = append(v.Names, name)
	}
	return v
}

func takeSnapshot(w http.ResponseWriter, r *http.Request, c call) error {
	var q struct {
		Name   string `json:"name"`
		Memory *bool  `json:"memory"`
	}
	if err := readJSON(r, &q); err != nil {
		return err
	}
	if q.Memory != nil && !*q.Memory {
		return unsupported("memory: false (a snapshot without memory)")
	}
	name, tag, tagged := strings.Cut(q.Name, ":")
	if q.Name != "" && !legalName(name) || tagged && tag != defaultTag {
		return shared.Failf(http.StatusBadRequest, "name: a snapshot's name has 1 to 63 lower-case letters, digits, hyphens and underscores, and no other tag than %q", defaultTag)
	}
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	if paused(ws) {
		return shared.Failf(http.StatusConflict, "sandbox %q is paused; connect to it first", c.sandbox)
	}
	req := coppice.CreateCheckpointRequest{Labels: coppice.Labels{labelSnapshot: snapshotMark}}
	switch {
	case name == "":
	case coppiceName(name):
		req.Name = name
	default:
		req.Labels[labelName] = name
	}
	cp, err := c.CreateCheckpoint(r.Context(), ws.ID, req)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusCreated, viewSnapshot(cp))
	return nil
}

func listSnapshots(w http.ResponseWriter, r *http.Request, c call) error {
	f := coppice.CheckpointFilter{Labels: []string{labelSnapshot}}
	if id := rawQuery(r, "sandboxID"); id != "" {
		ws, ok := workspaceID(id)
		if !ok {
			writeJSON(w, http.StatusOK, []snapshotView{})
			return nil
		}
		f.WorkspaceID = ws
	}
	name, _, _ := strings.Cut(rawQuery(r, "name"), ":")
	page, err := newPage(r)
	if err != nil {
		return err
	}
	out := []snapshotView{}
	for cp, err := range c.Checkpoints(r.Context(), f) {
		if err != nil {
			return err
		}
		if !page.take(cp.ID) || name != "" && nameOfSnapshot(cp) != name {
			continue
		}
		if page.full(w, len(out)) {
			break
		}
		out = append(out, viewSnapshot(cp))
		page.last = cp.ID
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func deleteSnapshot(w http.ResponseWriter, r *http.Request, c call) error {
	name := r.PathValue("template")
	absent := shared.Failf(http.StatusNotFound, "snapshot %q was not found", shared.Clip(name))
	id, ok := checkpointID(name)
	if ok {
		cp, err := c.Checkpoint(r.Context(), id)
		if errors.Is(err, coppice.CodeCheckpointNotFound) || err == nil && (cp.Labels[labelSnapshot] == "" || cp.State == coppice.CheckpointDeleted) {
			return absent
		}
		if err != nil {
			return err
		}
	} else {
		cp, err := c.namedSnapshot(r, name)
		if err != nil {
			return err
		}
		if cp == nil {
			image, err := c.builtImage(r, name)
			if err == nil {
				err = c.DeleteImage(r.Context(), image.Name)
			}
			if err == nil {
				w.WriteHeader(http.StatusNoContent)
			}
			return err
		}
		id = cp.ID
	}
	if err := c.DeleteCheckpoint(r.Context(), id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func templateExists(w http.ResponseWriter, r *http.Request, c call) error {
	alias := r.PathValue("alias")
	cp, err := c.namedSnapshot(r, alias)
	if err != nil {
		return err
	}
	found := cp != nil
	for image, err := range c.Images(r.Context()) {
		if err != nil {
			return err
		}
		found = found || image.Name == strings.TrimSuffix(alias, ":"+defaultTag)
	}
	if !found {
		_, err := c.builtImage(r, alias)
		if found = err == nil; err != nil && shared.Translate(err).Status != http.StatusNotFound {
			return err
		}
	}
	if !found {
		return shared.Failf(http.StatusNotFound, "template %q was not found", shared.Clip(alias))
	}
	writeJSON(w, http.StatusOK, map[string]any{"templateID": alias, "public": false})
	return nil
}
