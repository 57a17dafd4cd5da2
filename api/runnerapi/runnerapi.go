// Package runnerapi is the wire between controller and runner: JSON over HTTP. It has the request
// and response types and the paths, for both directions, and the comparison of runner classes.
// Runners register with the controller and send heartbeats to it; the controller dials runners for
// work. Both ends are built from one commit. Fields are added, never renamed.
package runnerapi

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Version is the protocol version. A runner whose version differs from the controller's is refused at registration.
//
//	1  2026-11-21  first version
const Version = 1

// Paths served by a runner. {id} is a sandbox or checkpoint id.
const (
	PathInfo              = "/v1/info"                           // GET -> Info
	PathImages            = "/v1/images"                         // GET -> Images
	PathPull              = "/v1/pulls/{id}"                     // PUT Pull -> PullState: pull an image; repeat it until it is done
	PathTemplates         = "/v1/templates"                      // POST Template -> Checkpoint: boot an image once and capture it
	PathForks             = "/v1/forks"                          // POST Fork -> ForkResult
	PathSandboxes         = "/v1/sandboxes"                      // GET -> Sandboxes
	PathSandbox           = "/v1/sandboxes/{id}"                 // GET -> Sandbox, DELETE (idempotent)
	PathSandboxCheckpoint = "/v1/sandboxes/{id}/checkpoints"     // POST Capture -> Checkpoint
	PathSandboxPorts      = "/v1/sandboxes/{id}/ports"           // POST Port -> Port
	PathSandboxPort       = "/v1/sandboxes/{id}/ports/{port_id}" // DELETE
	PathSandboxConnect    = "/v1/sandboxes/{id}/connect/{port}"  // GET, Upgrade: UpgradeTCP -> the bytes of a connection to a port of the guest; PORT_CLOSED
	PathSandboxConsole    = "/v1/sandboxes/{id}/console"         // GET -> text/plain, the console's tail
	PathSandboxEgress     = "/v1/sandboxes/{id}/egress"          // PUT EgressRules: what it may reach from now on; older rules than it has change nothing
	PathSandboxGuest      = "/v1/sandboxes/{id}/guest/*"         // reverse proxy to the guest agent's public routes (sessions, files, processes)
	PathCheckpoints       = "/v1/checkpoints"                    // GET -> Checkpoints
	PathCheckpoint        = "/v1/checkpoints/{id}"               // GET -> Checkpoint, DELETE (idempotent)
	PathPrepared          = "/v1/prepared"                       // PUT Prepare -> Prepared: for which checkpoints machines are to be prepared
	PathObject            = "/v1/objects/{key...}"               // GET, for other runners, too: ?offset= and ?bytes= of an object of the store, if the host keeps them; 404
)

// UpgradeTCP is what a request for PathSandboxConnect upgrades to. From the answer on, the connection carries what a TCP connection does.
// When one end closes it, both directions end.
const UpgradeTCP = "coppice-tcp"

// Paths served by the controller to runners.
const (
	PathRegister  = "/internal/v1/runners/register"       // POST Register -> Registered
	PathHeartbeat = "/internal/v1/runners/{id}/heartbeat" // POST Heartbeat -> Heartbeated
	PathBeats     = "/internal/v1/runners/{id}/beats"     // POST Beat -> Heartbeated
	PathFlows     = "/internal/v1/runners/{id}/flows"     // POST Flows: what sandboxes sent out
	PathRenew     = "/internal/v1/runners/{id}/renew"     // POST Renew -> Renewed: the next certificate
	PathJoin      = "/internal/v1/join"                   // POST Join -> Joined: the only one that takes no certificate
)

// The headers that say for which request and operation the controller asks. They are for the log.
const (
	HeaderRequest   = "X-Request-Id"
	HeaderOperation = "Coppice-Operation-Id"
)

// Paths of a runner's data plane, which is for users: they send a pass.
const (
	PathDataHealth = "/healthz"        // GET, open to all
	PathDataAttach = "/v1/data/attach" // GET, WebSocket, as the API's /v1/attach
	PathDataFiles  = "/v1/data/files"  // GET, HEAD, PUT, DELETE, as the API's /v1/workspaces/{id}/files
)

