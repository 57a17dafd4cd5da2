package build

import "github.com/coppice-dev/coppice/core"

// The codes of errors that only this package makes.
const (
	// CodeInvalidTar is an archive that is not the root file system of a container.
	CodeInvalidTar core.Code = "INVALID_TAR"
	// CodeMissingProgram is a program that a build needs and the host lacks; the message names the package.
	CodeMissingProgram core.Code = "MISSING_PROGRAM"
	// CodeRootRequired is a build started by a user other than root.
	CodeRootRequired core.Code = "ROOT_REQUIRED"
)
