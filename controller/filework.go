package controller

import "github.com/coppice-dev/coppice/controller/guestclient"

// The types of files and watches in a guest. Package guestclient has them.
type (
	GuestFile         = guestclient.File
	MadeDirectory     = guestclient.MadeDirectory
	MakeDirectory     = guestclient.MakeDirectory
	RenameFile        = guestclient.RenameFile
	SetFileAttributes = guestclient.SetFileAttributes
	GuestWatch        = guestclient.Watch
	CreateWatch       = guestclient.CreateWatch
)

// PathWatches is the agent's route of watches.
const PathWatches = guestclient.PathWatches
