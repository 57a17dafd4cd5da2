package registry

import "github.com/coppice-dev/coppice/core"

// The codes of errors that only this package makes.
const (
	// CodeUnreachable is a registry that did not answer, or stopped in the middle, however often it was asked.
	CodeUnreachable core.Code = "REGISTRY_UNREACHABLE"
	// CodeDenied is a registry that wants other credentials than it was given.
	CodeDenied core.Code = "REGISTRY_DENIED"
	// CodeRefused is an answer of a registry that is refused: it is not what its digest says, exceeds a bound, or leads to
	// an address that it must not lead to.
	CodeRefused core.Code = "REGISTRY_REFUSED"
)

func refuse(format string, a ...any) error {
	return core.Errorf(core.Invalid, CodeRefused, format, a...)
}
