package proxy

import (
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Outcome is what became of a flow.
type Outcome string

// The outcomes.
const (
	Allowed Outcome = "allowed"
	Denied  Outcome = "denied"
	Failed  Outcome = "failed" // it was allowed, and could not be carried: no such name, no connection, no answer
)

// Flow is one thing that a sandbox sent out or tried to: a request, or a tunnel of which no more is seen than whereto. It never holds a
// body, a query or a header.
type Flow struct {
	ID        string         `json:"id"` // unique for ever
	SandboxID core.SandboxID `json:"sandbox_id"`
	Epoch     int64          `json:"epoch"`
	At        time.Time      `json:"at"`
	Spoken    policy.Spoken  `json:"spoken"`
	Host      string         `json:"host"` // the name, or the address where there is no name
	Port      uint16         `json:"port"`
	Method    string         `json:"method,omitempty"` // of a request
	Path      string         `json:"path,omitempty"`   // of a request
	Outcome   Outcome        `json:"outcome"`
	Rule      string         `json:"rule,omitempty"`   // the entry that allowed it
	Reason    string         `json:"reason,omitempty"` // why it was denied or failed

	// What is known when it has ended.
	Ended    time.Time `json:"ended,omitzero"`
	Status   int       `json:"status,omitempty"` // of the response
	Sent     int64     `json:"sent"`             // bytes from the guest: of bodies, or of the tunnel
	Received int64     `json:"received"`         // bytes to the guest
}

// Changes reports whether a flow may have changed something outside: any request but those that only read, and any tunnel of which the proxy
// sees nothing.
func (f Flow) Changes() bool {
	if f.Outcome == Denied {
		return false
	}
	switch f.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return false
	}
	return true
}

// Journal keeps flows. It must be safe for concurrent use.
type Journal interface {
	// Begin is called before anything is sent for a flow, and for one that is denied. An error refuses the flow.
	Begin(Flow) error
	// End is called once for each flow that was begun and not denied.
	End(Flow)
}
