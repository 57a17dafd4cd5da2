package runnerclient

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// ExportCheckpoint returns a checkpoint of a runner as one file, and the file's size in bytes. The caller closes it. A runner that sends
// nothing for too long is given up.
func (c *Client) ExportCheckpoint(ctx context.Context, endpoint string, id core.CheckpointID, in runnerapi.ExportCheckpoint) (io.ReadCloser, int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	late := time.AfterFunc(c.timeouts.Export, func() { cancel(errTimeout) })
	res, err := c.do(ctx, endpoint, http.MethodPost, with(runnerapi.PathCheckpointExport, id, ""), in)
	late.Stop()
	if err == nil && res.ContentLength < 0 {
		err = core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "the runner did not say how long the file of checkpoint %s is", id)
		_ = res.Body.Close() // nothing was read
	}
	if err != nil {
		cancel(nil)
		return nil, 0, err
	}
	return &exported{ctx: ctx, body: res.Body, cancel: cancel, late: late, wait: c.timeouts.Export}, res.ContentLength, nil
}

// exported is a file that a runner sends.
type exported struct {
	ctx    context.Context //nolint:containedctx // that of the request whose answer this is
	body   io.ReadCloser
	cancel context.CancelCauseFunc
	late   *time.Timer
	wait   time.Duration
}

// Read implements io.Reader.
func (e *exported) Read(p []byte) (int, error) {
	e.late.Reset(e.wait)
	n, err := e.body.Read(p)
	e.late.Stop()
	if err != nil && err != io.EOF { //nolint:errorlint // as a reader returns it
		err = unreachable(e.ctx, err)
	}
	return n, err
}

// Close implements io.Closer.
func (e *exported) Close() error {
	e.late.Stop()
	e.cancel(nil)
	return e.body.Close()
}
