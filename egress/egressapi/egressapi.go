// Package egressapi defines the protocol between a runner and the egress process of its host: requests and answers over
// a unix socket that keeps message boundaries (internal/sidecar). It contains only types. A process may be older than
// its runner; Version shows that.
package egressapi

import (
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Version is the version of this protocol. A process of version 1 hands over records of any length, even too long for a
// message, and one of version 2 does not know Names: a runner replaces such a process.
const Version = 3

// Hello identifies the process.
type Hello struct {
	PID      int    `json:"pid"`
	Instance string `json:"instance"` // unique: no other process ever has it
	Version  int    `json:"version"`
	Key      []byte `json:"key"` // public key; grants are encrypted for it
}

// Sandbox is a sandbox whose traffic the process carries. Its sockets come with the message; Sockets says in which
// order.
type Sandbox struct {
	ID    core.SandboxID        `json:"id"`
	Epoch int64                 `json:"epoch"`
	Rules runnerapi.EgressRules `json:"rules"`
	Names bool                  `json:"names,omitempty"` // only its resolver is served, which asks the name servers of the host
}

// Sockets is the number of descriptors that come with a sandbox, in this order: the listener of the proxy, the listener
// of intercepted connections, the resolver's TCP listener and its UDP socket.
const Sockets = 4

// Served is a sandbox that the process serves.
type Served struct {
	ID      core.SandboxID `json:"id"`
	Epoch   int64          `json:"epoch"`
	Version int64          `json:"version"`         // of its rules
	Lacks   bool           `json:"lacks,omitempty"` // it has grants that were encrypted for another process
}

// Batch contains flows that were recorded and not acknowledged, oldest first. It is never empty.
type Batch struct {
	Last  int64       `json:"last"` // number of the last record; acknowledges the batch
	Flows []core.Flow `json:"flows"`
}

// Stats counts since the start of the process.
type Stats struct {
	Sandboxes  int                    `json:"sandboxes"`
	Open       int                    `json:"open"`    // flows under way
	Flows      map[core.Outcome]int64 `json:"flows"`   // flows that ended or were denied
	Answers    map[string]int64       `json:"answers"` // answers of resolvers
	Unrecorded int64                  `json:"unrecorded"`
	SpoolBytes int64                  `json:"spool_bytes"`
	SpoolMax   int64                  `json:"spool_max"`
	SetAside   map[string]int64       `json:"set_aside,omitempty"` // records of earlier processes that were not taken unchanged, by reason
	TooLong    int64                  `json:"too_long"`            // answers too long for a message
}

// Op names a request.
type Op string

// The requests.
const (
	OpHello  Op = "hello"
	OpPut    Op = "put"    // serve a sandbox, with Sockets descriptors; replaces it if it is already served
	OpRules  Op = "rules"  // replace a sandbox's rules, unless these are older; NOT_FOUND
	OpRemove Op = "remove" // end all connections of a sandbox and close its sockets; no error if it is not served
	OpList   Op = "list"
	OpFlows  Op = "flows" // acknowledge the flows up to After and wait for more
	OpStats  Op = "stats"
	OpWatch  Op = "watch" // never answered: the connection ends when the process ends
	OpStop   Op = "stop"
)

// Request is one request.
type Request struct {
	Op      Op       `json:"op"`
	Sandbox *Sandbox `json:"sandbox,omitempty"` // for OpPut, OpRules and OpRemove
	After   int64    `json:"after,omitempty"`

	From core.SandboxID `json:"from,omitempty"` // for OpList: list the sandboxes after this one
}

// Response answers one request.
type Response struct {
	Problem *runnerapi.Problem `json:"problem,omitempty"`
	Hello   *Hello             `json:"hello,omitempty"`
	Served  []Served           `json:"served,omitempty"`
	More    bool               `json:"more,omitempty"` // there are sandboxes after the last one in Served: ask again from that one
	Batch   *Batch             `json:"batch,omitempty"`
	Stats   *Stats             `json:"stats,omitempty"`
}
