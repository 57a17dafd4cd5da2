package runnerapi

import "time"

// PathCheckpointFiles is POST ReadFile -> FilePart: a file or directory of a checkpoint, read from its disk without a machine.
const PathCheckpointFiles = "/v1/checkpoints/{id}/files"

// ReadFile asks what a path of a checkpoint is, and for its entries or for a part of its bytes.
type ReadFile struct {
	Path    []byte `json:"path"`              // absolute
	Follow  bool   `json:"follow,omitempty"`  // a symbolic link at its end too
	Entries int    `json:"entries,omitempty"` // of a directory, at most so many; 0: none
	Offset  int64  `json:"offset,omitempty"`
	Length  int    `json:"length,omitempty"` // bytes of a file, at most so many; 0: none
}

// The bounds of one part.
const (
	MaxFileEntries = 10_000
	MaxFileData    = 4 << 20
	MaxFilePath    = 4096
)

// FilePart is what a path is, with some of its content.
type FilePart struct {
	File       File   `json:"file"`
	Entries    []File `json:"entries"`
	Truncated  bool   `json:"truncated,omitempty"`  // there are more entries
	Unreadable int    `json:"unreadable,omitempty"` // entries that the guest has damaged on its disk
	Data       []byte `json:"data,omitempty"`
	// Complete says that the guest had written everything to its disk.
	Complete bool `json:"complete"`
}

// File is a file as the guest saw it. Names and targets are bytes of the guest's choice, but NUL.
type File struct {
	Name    []byte    `json:"name"`
	Type    string    `json:"type"` // file, dir, symlink or other
	Mode    uint16    `json:"mode"`
	UID     uint32    `json:"uid"`
	GID     uint32    `json:"gid"`
	Size    int64     `json:"size"`
	ModTime time.Time `json:"mtime"`
	Target  []byte    `json:"target,omitempty"`
}
