package proxy

import (
	"context"
	"net/http/httptrace"

	"github.com/coppice-dev/coppice/core"
)

// Journal keeps flows. It must be safe for concurrent use.
type Journal interface {
	// Begin is called before anything is sent for a flow, and for one that is denied. An error refuses the flow.
	Begin(core.Flow) error
	// End is called once for each flow that was begun and not denied.
	End(core.Flow)
}

// traced is the flow's context for a transport. A request that has a connection may be on it, whatever becomes of it afterwards: whether it had
// been written when it was cancelled nobody can tell without a race.
func (o *openFlow) traced() context.Context {
	return httptrace.WithClientTrace(o.ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { o.gone.Store(true) }})
}
