package core

import (
	"net/http"
	"time"
)

// Spoken is the protocol of a connection, as far as the egress proxy can see it.
type Spoken string

// The protocols.
const (
	SpokenHTTP Spoken = "http"
	SpokenTLS  Spoken = "tls"
	SpokenTCP  Spoken = "tcp" // anything else
)

// Outcome is the outcome of a flow.
type Outcome string

// The outcomes.
const (
	FlowAllowed Outcome = "allowed"
	FlowDenied  Outcome = "denied" // nothing was sent
	FlowCut     Outcome = "cut"    // it was allowed and begun, and the proxy ended it; some of it may have been sent
	FlowFailed  Outcome = "failed" // it was allowed and failed: no such name, no connection, no answer
)

// Flow is one thing that a sandbox sent or tried to send: a request, or a tunnel. For a tunnel, only the destination is
// recorded. A Flow never contains a body, a query or a header.
type Flow struct {
	ID        string    `json:"id"` // never used again
	SandboxID SandboxID `json:"sandbox_id"`
	Epoch     int64     `json:"epoch"`
	At        time.Time `json:"at"` // by the clock of the sandbox's host
	Spoken    Spoken    `json:"spoken"`
	Host      string    `json:"host"` // the name, or the address if there is no name
	Port      uint16    `json:"port"`
	Method    string    `json:"method,omitempty"` // of a request
	Path      string    `json:"path,omitempty"`   // of a request
	Outcome   Outcome   `json:"outcome"`
	Rule      string    `json:"rule,omitempty"`   // the entry that allowed it
	Grant     string    `json:"grant,omitempty"`  // the grant whose secret was put into it
	Reason    string    `json:"reason,omitempty"` // why it was denied, cut or failed

	// A record may stand for many denied flows of one sandbox: to one host and port, for one reason, within a short
	// time. Its other fields are those of the first flow.
	Count int64     `json:"count,omitempty"` // number of flows; 0: one
	Last  time.Time `json:"last,omitzero"`   // time of the last flow; At is the time of the first

	// The fields that are known when the flow has ended.
	Ended    time.Time `json:"ended,omitzero"`
	Status   int       `json:"status,omitempty"` // of the response
	Sent     int64     `json:"sent"`             // bytes from the guest, of the body or of the tunnel
	Received int64     `json:"received"`         // bytes to the guest
}

// Flows returns how many flows the record stands for.
func (f Flow) Flows() int64 { return max(f.Count, 1) }

// Final reports whether a flow's record is complete: it has ended, or it was denied.
func (f Flow) Final() bool { return !f.Ended.IsZero() || f.Outcome == FlowDenied }

// Changes reports whether a flow may have changed something outside: any request that does more than read, and any
// tunnel whose content the proxy does not see. This includes flows that were cut: the guest did not get the answer, but
// the host may have acted.
func (f Flow) Changes() bool {
	if f.Outcome == FlowDenied {
		return false
	}
	switch f.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return false
	}
	return true
}
