package proxy

import "github.com/coppice-dev/coppice/core"

// Journal keeps flows. It must be safe for concurrent use.
type Journal interface {
	// Begin is called before anything is sent for a flow, and for one that is denied. An error refuses the flow.
	Begin(core.Flow) error
	// End is called once for each flow that was begun and not denied.
	End(core.Flow)
}
