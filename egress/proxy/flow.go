package proxy

import (
	"context"
	"net/http/httptrace"

	"github.com/coppice-dev/coppice/core"
)

// Journal keeps flows. It must be safe for concurrent use.
type Journal interface {
	// Begin is called before anything is sent for a flow, and also for a denied flow. If it returns an error, the flow
	// is refused.
	Begin(core.Flow) error
	// End is called once for each flow that was begun and not denied.
	End(core.Flow)
}

// traced returns the flow's context for a transport. From the moment when a request gets a connection, it may have been
// sent: after a cancellation, nobody can find out without a race whether it was written.
func (o *openFlow) traced() context.Context {
	return httptrace.WithClientTrace(o.ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { o.gone.Store(true) }})
}