// RunnerClass is what a checkpoint needs of a host; a fork goes only to a runner whose class is equal.
type RunnerClass struct {
	Arch        string `json:"arch"`        // GOARCH
	Accelerator string `json:"accelerator"` // tcg or kvm
	CPUModel    string `json:"cpu_model"`   // the VMM's CPU model and the flags that the guest sees
	VMM         string `json:"vmm"`         // qemu, cloud-hypervisor or fake
	VMMVersion  string `json:"vmm_version"` // upstream version, without the distribution's patch level
	MachineType string `json:"machine_type"`
}

// Difference names the first field in which a runner's class is not c, with both values, which may be anybody's; "" if they are equal.
func (c RunnerClass) Difference(runner RunnerClass) string {
	for _, f := range []struct{ name, want, have string }{
		{"arch", c.Arch, runner.Arch},
		{"accelerator", c.Accelerator, runner.Accelerator},
		{"vmm", c.VMM, runner.VMM},
		{"vmm_version", c.VMMVersion, runner.VMMVersion},
		{"machine_type", c.MachineType, runner.MachineType},
		{"cpu_model", c.CPUModel, runner.CPUModel},
	} {
		if f.want != f.have {
			return fmt.Sprintf("its %s is %q and the runner's is %q", f.name, core.Clip(f.want), core.Clip(f.have))
		}
	}
	return ""
}

// Info is what a runner says of itself.
type Info struct {
	RunnerID   core.RunnerID `json:"runner_id"`
	Version    int           `json:"version"`
	Hostname   string        `json:"hostname"`
	Class      RunnerClass   `json:"class"`
	Capacity   Capacity      `json:"capacity"`
	Allocated  Capacity      `json:"allocated"`
	StartedAt  time.Time     `json:"started_at"`
	KVM        string        `json:"kvm"`          // what decided which VMM and accelerator are used, for people
	DiskFreeMB int64         `json:"disk_free_mb"` // that may be written, with what unused copies of checkpoints take
	// Weak names what keeps guests apart less well on the runner's host than it could, and its operator has allowed.
	Weak []string `json:"weak,omitempty"`

	// Images is the checksum (SumImages) of the list of images; empty for an older runner, or when the list could not be read.
	Images string `json:"images,omitempty"`

	EgressKey []byte `json:"egress_key,omitempty"` // that grants are sealed for: of the egress process that runs now; empty for none
	EgressURL string `json:"egress_url,omitempty"` // of that, as guests reach it: http://address:port
}

// Capacity bounds what a runner takes on.
type Capacity struct {
	Sandboxes int `json:"sandboxes"`
	VCPUs     int `json:"vcpus"`
	MemoryMiB int `json:"memory_mib"`
}

// Image is a guest image that the runner has.
type Image struct {
	Name      string      `json:"name"`
	Digest    core.Digest `json:"digest"`
	SizeBytes int64       `json:"size_bytes"`
	CreatedAt time.Time   `json:"created_at"`
	// References are the whole names under which the image was pulled, such as index.docker.io/library/python:3.12-slim. Each element of
	// the list with this digest has all of them.
	References []string `json:"references,omitempty"`
	// Unlisted means that the image was pulled for a project. Only who has its digest finds it.
	Unlisted bool `json:"unlisted,omitempty"`
}

// Images is the answer of PathImages.
type Images struct {
	Images []Image `json:"images"`
}

// Template asks for the template checkpoint of an image and shape: boot once, capture when the agent is ready and
// idle. Repeating it with the same CheckpointID returns the checkpoint that is there.
type Template struct {
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	Image        core.Digest       `json:"image"`
	Resources    core.Resources    `json:"resources"`
}

// Checkpoint is a checkpoint as the runner holds it.
type Checkpoint struct {
	ID               core.CheckpointID   `json:"id"`
	Parent           core.CheckpointID   `json:"parent,omitempty"`
	Image            core.Digest         `json:"image"`
	Class            RunnerClass         `json:"class"`
	Resources        core.Resources      `json:"resources"`
	Base             core.BaseID         `json:"base"`
	DeltaBytes       int64               `json:"delta_bytes"`        // private memory pages since the base
	DeviceStateBytes int64               `json:"device_state_bytes"` //
	DiskBytes        int64               `json:"disk_bytes"`         // allocated bytes of the overlay, shared extents counted in full
	PauseMS          float64             `json:"pause_ms"`           // how long the sandbox did not run; 0 for a template
	Timings          []core.Timing       `json:"timings"`
	ParentReseal     []core.ResealStep   `json:"parent_reseal,omitempty"` // how the captured sandbox itself was reseeded before its thaw
	Processes        []core.StaleProcess `json:"stale_prng_processes,omitempty"`
	CreatedAt        time.Time           `json:"created_at"` // the instant that it has, by the host's clock
}

