package runnertest

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/netip"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// The messages of controllers as the release before this one knew them, where they had fewer fields.
type (
	oldFork struct {
		CheckpointID core.CheckpointID  `json:"checkpoint_id"`
		Children     []oldChild         `json:"children"`
		Sources      []runnerapi.Stored `json:"sources,omitempty"`
		Peers        []runnerapi.Peer   `json:"peers,omitempty"`
		Keys         runnerapi.Keys     `json:"keys,omitempty"`
	}
	oldChild struct {
		SandboxID   core.SandboxID    `json:"sandbox_id"`
		WorkspaceID core.WorkspaceID  `json:"workspace_id"`
		Epoch       int64             `json:"epoch"`
		Identity    core.Identity     `json:"identity"`
		Egress      core.EgressPolicy `json:"egress_policy"`
		Rules       oldRules          `json:"egress_rules"`
		Env         map[string]string `json:"env,omitempty"`
		DiskGiB     int               `json:"disk_gib,omitempty"`
		CA          string            `json:"ca,omitempty"`
	}
	oldRules struct {
		Version int64    `json:"version"`
		Allow   []string `json:"allow,omitempty"`
		Grants  []byte   `json:"grants,omitempty"`
		Key     []byte   `json:"key,omitempty"`
	}
	oldPort struct {
		ID        core.PortID    `json:"id"`
		GuestPort int            `json:"guest_port"`
		Listen    netip.AddrPort `json:"listen"`
	}
	oldCapture struct {
		CheckpointID core.CheckpointID `json:"checkpoint_id"`
		Stop         bool              `json:"stop,omitempty"`
		Fork         bool              `json:"fork,omitempty"`
	}
	oldTemplate struct {
		CheckpointID core.CheckpointID `json:"checkpoint_id"`
		Image        core.Digest       `json:"image"`
		Resources    core.Resources    `json:"resources"`
	}
)

// SetOld has the fake read messages as a runner of the release before does, which refuses a field that it does not know; or
// again as one of today.
func (r *Runner) SetOld(old bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.old = old
}

// outdated answers a message that an old runner cannot read. It reports whether it has.
func (r *Runner) outdated(w http.ResponseWriter, q *http.Request) bool {
	r.mu.Lock()
	old := r.old
	r.mu.Unlock()
	if !old || q.Method != http.MethodPost && q.Method != http.MethodPut || strings.Contains(q.URL.Path, "/guest/") {
		return false
	}
	var in any
	for suffix, message := range map[string]any{
		runnerapi.PathForks: &oldFork{}, runnerapi.PathTemplates: &oldTemplate{}, "/egress": &oldRules{}, "/ports": &oldPort{}, "/checkpoints": &oldCapture{},
	} {
		if strings.HasSuffix(q.URL.Path, suffix) {
			in = message
		}
	}
	if in == nil {
		return false
	}
	body, err := io.ReadAll(q.Body)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(body))
		d.DisallowUnknownFields()
		err = d.Decode(in)
	}
	if err != nil {
		reply(w, nil, core.Wrapf(err, core.Invalid, core.CodeMalformedBody, "the runner cannot read the request: %s", core.Clip(err.Error())))
		return true
	}
	q.Body = io.NopCloser(bytes.NewReader(body))
	return false
}
