package steps

import (
	"context"
	"errors"

	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// fork begins the fork of an action. If there is no room, it waits until another action of the step gives up its room. begun says that the
// action counts as one that has a workspace.
func (w *work) fork(ctx context.Context, row *Row) (begun bool, err error) {
	note := func(ctx context.Context, tx NoteTx, b Begun) error {
		return tx.MoveStepAction(ctx, w.Ref, Move{Index: row.Index, From: Pending, To: Forking, Fork: b.Operation, Workspace: b.Workspace})
	}
	for {
		freed, hopeless, begun, err := w.try(ctx, func() error { return w.Fork(ctx, row, note) })
		if begun {
			return true, err
		}
		if !full(err) {
			return false, err
		}
		select {
		case <-freed:
			continue
		default:
		}
		select {
		case <-freed:
		case <-hopeless:
			return false, err
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
	}
}

// inLine keeps most of the controller's line for others.
func (w *work) inLine(ctx context.Context, begin func() error) error {
	select {
	case w.line <- struct{}{}:
		defer func() { <-w.line }()
		return begin()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// full reports whether an error says that there is no room now.
func full(err error) bool {
	if never, ok := errors.AsType[*placement.FullError](err); ok {
		return !never.Never
	}
	return core.CodeOf(err) == core.CodeQuotaExceeded
}

// try begins a fork. Meanwhile the action counts as one that looks for room. freed is closed when another action of the step gives up its room,
// hopeless when nobody will.
func (w *work) try(ctx context.Context, fork func() error) (freed, hopeless <-chan struct{}, begun bool, err error) {
	freed = w.look()
	defer func() { // also after a panic
		if begun {
			w.hold()
		} else {
			hopeless = w.leave(freed)
		}
	}()
	err = w.inLine(ctx, func() error { return w.insist(ctx, fork) })
	begun = err == nil || errors.Is(err, ErrMoved)
	return freed, nil, begun, err
}

// look counts an action that looks for room. It returns a channel that is closed when another action of the step gives up its room.
func (w *work) look() (freed <-chan struct{}) {
	w.room.Lock()
	defer w.room.Unlock()
	w.trying++
	return w.freed
}

// hold counts an action that has found room.
func (w *work) hold() {
	w.room.Lock()
	defer w.room.Unlock()
	w.trying--
	w.holding++
}

// leave counts an action that has found no room. The channel is closed when no action has room or looks for it, and no room was
// given up since freed was read: then nobody makes room for those who wait.
func (w *work) leave(freed <-chan struct{}) (hopeless <-chan struct{}) {
	w.room.Lock()
	defer w.room.Unlock()
	w.trying--
	hopeless = w.hopeless
	if w.trying == 0 && w.holding == 0 && w.freed == freed {
		close(w.hopeless)
		w.hopeless = make(chan struct{})
	}
	return hopeless
}

// release counts an action that has left its room.
func (w *work) release() {
	w.room.Lock()
	defer w.room.Unlock()
	w.holding--
	close(w.freed)
	w.freed = make(chan struct{})
}