// Checkpoints is the answer of PathCheckpoints.
type Checkpoints struct {
	Checkpoints []Checkpoint `json:"checkpoints"`
}

// Capture asks for a checkpoint of a running sandbox. Repeating it with the same CheckpointID returns the
// checkpoint that is there.
type Capture struct {
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	Stop         bool              `json:"stop,omitempty"` // the sandbox ends with it: it does not run after the captured instant
	Fork         bool              `json:"fork,omitempty"` // it is for children on this runner: refused where none could be started
	// Parent is the last checkpoint of the workspace by the controller's rows. The runner may have captured others since: after a failed
	// operation or a failover of its database, the controller does not know them. Empty from an older controller.
	Parent core.CheckpointID `json:"parent,omitempty"`
}

// Fork asks for sandboxes forked from one checkpoint. Children succeed or fail one by one.
type Fork struct {
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	Children     []Child           `json:"children"`
	// Sources say where the checkpoint is in the store, and behind it those of its ancestors that are sealed, nearest first and the
	// root last. A runner that does not hold the checkpoint takes it from there; without sources it is CHECKPOINT_NOT_FOUND.
	Sources []Stored `json:"sources,omitempty"`
	// Expected has the checkpoint's fields from the controller's rows. A manifest with other fields is refused: MANIFEST_INVALID. Nil from
	// a controller of before.
	Expected *Expected `json:"expected,omitempty"`
	// Peers are runners that hold the checkpoint, or what is near it, nearest first: they may give objects faster than the store does.
	Peers []Peer `json:"peers,omitempty"`
	// Verify says that the runner has not captured the checkpoint, by the controller's rows. If the
	// host captured its copy under another runner id, the runner replaces the copy by one that is
	// verified against Sources. The attestation can then name the manifest.
	Verify bool `json:"verify,omitempty"`
	// Keys are those of the objects that Sources need, as far as they are encrypted. Without them what the runner does not hold cannot be
	// fetched: KEY_UNAVAILABLE.
	Keys Keys `json:"keys,omitempty"`
}

// Expected is what a manifest must say.
type Expected struct {
	ProjectID core.ProjectID    `json:"project_id"`
	Parent    core.CheckpointID `json:"parent,omitempty"`
	Image     core.Digest       `json:"image"`
	Class     RunnerClass       `json:"class"`
	Resources core.Resources    `json:"resources"`
}

// MaxPeers is how many peers are of use.
const MaxPeers = 4

// Peer is another runner.
type Peer struct {
	RunnerID core.RunnerID `json:"runner_id" db:"id"`
	Endpoint string        `json:"endpoint" db:"endpoint"`
}

// Child is one sandbox to start. Repeating a fork with the same SandboxID returns the sandbox that is there.
type Child struct {
	SandboxID   core.SandboxID    `json:"sandbox_id"`
	WorkspaceID core.WorkspaceID  `json:"workspace_id"`
	Epoch       int64             `json:"epoch"`
	Identity    core.Identity     `json:"identity"`
	Egress      core.EgressPolicy `json:"egress_policy"`
	Rules       EgressRules       `json:"egress_rules"`       // under deny-all
	Env         map[string]string `json:"env,omitempty"`      // replaces the environment of sessions started from now on
	DiskGiB     int               `json:"disk_gib,omitempty"` // grow the overlay to this size; 0 keeps it
	CA          string            `json:"ca,omitempty"`       // PEM, that the guest trusts: the authority of its project
}

// MaxEgressRules bounds EgressRules in bytes of their JSON: a message to the egress process has room for them.
const MaxEgressRules = 156 << 10

