package images

import "github.com/coppice-dev/coppice/core"

// The codes of errors that only this package makes.
const (
	// CodeImageBuildFailed is a build that a tool or the archive made fail; the message has the tool's last words.
	CodeImageBuildFailed core.Code = "IMAGE_BUILD_FAILED"
	// CodeImageCorrupt is an image in the store whose bytes do not match its digest.
	CodeImageCorrupt core.Code = "IMAGE_CORRUPT"
)

func corrupt(digest core.Digest, format string, a ...any) error {
	e := core.Errorf(core.DataLoss, CodeImageCorrupt, format, a...)
	e.Msg = "image " + digest.Short() + ": " + e.Msg + "; remove it and build it again"
	return e
}
