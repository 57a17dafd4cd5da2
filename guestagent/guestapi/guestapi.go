package guestapi

import (
	"net/netip"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Version is the protocol version that this package speaks; doc.go has its history.
const Version = 1

// The agent listens on its virtio-serial port with this name. Where there is no such port, it listens on a port of
// AF_VSOCK.
const (
	PortName  = "coppice.agent"
	VsockPort = 1024
)

// Control routes are only for the runner. No proxy may reach them.
const (
	PathHealth  = "/v1/health"  // GET -> Health
	PathQuiesce = "/v1/quiesce" // POST QuiesceRequest -> QuiesceResponse
	PathReseed  = "/v1/reseed"  // POST ReseedRequest -> ReseedResponse
	PathReseal  = "/v1/reseal"  // POST ResealRequest -> core.ResealReport, also when a step failed (Complete is false then)
	PathRelease = "/v1/release" // POST ReleaseRequest -> ReleaseResponse
	PathFlush   = "/v1/flush"   // POST FlushRequest -> FlushResponse; agents of early images have no such route
)

// Public routes: what a user of the sandbox may do. {id} is a session id.
const (
	PathSessions        = "/v1/sessions"               // POST SessionSpec -> Session, GET -> Sessions
	PathSession         = "/v1/sessions/{id}"          // GET -> Session; DELETE kills it and forgets it
	PathSessionWait     = "/v1/sessions/{id}/wait"     // GET ?timeout_ms= -> Session, ended or not
	PathSessionOutput   = "/v1/sessions/{id}/output"   // GET ?stream=stdout|stderr&offset=|from=now&follow=1 -> raw bytes, see the headers below
	PathSessionStdin    = "/v1/sessions/{id}/stdin"    // POST raw bytes, ?close=1 closes it afterwards
	PathSessionSignal   = "/v1/sessions/{id}/signal"   // POST Signal
	PathSessionResize   = "/v1/sessions/{id}/resize"   // POST Resize
	PathSessionDeadline = "/v1/sessions/{id}/deadline" // POST Deadline
	PathSessionAttach   = "/v1/sessions/{id}/attach"   // GET, WebSocket: see AttachMessage. ?stdout_offset=&stderr_offset=&from=now
	PathFiles           = "/v1/files"                  // PUT, GET, HEAD, DELETE ?path=: see files below
	PathFileContent     = "/v1/files/content"          // the same, for requests with parameters that early agents would ignore
	PathMakeDir         = "/v1/files/mkdir"            // POST MakeDir -> MadeDir
	PathRename          = "/v1/files/rename"           // POST Rename -> FileInfo
	PathXAttrs          = "/v1/files/xattrs"           // POST SetXAttrs -> FileInfo
	PathWatches         = "/v1/watches"                // POST CreateWatch -> Watch, GET -> Watches
	PathWatch           = "/v1/watches/{id}"           // DELETE
	PathWatchEvents     = "/v1/watches/{id}/events"    // GET ?after=&follow=1 -> WatchEvent as JSON, one a line
	PathProcesses       = "/v1/processes"              // GET -> Processes
	PathPorts           = "/v1/ports"                  // GET -> Ports
	PathMark            = "/v1/mark"                   // GET -> Mark
	PathPortConnect     = "/v1/ports/{port}/connect"   // GET, Upgrade: UpgradeTCP -> the bytes of a connection to a listener on loopback; PORT_CLOSED
)

// Headers and trailers. PathFiles:
//
//	PUT    ?path=&mode=0644&uid=&gid=&mkdirs=1  raw body; written beside the target, then renamed  -> FileInfo
//	PUT    ?path=&untar=1                       the body is a tar, unpacked into the directory path -> FileInfo
//	GET    ?path=&max_bytes=                    raw bytes of a file; X-headers below
//	GET    ?path=&list=1                        a directory -> FileList
//	GET    ?path=&tar=1&max_bytes=              a file or directory as a tar
//	HEAD   ?path=                               the X-headers alone
//	GET    ?path=&stat=1                        -> FileInfo
//	DELETE ?path=&recursive=1                   -> 204
//
// With FeatureFileWork (see features.go), all of them take user=, who does the work with that user's rights. A path that
// begins with ~/ then begins in the home of the user. Further:
//
//	PUT    ?path=&in_place=1&offset=|append=1   raw body; written into the file itself, which is emptied before unless offset or append is given
//	GET    ?path=&list=1&depth=&xattrs=1        entries of subdirectories too, depth levels in all
//	GET    ?path=&stat=1&follow=1&xattrs=1      follow: of what a symlink leads to
const (
	HeaderOffset    = "Coppice-Offset"     // output: number of the first byte of the body
	HeaderEndOffset = "Coppice-End-Offset" // output, trailer: number of the byte after the last one sent
	HeaderTruncated = "Coppice-Truncated"  // output, trailer: "true" when bytes were dropped before or within the body
	HeaderEOF       = "Coppice-Eof"        // output, trailer: "true" when the stream has ended and all of it was sent
	HeaderFileInfo  = "Coppice-File"       // files: FileInfo as JSON
	HeaderStatus    = "Coppice-Status"     // files as tar, trailer: "ok" or what went wrong in the middle of the stream
	HeaderLeftOut   = "Coppice-Left-Out"   // files as tar, trailer: LeftOut as JSON, if anything was left out
)

// LeftOut is what a tar does not contain: the content of pseudo file systems such as /proc, and devices, sockets and pipes.
type LeftOut struct {
	Pseudo  []string `json:"pseudo,omitempty"`  // where pseudo file systems are mounted
	More    int      `json:"more,omitempty"`    // how many more of them there are
	Special int      `json:"special,omitempty"` // devices, sockets and pipes
}

// UpgradeTCP is the protocol to which a request for PathPortConnect upgrades: after that, the stream has the bytes of a TCP connection.
const UpgradeTCP = "coppice-tcp"

// State says what the agent allows.
type State string

// The states of the agent.
const (
	StateReleased    State = "released"    // the workload runs
	StateFrozen      State = "frozen"      // quiesced for a capture; reseed and release, or reseal
	StateQuarantined State = "quarantined" // a reseal has begun, ended or failed; not released yet
)

// Codes of errors that only the agent returns.
const (
	CodeAlreadySealed   core.Code = "ALREADY_SEALED"      // this generation was used before
	CodeQuarantined     core.Code = "GUEST_QUARANTINED"   // refused until released
	CodeWrongState      core.Code = "GUEST_STATE"         // the call does not fit the agent's state
	CodeWrongGeneration core.Code = "GENERATION_MISMATCH" // release or reseed named a generation that the agent does not have
	CodeCommandNotFound core.Code = "COMMAND_NOT_FOUND"   // there is no program with that name
	CodeCommandFailed   core.Code = "COMMAND_NOT_STARTED" // the program exists and the kernel did not run it
	CodeSessionExists   core.Code = "SESSION_EXISTS"      // the requested id is taken
	CodeSessionEnded    core.Code = "SESSION_ENDED"       // its process has ended or its stdin is closed
	CodeSessionLimit    core.Code = "SESSION_LIMIT"       // too many sessions run
	CodeWatchLimit      core.Code = "WATCH_LIMIT"         // too many watches, or directories in one
	CodeFileConflict    core.Code = "FILE_CONFLICT"       // a directory in place of a file, not empty, or exists already
	CodeFileDenied      core.Code = "FILE_DENIED"         // read-only or not permitted
)

// Health describes the agent. BootNonce is new at every start of the agent; if it has changed, the earlier sessions are
// gone.
type Health struct {
	Version    int     `json:"version"`
	BootNonce  string  `json:"boot_nonce"`
	Generation string  `json:"generation"` // of the last release or reseal; "boot-…" at first
	CaptureID  string  `json:"capture_id,omitempty"`
	State      State   `json:"state"`
	UptimeS    float64 `json:"uptime_s"` // of the kernel, without the time in a checkpoint
	PID        int     `json:"pid"`
	Sessions   int     `json:"sessions"` // running ones
	Kernel     string  `json:"kernel"`
	RSSBytes   int64   `json:"rss_bytes"` // of the agent

	Features []string `json:"features,omitempty"` // what it can beyond the first agents, see features.go
}

// QuiesceRequest freezes the workload for a capture. A repetition with the same CaptureID gets the same answer.
// TimeoutMS 0 means 2000; the maximum is 30000.
type QuiesceRequest struct {
	CaptureID string `json:"capture_id"`
	TimeoutMS int    `json:"timeout_ms"`
	FlushMS   int    `json:"flush_ms,omitempty"` // flush the disk after the freeze, for at most this time; 0: no flush
}

// FlushRequest asks the guest to flush its writes to the disk, within a time.
type FlushRequest struct {
	TimeoutMS int `json:"timeout_ms"`
}

// FlushResponse says whether everything that was written before the request is on the disk.
type FlushResponse struct {
	Flushed bool    `json:"flushed"`
	FlushMS float64 `json:"flush_ms"`
}

// QuiesceResponse says what was frozen. The processes were found before the freeze was complete, so that the pause need
// not wait for that. The reseal of a clone reports the same list.
type QuiesceResponse struct {
	CaptureID      string              `json:"capture_id"`
	Generation     string              `json:"generation"`
	Processes      int                 `json:"processes"` // frozen ones
	StaleProcesses []core.StaleProcess `json:"stale_prng_processes"`
	FreezeMS       float64             `json:"freeze_ms"`
	ScanMS         float64             `json:"scan_ms"`

	Flushed           bool                   `json:"flushed,omitempty"` // everything written before the freeze is on the disk
	FlushMS           float64                `json:"flush_ms,omitempty"`
	Workload          []core.WorkloadProcess `json:"workload,omitempty"`
	WorkloadTruncated bool                   `json:"workload_truncated,omitempty"`

	// IdentityFiles are the files with the machine's identity, which are in its memory. Absent: the agent is older than this field.
	IdentityFiles []IdentityFile `json:"identity_files,omitzero"`
}

// IdentityFile says what one of them holds, in a form in which machines with different identities can be compared.
type IdentityFile struct {
	Path   string `json:"path"`
	Size   int64  `json:"size"`
	Own    bool   `json:"own,omitempty"`    // it is as the last reseal wrote it, or as the image has it
	SHA256 string `json:"sha256,omitempty"` // otherwise, of its content without the machine's name; absent: it is too large
}

// IdentityPaths are the paths that an agent reports.
func IdentityPaths() []string {
	return []string{"/etc/hostname", "/etc/hosts", "/etc/machine-id", "/etc/resolv.conf"}
}

// EntropySize is the number of fresh random bytes that the host sends with a reseed or reseal.
const EntropySize = 64

// ReseedRequest gives the captured machine itself new randomness before its thaw. Generation is its present one.
type ReseedRequest struct {
	Entropy    []byte `json:"entropy"`
	Generation string `json:"generation"`
}

// ReseedResponse has the one step (StepEntropy).
type ReseedResponse struct {
	Steps []core.ResealStep `json:"steps"`
}

// Network describes the attachment of a sandbox: one address, and one gateway on the link.
type Network struct {
	Prefix     int          `json:"prefix"`                // of the address, 32 unless the link is shared
	Gateway    netip.Addr   `json:"gateway"`               // zero: no default route
	GatewayMAC string       `json:"gateway_mac,omitempty"` // permanent neighbour entry, so that no ARP is needed
	DNS        []netip.Addr `json:"dns,omitempty"`         // empty: keep /etc/resolv.conf
	MTU        int          `json:"mtu,omitempty"`         // 0: keep it
}

// ResealRequest gives a clone a new identity. Identity.Generation must never have been used with this guest before.
type ResealRequest struct {
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	Identity     core.Identity     `json:"identity"`
	HostTimeNS   int64             `json:"host_time_ns"` // CLOCK_REALTIME of the host, taken as late as possible
	Entropy      []byte            `json:"entropy"`      // EntropySize bytes
	Network      Network           `json:"network"`
	Token        string            `json:"token,omitempty"` // the sandbox's own; written to /run/coppice/token for root
	Env          map[string]string `json:"env,omitzero"`    // environment of later sessions; nil: keep it
	GrowDisk     bool              `json:"grow_disk,omitempty"`
	DiskBytes    int64             `json:"disk_bytes,omitempty"` // with GrowDisk: the device's new size, which the guest sees a little later than the host
	CA           string            `json:"ca,omitempty"`         // PEM, appended to the trust bundles of the image
	// Provisional asks for a rehearsal with an identity that nobody will see. Every step runs, but not the hooks, and nothing is written to the
	// journal. The guest stays frozen for the same capture: it can be resealed again, and cannot be released before that. The next
	// reseal replaces what this one has set, except what it may leave as it is: so env, resolvers and the growth of the disk are refused,
	// and the caller must give the same CA again. It needs FeatureProvisional: an older agent would do a reseal that counts.
	Provisional bool `json:"provisional,omitempty"`
}

// ReleaseRequest thaws the workload. Generation is that of the reseal, or the present one after a reseed.
type ReleaseRequest struct {
	Generation string `json:"generation"`
}

// ReleaseResponse says that the workload runs.
type ReleaseResponse struct {
	State      State   `json:"state"`
	Generation string  `json:"generation"`
	ThawMS     float64 `json:"thaw_ms"`
}

// The names of the reseal steps, in the order in which they run.
const (
	StepEntropy    = "entropy"     // kernel random generator: 16 truncated hashes of draws after the reseed
	StepClock      = "clock"       // CLOCK_REALTIME
	StepBootID     = "boot_id"     //
	StepMachineID  = "machine_id"  //
	StepHostname   = "hostname"    //
	StepNetwork    = "network"     // MAC, address, route, neighbours, resolver
	StepSockets    = "sockets"     // connections to the outside are destroyed; those inside the guest go on
	StepTCPMetrics = "tcp_metrics" //
	StepConntrack  = "conntrack"   //
	StepTFOKey     = "tfo_key"     //
	StepWireGuard  = "wireguard"   //
	StepSSHKeys    = "ssh_host_keys"
	StepDHCP       = "dhcp"        // leases and DUIDs removed
	StepRandomSeed = "random_seed" // files removed
	StepCA         = "ca"          //
	StepDisk       = "grow_disk"   //
	StepTimers     = "timers"      // running cron and the like are reported
	StepJournal    = "journal"     //
	StepState      = "agent_state" // token, environment
	StepGeneration = "generation"  // /run/coppice/generation
	StepHooks      = "hooks"       // /etc/coppice/reseal.d
	StepPractice   = "practice"    // only of a provisional reseal: a program that does nothing was started as a session is
)

// The evidence keys that the host checks. Others are for people.
const (
	EvidenceValue     = "value"        // boot_id, machine_id, hostname, generation: read back after the change
	EvidenceTimeNS    = "time_ns"      // clock: CLOCK_REALTIME after it was set
	EvidenceMAC       = "mac"          // network: read back from the kernel
	EvidenceAddresses = "addresses"    // network: all addresses of the link, comma-separated
	EvidenceGateway   = "gateway"      // network: of the default route
	EvidenceRoutes    = "routes"       // network: how many default routes there are
	EvidenceDestroyed = "destroyed"    // sockets
	EvidenceRemaining = "remaining"    // sockets: connections found after the destruction
	EvidenceTokenHash = "token_sha256" // agent_state: the first 16 hex digits, or "none"
	EvidenceKeyHash   = "key_sha256"   // tfo_key, truncated in the same way
	EvidenceDrawKey   = "draw_%02d"    // entropy: truncated SHA-256 of 32-byte draws after the reseed, 32 hex digits
	EvidenceDevice    = "device_bytes" // grow_disk: of the device
	EvidenceReason    = "reason"       // of a skipped step
)

// EvidenceDraws is how many draws StepEntropy reports, under the keys EvidenceDrawKey.
const EvidenceDraws = 16

// SessionSpec describes a process to start. Command[0] is looked up in PATH unless it has a slash. The environment is
// that of the image, then that of the sandbox, then Env; later values replace earlier ones.
type SessionSpec struct {
	ID        core.SessionID    `json:"id,omitempty"` // empty: the agent makes one; an id in use is refused
	Command   []string          `json:"command"`
	Cwd       string            `json:"cwd,omitempty"` // default: the image's WORKDIR, else /workspace if it exists, else the user's home
	Env       map[string]string `json:"env,omitempty"`
	Stdin     []byte            `json:"stdin,omitempty"`      // given to the process at its start
	StdinOpen bool              `json:"stdin_open,omitempty"` // keep stdin open for PathSessionStdin and attach
	TimeoutMS int64             `json:"timeout_ms,omitempty"` // 0: none. At the timeout, the session's processes are killed
	PTY       bool              `json:"pty,omitempty"`        // stdout and stderr are one stream, stdout
	Cols      uint16            `json:"cols,omitempty"`
	Rows      uint16            `json:"rows,omitempty"`
	User      string            `json:"user,omitempty"` // name or uid, optionally :group; default: the image's, else root
}

// The states of a session.
const (
	SessionRunning = "running"
	SessionExited  = "exited"
)

// Session is a process that was started through the API. Its output buffers and its exit status are kept until it is
// deleted or many later sessions have ended.
type Session struct {
	ID          core.SessionID `json:"id"`
	Command     []string       `json:"command"`
	Cwd         string         `json:"cwd"`
	User        string         `json:"user,omitempty"`
	PTY         bool           `json:"pty"`
	State       string         `json:"state"`
	PID         int            `json:"pid"`                 // in the workload's pid namespace
	ExitCode    *int           `json:"exit_code,omitempty"` // 128 + signal when a signal ended it
	Signal      string         `json:"signal,omitempty"`    // "SIGKILL"
	TimedOut    bool           `json:"timed_out"`
	StartedAt   time.Time      `json:"started_at"`
	EndedAt     *time.Time     `json:"ended_at,omitempty"`
	StdinOpen   bool           `json:"stdin_open"`
	StdoutBytes int64          `json:"stdout_bytes"` // written so far
	StderrBytes int64          `json:"stderr_bytes"`
	StdoutFirst int64          `json:"stdout_first"` // number of the oldest byte that is still kept
	StderrFirst int64          `json:"stderr_first"`
}

// Sessions is the answer of PathSessions, oldest first.
type Sessions struct {
	Sessions []Session `json:"sessions"`
}

// Signal sends a signal to processes of a session: "SIGTERM", "TERM" or "15". With a target, the host asks for
// FeatureSignalTarget.
type Signal struct {
	Signal string `json:"signal"`
	Target string `json:"target,omitempty"` // see the constants; default foreground
}

// The targets of a signal.
const (
	TargetForeground = "foreground" // of the terminal; without one the process group
	TargetProcess    = "process"    // the program that was started
	TargetGroup      = "group"      // its process group
	TargetSession    = "session"    // all that have not made a session of their own
)

// Deadline kills the session after a time from now, instead of a timeout that was set before. 0: never.
type Deadline struct {
	TimeoutMS int64 `json:"timeout_ms"`
}

// Resize sets the size of a session's terminal.
type Resize struct {
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// AttachMessage is a text frame of an attached WebSocket. Binary frames to the agent are stdin; binary frames from it
// are one byte of stream (AttachStdout, AttachStderr), eight bytes of offset, big endian, then output.
type AttachMessage struct {
	Type    string   `json:"type"`              // see the constants
	Cols    uint16   `json:"cols,omitempty"`    // resize
	Rows    uint16   `json:"rows,omitempty"`    // resize
	Signal  string   `json:"signal,omitempty"`  // signal
	Session *Session `json:"session,omitempty"` // exit
	Stream  string   `json:"stream,omitempty"`  // truncated: stdout or stderr
	From    int64    `json:"from,omitempty"`    // truncated: first dropped byte
	To      int64    `json:"to,omitempty"`      // truncated: byte after the last dropped one
	Problem *Problem `json:"problem,omitempty"` // error: the answer to a frame that could not be executed
}

// The types of AttachMessage. resize, signal and close_stdin go to the agent, the others come from it.
const (
	AttachResize     = "resize"
	AttachSignal     = "signal"
	AttachCloseStdin = "close_stdin"
	AttachExit       = "exit" // the last message: all output was sent
	AttachTruncated  = "truncated"
	AttachError      = "error"
)

// The first byte of a binary frame from the agent, and the length of the head before the output.
const (
	AttachStdout  byte = 1
	AttachStderr  byte = 2
	AttachHeadLen      = 9
)

// FileInfo describes a path. On some file systems, times have a precision of seconds.
type FileInfo struct {
	Path   string    `json:"path"`
	Name   string    `json:"name"`
	Type   string    `json:"type"` // file, dir, symlink, other
	Size   int64     `json:"size"`
	Mode   string    `json:"mode"` // four octal digits
	UID    int       `json:"uid"`
	GID    int       `json:"gid"`
	MTime  time.Time `json:"mtime"`
	Target string    `json:"target,omitempty"` // of a symlink

	Owner           string            `json:"owner,omitempty"` // name of the user, if the sandbox has one
	Group           string            `json:"group,omitempty"` // likewise
	XAttrs          map[string]string `json:"xattrs,omitempty"`
	XAttrsTruncated bool              `json:"xattrs_truncated,omitempty"` // some are not text, or too long
}

// MakeDir makes a directory; with Parents also those above it, and it is no error if it exists.
type MakeDir struct {
	Path    string `json:"path"`
	User    string `json:"user,omitempty"`
	Mode    string `json:"mode,omitempty"` // octal; default 0755
	Parents bool   `json:"parents,omitempty"`
}

// MadeDir is the answer to MakeDir.
type MadeDir struct {
	FileInfo

	Created bool `json:"created"`
}

// Rename moves a file or directory within a file system.
type Rename struct {
	From      string `json:"from"`
	To        string `json:"to"`
	User      string `json:"user,omitempty"`
	Mkdirs    bool   `json:"mkdirs,omitempty"`     // make missing directories above To
	NoReplace bool   `json:"no_replace,omitempty"` // refuse if To exists
}

// SetXAttrs sets and removes extended attributes whose names begin with "user.".
type SetXAttrs struct {
	Path   string            `json:"path"`
	User   string            `json:"user,omitempty"`
	Set    map[string]string `json:"set,omitempty"`
	Remove []string          `json:"remove,omitempty"`
}

// FileList is a directory's content by name. Truncated means that it has more entries than the agent lists at once
// (10,000).
type FileList struct {
	Path      string     `json:"path"`
	Entries   []FileInfo `json:"entries"`
	Truncated bool       `json:"truncated"`

	Unreadable int `json:"unreadable,omitempty"` // subdirectories whose entries could not be read
}

// Process is one process of the workload, as seen from inside the workload.
type Process struct {
	PID      int    `json:"pid"`
	PPID     int    `json:"ppid"`
	Comm     string `json:"comm"`
	Cmdline  string `json:"cmdline"`
	State    string `json:"state"` // R, S, D, T, Z
	RSSBytes int64  `json:"rss_bytes"`
}

// Processes is the answer of PathProcesses.
type Processes struct {
	Processes []Process `json:"processes"`
}

// Mark is the answer of PathMark. Two marks of a guest are equal only if nothing that a mark covers has changed between them; see package mark. It is
// empty if the agent cannot tell, for example because a program runs.
type Mark struct {
	Mark string `json:"mark"`
}

// Port is a listening TCP port.
type Port struct {
	Address netip.Addr `json:"address"`
	Port    int        `json:"port"`
	Process string     `json:"process,omitempty"`
	PID     int        `json:"pid,omitempty"`
}

// Ports is the answer of PathPorts.
type Ports struct {
	Ports []Port `json:"ports"`
}

// Problem is an error on the wire, with an HTTP status of 400 or more.
type Problem struct {
	Category core.Category `json:"category"`
	Code     core.Code     `json:"code"`
	Message  string        `json:"message"`
}

// Err turns a problem back into an error. The message is foreign text: callers must clip it before they show it.
func (p *Problem) Err() error {
	if p == nil {
		return nil
	}
	return core.Errorf(p.Category, p.Code, "%s", p.Message)
}

// ProblemOf returns the wire form of err.
func ProblemOf(err error) *Problem {
	if err == nil {
		return nil
	}
	return &Problem{Category: core.CategoryOf(err), Code: core.CodeOf(err), Message: core.MessageOf(err)}
}