// EgressRules are what the egress proxy lets a sandbox reach.
type EgressRules struct {
	Version int64    `json:"version"` // of the workspace's rules: they are never replaced by older ones
	Allow   []string `json:"allow,omitempty"`
	// Grants are sealed (egress/grant) for the egress process that has this key, for the sandbox and Version. Another process serves none of them.
	Grants []byte `json:"grants,omitempty"`
	Key    []byte `json:"key,omitempty"`
	// Held are the hosts, with ports, of the workspace's grants in the mode header, whether they are among Grants or not: what is said to them over
	// TLS is read, or refused.
	Held []string `json:"held,omitempty"`
}

// Lesser are rules of the same version that allow less, the most first: the same without the grants, whose hosts stay held, and none at all.
// They are for rules that cannot be delivered: removed entries must not stay in force because of others.
func (r EgressRules) Lesser() []EgressRules {
	nothing := EgressRules{Version: r.Version}
	if len(r.Grants) == 0 {
		return []EgressRules{nothing}
	}
	return []EgressRules{{Version: r.Version, Allow: r.Allow, Held: r.Held}, nothing}
}

// Flows are what sandboxes of a runner have sent out. Each comes when it has begun, and again when it has ended; either may come more than once,
// in any order.
type Flows struct {
	Flows []core.Flow `json:"flows"`
}

// ForkResult has one entry per asked child, in order.
type ForkResult struct {
	Children []ChildResult `json:"children"`
}

// ChildResult says what became of a child. Either Sandbox or Problem is set. A child with a Problem left nothing
// behind on the runner.
type ChildResult struct {
	SandboxID core.SandboxID     `json:"sandbox_id"`
	Sandbox   *Sandbox           `json:"sandbox,omitempty"`
	Reseal    *core.ResealReport `json:"reseal,omitempty"` // also there when a reseal step failed
	Timings   []core.Timing      `json:"timings,omitempty"`
	Problem   *Problem           `json:"problem,omitempty"`
	// Attestation is the runner's signed report of the reseal (internal/attest). A controller refuses a child without it.
	Attestation []byte `json:"attestation,omitempty"`
}

// SandboxState is what a runner knows of a sandbox.
type SandboxState string

// The states of a sandbox on its runner.
const (
	SandboxStarting    SandboxState = "starting"
	SandboxQuarantined SandboxState = "quarantined"
	SandboxReady       SandboxState = "ready"
	SandboxPaused      SandboxState = "paused"
	SandboxDead        SandboxState = "dead" // its VMM ended by itself; everything of it has been taken down
)

// Sandbox is one running VM.
type Sandbox struct {
	ID          core.SandboxID    `json:"id"`
	WorkspaceID core.WorkspaceID  `json:"workspace_id"`
	Epoch       int64             `json:"epoch"`
	State       SandboxState      `json:"state"`
	Checkpoint  core.CheckpointID `json:"checkpoint"` // forked from, restored to or last captured as
	Identity    core.Identity     `json:"identity"`
	Resources   core.Resources    `json:"resources"`
	StartedAt   time.Time         `json:"started_at"`
	Exit        string            `json:"exit,omitempty"` // for a dead one: how its VMM ended, with the console's tail
	Stalled     *Stall            `json:"stalled,omitempty"`
}

// Stall says why a sandbox stands still until the store gives what it waits for.
type Stall struct {
	Since   time.Time `json:"since"` // when it began to wait
	Problem Problem   `json:"problem"`
}

// Sandboxes is the answer of PathSandboxes.
type Sandboxes struct {
	Sandboxes []Sandbox `json:"sandboxes"`
}

// Port forwards connections from an address of the host to a port of the guest.
type Port struct {
	ID        core.PortID    `json:"id"`
	GuestPort int            `json:"guest_port"`
	Listen    netip.AddrPort `json:"listen"`              // port 0 picks a free one; the answer has the real one
	HostPort  uint16         `json:"host_port,omitempty"` // where Listen is empty: a port, or 0, of an address that the runner chooses
	Closed    bool           `json:"closed,omitempty"`    // answer of opening: nobody in the guest listens on GuestPort yet
}

// PortAt asks for a port that listens at an address. Without an IP address, the runner chooses it.
func PortAt(id core.PortID, guestPort int, listen netip.AddrPort) Port {
	p := Port{ID: id, GuestPort: guestPort, Listen: listen}
	if !listen.Addr().IsValid() {
		p.Listen, p.HostPort = netip.AddrPort{}, listen.Port()
	}
	return p
}

