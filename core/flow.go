package core

import (
	"net/http"
	"time"
)

// Spoken is what the egress proxy has seen of a connection's protocol.
type Spoken string

// What is spoken.
const (
	SpokenHTTP Spoken = "http"
	SpokenTLS  Spoken = "tls"
	SpokenTCP  Spoken = "tcp" // anything else
)

// Outcome is what became of a flow.
type Outcome string

// The outcomes.
const (
	FlowAllowed Outcome = "allowed"
	FlowDenied  Outcome = "denied" // nothing of it was sent
	FlowCut     Outcome = "cut"    // it was allowed and begun, and the proxy ended it: what had been sent until then was sent
	FlowFailed  Outcome = "failed" // it was allowed, and could not be carried: no such name, no connection, no answer
)

// Flow is one thing that a sandbox sent out or tried to: a request, or a tunnel of which no more is seen than whereto. It never holds a
// body, a query or a header.
type Flow struct {
	ID        string    `json:"id"` // unique for ever
	SandboxID SandboxID `json:"sandbox_id"`
	Epoch     int64     `json:"epoch"`
	At        time.Time `json:"at"` // by the clock of the sandbox's host
	Spoken    Spoken    `json:"spoken"`
	Host      string    `json:"host"` // the name, or the address where there is no name
	Port      uint16    `json:"port"`
	Method    string    `json:"method,omitempty"` // of a request
	Path      string    `json:"path,omitempty"`   // of a request
	Outcome   Outcome   `json:"outcome"`
	Rule      string    `json:"rule,omitempty"`   // the entry that allowed it
	Grant     string    `json:"grant,omitempty"`  // whose secret was put into it
	Reason    string    `json:"reason,omitempty"` // why it was denied, cut or failed

	// A record may stand for many flows of one sandbox that were denied: to one host and port, for one reason, within a short time. What else it
	// says is of the first one.
	Count int64     `json:"count,omitempty"` // how many; 0: one
	Last  time.Time `json:"last,omitzero"`   // when the last of them was; At is when the first was

	// What is known when it has ended.
	Ended    time.Time `json:"ended,omitzero"`
	Status   int       `json:"status,omitempty"` // of the response
	Sent     int64     `json:"sent"`             // bytes from the guest: of bodies, or of the tunnel
	Received int64     `json:"received"`         // bytes to the guest
}

// Flows returns how many flows the record stands for.
func (f Flow) Flows() int64 { return max(f.Count, 1) }

// Final reports whether all is known of a flow: nothing follows a denial.
func (f Flow) Final() bool { return !f.Ended.IsZero() || f.Outcome == FlowDenied }

// Changes reports whether a flow may have changed something outside: any request but those that only read, and any tunnel of which the proxy
// sees nothing. What was cut may have: its answer was taken from the guest, not what it did.
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
