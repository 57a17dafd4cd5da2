package e2b

import (
	"net/http"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/e2b/template"
	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// How long a sandbox lives if the client does not say: in version 2 of the API, and in version 1.
const (
	timeoutV2 = 300
	timeoutV1 = 15
)

// envdVersion is the version of the daemon that this layer implements: it says which of its features clients may use.
const envdVersion = "0.6.13"

// sandboxView is E2B's Sandbox.
type sandboxView struct {
	TemplateID         string  `json:"templateID"`
	SandboxID          string  `json:"sandboxID"`
	ClientID           string  `json:"clientID"`
	EnvdVersion        string  `json:"envdVersion"`
	EnvdAccessToken    string  `json:"envdAccessToken"`
	TrafficAccessToken string  `json:"trafficAccessToken"`
	Domain             *string `json:"domain"`
}

// listedView is E2B's ListedSandbox.
type listedView struct {
	TemplateID  string            `json:"templateID"`
	SandboxID   string            `json:"sandboxID"`
	ClientID    string            `json:"clientID"`
	EnvdVersion string            `json:"envdVersion"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"`
	CPUCount    int               `json:"cpuCount"`
	MemoryMB    int               `json:"memoryMB"`
	DiskSizeMB  int               `json:"diskSizeMB"`
	State       string            `json:"state"`
	Metadata    map[string]string `json:"metadata"`
}

// detailView is E2B's SandboxDetail.
type detailView struct {
	listedView
	EnvdAccessToken     string        `json:"envdAccessToken"`
	AllowInternetAccess bool          `json:"allowInternetAccess"`
	Domain              *string       `json:"domain"`
	Lifecycle           lifecycleView `json:"lifecycle"`
}

type lifecycleView struct {
	OnTimeout  string `json:"onTimeout"`
	AutoResume bool   `json:"autoResume"`
}

// never is the end time of a sandbox that does not end: E2B's clients require a time.
var never = time.Date(9999, time.December, 31, 0, 0, 0, 0, time.UTC)

const (
	stateRunning = "running"
	statePaused  = "paused"
)

// sandbox describes a workspace to the client that has a key, with tokens for this key.
func (c call) sandboxView(r *http.Request, ws coppice.Workspace) (sandboxView, error) {
	key, err := c.Self(r.Context())
	if err != nil {
		return sandboxView{}, err
	}
	return c.layer.sandboxView(ws, key.ID), nil
}

func (l *layer) sandboxView(ws coppice.Workspace, key coppice.KeyID) sandboxView {
	l.issued.add(ws.ID, key)
	return sandboxView{
		TemplateID: templateOf(ws), SandboxID: sandboxID(ws.ID), ClientID: clientID, EnvdVersion: envdVersion, Domain: l.domain(),
		EnvdAccessToken: l.tokens.issue(purposeEnvd, ws.ID, key), TrafficAccessToken: l.tokens.issue(purposeTraffic, ws.ID, key),
	}
}

// clientID is obsolete in E2B, but required.
const clientID = "coppice"

func (l *layer) domain() *string {
	if l.Domain == "" {
		return nil
	}
	return &l.Domain
}

func templateOf(ws coppice.Workspace) string {
	if t := ws.Labels[labelTemplate]; t != "" {
		return t
	}
	return ws.Image.Name
}

func listed(ws coppice.Workspace) listedView {
	v := listedView{
		TemplateID: templateOf(ws), SandboxID: sandboxID(ws.ID), ClientID: clientID, EnvdVersion: envdVersion, StartedAt: ws.CreatedAt, EndAt: ws.ExpiresAt,
		CPUCount: ws.Resources.VCPUs, MemoryMB: ws.Resources.MemoryMiB, DiskSizeMB: ws.Resources.DiskGiB << 10, State: stateRunning, Metadata: metadataOf(ws.Labels),
	}
	if paused(ws) {
		v.State = statePaused
	}
	if v.EndAt.IsZero() {
		v.EndAt = never
	}
	return v
}

// createRequest is the body of a create, of both versions.
type createRequest struct {
	TemplateID          string            `json:"templateID"`
	Timeout             *int64            `json:"timeout"`
	Secure              *bool             `json:"secure"` // it always is
	AutoPause           bool              `json:"autoPause"`
	AutoPauseMemory     *bool             `json:"autoPauseMemory"`
	AutoResume          *autoResume       `json:"autoResume"`
	AllowInternetAccess *bool             `json:"allow_internet_access"`
	Network             *networkRequest   `json:"network"`
	Metadata            map[string]string `json:"metadata"`
	EnvVars             map[string]string `json:"envVars"`
	MCP                 any               `json:"mcp"`
	IAM                 any               `json:"iam"`
	VolumeMounts        []any             `json:"volumeMounts"`
}

type autoResume struct {
	Enabled bool `json:"enabled"`
}

type networkRequest struct {
	AllowPublicTraffic *bool          `json:"allowPublicTraffic"` // never without a token
	AllowOut           []string       `json:"allowOut"`
	DenyOut            []string       `json:"denyOut"`
	DNSServers         []string       `json:"dnsServers"`
	EgressProxy        any            `json:"egressProxy"`
	MaskRequestHost    *string        `json:"maskRequestHost"`
	HTTPSPorts         []any          `json:"httpsPorts"`
	Rules              map[string]any `json:"rules"`
}

// unsupported refuses a request with a field that this layer does not support.
func (q createRequest) unsupported() error {
	n := q.Network
	if n == nil {
		n = &networkRequest{}
	}
	for _, f := range []struct {
		asked bool
		name  string
	}{
		{q.AutoPauseMemory != nil && !*q.AutoPauseMemory, "autoPauseMemory"},
		{q.MCP != nil, "mcp"},
		{q.IAM != nil, "iam"},
		{len(q.VolumeMounts) > 0, "volumeMounts"},
		{len(n.DNSServers) > 0, "network.dnsServers"},
		{n.EgressProxy != nil, "network.egressProxy"},
		{n.MaskRequestHost != nil, "network.maskRequestHost"},
		{len(n.HTTPSPorts) > 0, "network.httpsPorts"},
		{len(n.Rules) > 0, "network.rules"},
	} {
		if f.asked {
			return unsupported(f.name)
		}
	}
	return nil
}

// allAddresses is how E2B's clients deny everything.
const allAddresses = "0.0.0.0/0"

// network translates the network rules of a sandbox. Coppice allows everything, named hosts, or nothing.
func (q createRequest) network(open bool) (coppice.NetworkRequest, error) {
	closed := coppice.NetworkRequest{EgressPolicy: coppice.EgressDenyAll}
	n := q.Network
	if n == nil {
		n = &networkRequest{}
	}
	denied := q.AllowInternetAccess != nil && !*q.AllowInternetAccess
	for _, d := range n.DenyOut {
		if d != allAddresses {
			return closed, unsupported("network.denyOut with anything but " + allAddresses)
		}
		denied = true
	}
	switch {
	case len(n.AllowOut) > 0 && !denied:
		return closed, unsupported("network.allowOut without denyOut [" + allAddresses + "]")
	case len(n.AllowOut) > 0:
		allow := n.AllowOut
		closed.Allow = &allow
		return closed, nil
	case denied || !open:
		return closed, nil
	}
	return coppice.NetworkRequest{EgressPolicy: coppice.EgressAllowAll}, nil
}

// seconds checks a time to live. Coppice's 0 means for ever; E2B's means now.
func seconds(given *int64, otherwise int64) (int64, error) {
	s := otherwise
	if given != nil {
		s = *given
	}
	const most = 365 * 24 * 3600
	if s < 0 || s > most {
		return 0, shared.Failf(http.StatusBadRequest, "timeout: %d is not between 0 and %d seconds", s, most)
	}
	return max(s, 1), nil
}

// create makes a sandbox from an image or from a snapshot.
func (l *layer) create(timeout int64) handler {
	return func(w http.ResponseWriter, r *http.Request, c call) error {
		key, err := c.Self(r.Context())
		if err != nil {
			return err
		}
		var q createRequest
		if err := readJSON(r, &q); err != nil {
			return err
		}
		if q.TemplateID == "" {
			q.TemplateID = template.Base
		}
		if len(q.TemplateID) > template.MaxName {
			return shared.Failf(http.StatusBadRequest, "templateID has more than %d characters", template.MaxName)
		}
		if err := q.unsupported(); err != nil {
			return err
		}
		n := newSandbox{template: q.TemplateID, env: q.EnvVars, onTTL: onTTL(q.AutoPause), autoResume: q.AutoResume != nil && q.AutoResume.Enabled}
		if n.ttl, err = seconds(q.Timeout, timeout); err != nil {
			return err
		}
		if n.network, err = q.network(l.OpenEgress); err != nil {
			return err
		}
		if n.labels, err = labelsOf(q.Metadata, q.TemplateID); err != nil {
			return err
		}
		ws, err := n.make(r, c)
		if err != nil {
			return err
		}
		writeJSON(w, http.StatusCreated, l.sandboxView(ws, key.ID))
		return nil
	}
}

func connectSandbox(w http.ResponseWriter, r *http.Request, c call) error {
	var q struct {
		Timeout   *int64 `json:"timeout"`
		Memory    *bool  `json:"memory"`
		AutoPause bool   `json:"autoPause"`
	}
	if err := readJSON(r, &q); err != nil {
		return err
	}
	if q.Memory != nil && !*q.Memory {
		return unsupported("memory: false (boot the sandbox again)")
	}
	ttl, err := seconds(q.Timeout, timeoutV2)
	if err != nil {
		return err
	}
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	status := http.StatusOK
	if paused(ws) {
		if ws, err = c.ResumeWorkspace(r.Context(), ws.ID); err != nil {
			return err
		}
		status = http.StatusCreated
		change := coppice.PatchWorkspaceRequest{TTLSeconds: &ttl}
		if q.AutoPause { // of the oldest clients; absent, it changes nothing
			change.OnTTL = coppice.TTLSuspend
		}
		if ws, err = c.PatchWorkspace(r.Context(), ws.ID, change); err != nil {
			return err
		}
	} else if q.Timeout != nil { // it only extends the time
		if ws, err = c.extend(r, ws, ttl); err != nil {
			return err
		}
	}
	view, err := c.sandboxView(r, ws)
	if err != nil {
		return err
	}
	writeJSON(w, status, view)
	return nil
}

// resume serves the oldest clients. If the sandbox runs, it is a conflict.
func resume(w http.ResponseWriter, r *http.Request, c call) error {
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	if !paused(ws) {
		return shared.Failf(http.StatusConflict, "sandbox %q is not paused", c.sandbox)
	}
	return connectSandbox(w, r, c)
}

// live sets how long a sandbox lives from now.
func (c call) live(r *http.Request, id coppice.WorkspaceID, ttl int64) (coppice.Workspace, error) {
	return c.PatchWorkspace(r.Context(), id, coppice.PatchWorkspaceRequest{TTLSeconds: &ttl})
}

func (c call) extend(r *http.Request, ws coppice.Workspace, ttl int64) (coppice.Workspace, error) {
	if ws.ExpiresAt.IsZero() || !ws.ExpiresAt.Before(time.Now().Add(time.Duration(ttl)*time.Second)) {
		return ws, nil
	}
	return c.live(r, ws.ID, ttl)
}

func describe(w http.ResponseWriter, r *http.Request, c call) error {
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	view, err := c.sandboxView(r, ws)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, detailView{
		listedView: listed(ws), EnvdAccessToken: view.EnvdAccessToken, Domain: view.Domain,
		AllowInternetAccess: ws.Network.EgressPolicy == coppice.EgressAllowAll, Lifecycle: lifecycleView{OnTimeout: onTimeout(ws), AutoResume: ws.AutoResume},
	})
	return nil
}