// Problem is an error on the wire.
type Problem struct {
	Category core.Category `json:"category"`
	Code     core.Code     `json:"code"`
	Message  string        `json:"message"`
}

// Err turns a problem back into an error.
func (p *Problem) Err() error {
	if p == nil {
		return nil
	}
	return core.Errorf(p.Category, p.Code, "%s", p.Message)
}

// ProblemOf is the wire form of err, with the text that a caller may see.
func ProblemOf(err error) *Problem {
	if err == nil {
		return nil
	}
	return &Problem{Category: core.CategoryOf(err), Code: core.CodeOf(err), Message: core.MessageOf(err)}
}

// Register announces a runner and where the controller reaches it.
type Register struct {
	Info     Info   `json:"info"`
	Endpoint string `json:"endpoint"`           // https://host:port, or http://host:port or unix:/path with a shared secret
	DataURL  string `json:"data_url,omitempty"` // https://host:port of the data plane, if users can reach one
	// OwnDataCert says that the data plane shows the runner's own certificate, so that users need the cluster's authority.
	OwnDataCert bool `json:"own_data_cert,omitempty"`
	// AttestationRequest is a PKCS#10 request for the key that signs the runner's reports; only its key counts.
	AttestationRequest []byte `json:"attestation_request,omitempty"`
	// LeaseEpoch is the last epoch that the runner was given. The next one is greater, whatever the database has lost.
	LeaseEpoch int64 `json:"lease_epoch,omitempty"`
}

// Registered tells a runner its lease.
type Registered struct {
	ClusterID  string  `json:"cluster_id"`
	LeaseEpoch int64   `json:"lease_epoch"`
	TTLSeconds float64 `json:"ttl_seconds"` // heartbeat at a third of this
	// FenceSeconds is how long the runner's sandboxes live without an answered message; see Heartbeated.
	FenceSeconds float64 `json:"fence_seconds"`
	// PassKeys are the Ed25519 keys whose passes the data plane takes.
	PassKeys [][]byte `json:"pass_keys,omitempty"`
	// AttestationCertificate answers an AttestationRequest.
	AttestationCertificate []byte `json:"attestation_certificate,omitempty"`
}

// Join asks for a runner's first certificate.
type Join struct {
	Token              string `json:"token"`
	CertificateRequest []byte `json:"certificate_request"` // PKCS#10; only its key counts
}

// Joined says who the runner is. Certificates are X.509 in DER.
type Joined struct {
	RunnerID    core.RunnerID `json:"runner_id"`
	ClusterID   string        `json:"cluster_id"`
	Certificate []byte        `json:"certificate"`
	Authority   []byte        `json:"authority"`
}

// Renew asks for the next certificate of the runner that shows the present one.
type Renew struct {
	CertificateRequest []byte `json:"certificate_request"`
}

// Renewed has it.
type Renewed struct {
	Certificate []byte `json:"certificate"`
}

// Heartbeat reports what runs. A sandbox in state dead is reported until a heartbeat with it was answered.
//
// A runner numbers its heartbeats, from 1 in each lease epoch, and no two attempts have the same number. A controller applies a
// heartbeat only if its number is greater than that of every applied one: a repeated or late heartbeat is HEARTBEAT_STALE and
// changes nothing. docs/adr/0044-heartbeats.md
type Heartbeat struct {
	LeaseEpoch int64 `json:"lease_epoch"`
	// Number is 0 in the heartbeats of a runner of an older version.
	Number int64 `json:"number,omitempty"`
	// Answered is the number of the last heartbeat whose answer the runner had when it collected this one; 0 stands for the
	// registration.
	Answered    int64               `json:"answered,omitempty"`
	Info        Info                `json:"info"`
	Sandboxes   []Sandbox           `json:"sandboxes"`
	Checkpoints []core.CheckpointID `json:"checkpoints"`
	Fetching    []core.CheckpointID `json:"fetching,omitempty"`    // whose objects in the store it reads, or may yet read
	DataKeys    []core.KeyID        `json:"data_keys,omitempty"`   // API keys with whose passes the data plane was used lately
	DataUsed    []core.WorkspaceID  `json:"data_used,omitempty"`   // workspaces that it has served since the last heartbeat, or serves
	DataWrites  []DataWrite         `json:"data_writes,omitempty"` // at most MaxDataWrites
	DataLog     string              `json:"data_log,omitempty"`    // in which the writes are numbered
	Usage       []Usage             `json:"usage,omitempty"`
	// AttestationRequest asks for the next certificate, as in Register.
	AttestationRequest []byte `json:"attestation_request,omitempty"`
}

