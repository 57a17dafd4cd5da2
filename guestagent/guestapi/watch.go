package guestapi

import (
	"time"

	"github.com/coppice-dev/coppice/core"
)

// CreateWatch asks for a watch on a directory. With Recursive, it is also on all directories below, as far as they are on
// the same file system, now and later.
type CreateWatch struct {
	Path      string `json:"path"`
	User      string `json:"user,omitempty"`
	Recursive bool   `json:"recursive,omitempty"`
}

// Watch is a watch on a directory. It lasts until it is deleted, or until nobody has read it for ten minutes and another
// watch needs its place.
type Watch struct {
	ID         core.WatchID `json:"id"`
	Path       string       `json:"path"`
	Recursive  bool         `json:"recursive"`
	User       string       `json:"user,omitempty"`
	CreatedAt  time.Time    `json:"created_at"`
	Last       int64        `json:"last"`       // number of the last event, 0 before the first
	Incomplete bool         `json:"incomplete"` // some directories are not watched: too many, or not readable for the user
	Ended      bool         `json:"ended"`      // the directory is gone
}

// Watches is the answer of PathWatches, oldest first.
type Watches struct {
	Watches []Watch `json:"watches"`
}

// WatchEvent is a change. Name is the path below the watched directory.
type WatchEvent struct {
	Seq  int64  `json:"seq"`
	Type string `json:"type"`
	Path string `json:"path"`
	Name string `json:"name"`
	Dir  bool   `json:"dir"`
}

// The types of events. What has moved is renamed under its old path and created under its new one, as far as these are
// watched.
const (
	WatchCreate   = "create"
	WatchWrite    = "write"
	WatchRemove   = "remove"
	WatchRename   = "rename"
	WatchChmod    = "chmod"
	WatchOverflow = "overflow" // events before it were lost
)