func kill(w http.ResponseWriter, r *http.Request, c call) error {
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	if _, err := c.TerminateWorkspace(r.Context(), ws.ID); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func setTimeout(w http.ResponseWriter, r *http.Request, c call) error {
	var q struct {
		Timeout *int64 `json:"timeout"`
	}
	if err := readJSON(r, &q); err != nil {
		return err
	}
	if q.Timeout == nil {
		return shared.Failf(http.StatusBadRequest, "timeout is missing")
	}
	ttl, err := seconds(q.Timeout, 0)
	if err != nil {
		return err
	}
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	if _, err := c.live(r, ws.ID, ttl); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func refresh(w http.ResponseWriter, r *http.Request, c call) error {
	var q struct {
		Duration *int64 `json:"duration"`
	}
	if err := readJSON(r, &q); err != nil {
		return err
	}
	ttl, err := seconds(q.Duration, timeoutV1)
	if err != nil {
		return err
	}
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	if _, err := c.extend(r, ws, ttl); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// onTTL says what becomes of a sandbox at the end of its time.
func onTTL(autoPause bool) coppice.OnTTL {
	if autoPause {
		return coppice.TTLSuspend
	}
	return coppice.TTLTerminate
}

// onTimeout is the same in E2B's words.
func onTimeout(ws coppice.Workspace) string {
	if ws.OnTTL == coppice.TTLSuspend {
		return "pause"
	}
	return "kill"
}

// pause suspends a sandbox. A paused one has no end: E2B's clients expect it to stay until they return. One that is paused at
// the end of its time has none anyway, and keeps its time for a resume.
func pause(w http.ResponseWriter, r *http.Request, c call) error {
	var q struct {
		Memory              *bool `json:"memory"`
		RequireHealthyGuest *bool `json:"requireHealthyGuest"` // a suspension always asks the agent
	}
	if err := readJSON(r, &q); err != nil {
		return err
	}
	if q.Memory != nil && !*q.Memory {
		return unsupported("memory: false (pause without memory)")
	}
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	if paused(ws) {
		return shared.Failf(http.StatusConflict, "sandbox %q is already paused", c.sandbox)
	}
	if _, err := c.SuspendWorkspace(r.Context(), ws.ID); err != nil {
		return err
	}
	if ws.OnTTL != coppice.TTLSuspend {
		if _, err := c.live(r, ws.ID, 0); err != nil {
			return err
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// newSandbox is the request of a create, in Coppice's terms.
type newSandbox struct {
	template   string
	ttl        int64
	env        map[string]string
	labels     coppice.Labels
	network    coppice.NetworkRequest
	onTTL      coppice.OnTTL
	autoResume bool
}

func isSnapshotName(s string) bool { return strings.ContainsAny(s, "/:") }