// Beat is a heartbeat with differences to the last one that was answered: Sandboxes are those that differ from what was sent then,
// and all dead ones; Checkpoints are those that have come since, and those that were unsettled.
type Beat struct {
	Heartbeat
	// AllSandboxes says that Sandboxes are all, AllCheckpoints that Checkpoints are: a controller has asked for that list.
	AllSandboxes    bool                `json:"all_sandboxes,omitempty"`
	AllCheckpoints  bool                `json:"all_checkpoints,omitempty"`
	GoneCheckpoints []core.CheckpointID `json:"gone_checkpoints,omitempty"`
	// SandboxSum is the checksum (package beats) of all living sandboxes, CheckpointSum that of the checkpoints that are not in Checkpoints.
	SandboxSum    int64 `json:"sandbox_sum"`
	CheckpointSum int64 `json:"checkpoint_sum"`
}

// Usage is what a sandbox has used since its start. One that ended is reported until a heartbeat with it was answered.
type Usage struct {
	SandboxID     core.SandboxID `json:"sandbox_id"`
	CPUSeconds    float64        `json:"cpu_seconds"`
	SentBytes     int64          `json:"sent_bytes"` // by the guest
	ReceivedBytes int64          `json:"received_bytes"`
	Ended         bool           `json:"ended,omitempty"`
}

// Heartbeated extends the lease and names what the runner holds although the controller has no live row for it.
//
// A heartbeat of a lease that was given up is answered with RUNNER_LOST: the runner ends all its sandboxes before it registers again.
// STATE_CONFLICT and RUNNER_NOT_FOUND say that the database does not have this lease: the runner registers again and its sandboxes go on.
type Heartbeated struct {
	// Number is that of the heartbeat; 0 in the answer of a controller of an older version.
	Number          int64               `json:"number,omitempty"`
	TTLSeconds      float64             `json:"ttl_seconds"`
	FenceSeconds    float64             `json:"fence_seconds"` // from the beginning of the last answered message on; the controller waits longer
	DropSandboxes   []core.SandboxID    `json:"drop_sandboxes,omitempty"`
	DropCheckpoints []core.CheckpointID `json:"drop_checkpoints,omitempty"` // they were deleted
	// StrayCheckpoints are those that the database does not have. They go to the runner's trash, for a time.
	StrayCheckpoints []core.CheckpointID `json:"stray_checkpoints,omitempty"`
	// Unsettled are checkpoints that are still being captured: the next heartbeat names them again.
	Unsettled []core.CheckpointID `json:"unsettled,omitempty"`
	// AllSandboxes and AllCheckpoints ask for that whole list at once, since its checksum differs; both, since the differences could not
	// be applied.
	AllSandboxes   bool         `json:"all_sandboxes,omitempty"`
	AllCheckpoints bool         `json:"all_checkpoints,omitempty"`
	EndedKeys      []core.KeyID `json:"ended_keys,omitempty"` // of DataKeys: what was begun with them must end
	// DataTaken is how many of DataWrites were taken, from the first on. The runner tells the others again. It is 0 from a controller of before,
	// which takes MaxDataWrites.
	DataTaken int `json:"data_taken,omitempty"`
	// AttestationCertificate answers an AttestationRequest.
	AttestationCertificate []byte `json:"attestation_certificate,omitempty"`
	// RemovedRunners are all whose certificates may not have expired yet. Another runner gives them nothing; without an answer for TTLSeconds,
	// it gives nothing to any runner.
	RemovedRunners []core.RunnerID `json:"removed_runners,omitempty"`
	// Draining says that no forks come any more until a later answer lacks it, so nothing should be prepared for them.
	Draining bool `json:"draining,omitempty"`
}
