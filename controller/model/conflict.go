package model

import "github.com/coppice-dev/coppice/core"

// VersionConflictError refuses a compare-and-set whose version is not the present one.
type VersionConflictError struct {
	Object  string // "checkpoint ckpt_…"
	Asked   int64
	Current int64
}

// Error says what to do about the conflict.
func (e *VersionConflictError) Error() string {
	return e.core().Error()
}

// Unwrap gives the core error that callers see.
func (e *VersionConflictError) Unwrap() error { return e.core() }

func (e *VersionConflictError) core() *core.Error {
	return core.Errorf(core.Conflict, core.CodeVersionConflict,
		"%s is at version %d, not %d: read it again and repeat the change", e.Object, e.Current, e.Asked)
}
