package runnerapi

import "github.com/coppice-dev/coppice/core"

// PathCheckpointDiff is POST Diff -> DiffPage: what differs from the checkpoint in the path to another of the same runner and image.
const PathCheckpointDiff = "/v1/checkpoints/{id}/diff"

// Diff asks for a page of differences.
type Diff struct {
	To    core.CheckpointID `json:"to"`
	After []byte            `json:"after,omitempty"` // DiffPage.Next of the page before; empty for the first
	Limit int               `json:"limit"`           // files; 1 to MaxDiffFiles
}

// MaxDiffFiles bounds a page.
const MaxDiffFiles = 10_000

// DiffPage is a part of the differences. Processes and memory are on the first page only.
type DiffPage struct {
	Files []FileChange `json:"files"`
	Next  []byte       `json:"next,omitempty"` // empty when this is the last page

	// Complete says that both guests had written everything to their disks. Otherwise what they wrote in the last half minute
	// before their capture may be missing.
	Complete bool `json:"complete"`
	// IdentityComplete says that both guests have reported what is in the files with their identity, such as /etc/hosts.
	IdentityComplete bool `json:"identity_complete,omitempty"`
	// Unreadable counts files that a guest has damaged on its disk: they are left out, or count as changed.
	Unreadable int `json:"unreadable"`

	Processes   *ProcessDiff `json:"processes,omitempty"`
	MemoryBytes *int64       `json:"memory_bytes,omitempty"` // in pages that differ
}

// FileChange is a file that was added, changed or removed.
type FileChange struct {
	Path       []byte   `json:"path"` // absolute; any bytes but NUL, as the guest chose them
	Change     string   `json:"change"`
	Type       string   `json:"type"`
	What       []string `json:"what,omitempty"`
	Size       int64    `json:"size"`
	SizeBefore int64    `json:"size_before"`
	InMemory   bool     `json:"in_memory,omitempty"` // its content is in the memory of the machines, and not on their disks
}

// ProcessDiff says which processes of the workload only one of the checkpoints has.
type ProcessDiff struct {
	Complete bool                   `json:"complete"` // both guests said all that they had
	Started  []core.WorkloadProcess `json:"started"`
	Gone     []core.WorkloadProcess `json:"gone"`
}
