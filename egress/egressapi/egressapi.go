// Package egressapi is the wire between a runner and the egress process of its host: requests and
// answers over a unix socket of whole messages (internal/sidecar). It has only types. A process may
// be older than its runner; Version tells.
package egressapi

import (
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Version is that of this protocol. A process of version 1 hands over records of any length, which no message takes: a runner replaces it.
const Version = 2

// Hello says who the process is.
type Hello struct {
	PID      int    `json:"pid"`
	Instance string `json:"instance"` // of no other process, ever
	Version  int    `json:"version"`
	Key      []byte `json:"key"` // that grants are sealed for
}

// Sandbox is one whose traffic is carried. It comes with its sockets, in the order of Sockets.
type Sandbox struct {
	ID    core.SandboxID        `json:"id"`
	Epoch int64                 `json:"epoch"`
	Rules runnerapi.EgressRules `json:"rules"`
}

// Sockets is how many descriptors come with a sandbox: the proxy's listener, that of intercepted connections, and the resolver's for TCP
// and for UDP.
const Sockets = 4

// Served is a sandbox that the process serves.
type Served struct {
	ID      core.SandboxID `json:"id"`
	Epoch   int64          `json:"epoch"`
	Version int64          `json:"version"`         // of its rules
	Lacks   bool           `json:"lacks,omitempty"` // there are grants that were sealed for another process
}

// Batch are flows that were recorded and not acknowledged, oldest first. There is at least one.
type Batch struct {
	Last  int64       `json:"last"` // acknowledges them
	Flows []core.Flow `json:"flows"`
}

// Stats counts since the start of the process.
type Stats struct {
	Sandboxes  int                    `json:"sandboxes"`
	Open       int                    `json:"open"`    // flows
	Flows      map[core.Outcome]int64 `json:"flows"`   // that have ended, or were denied
	Answers    map[string]int64       `json:"answers"` // of resolvers
	Unrecorded int64                  `json:"unrecorded"`
	SpoolBytes int64                  `json:"spool_bytes"`
	SpoolMax   int64                  `json:"spool_max"`
	SetAside   map[string]int64       `json:"set_aside,omitempty"` // records of earlier processes that were not taken as they are, by why
	TooLong    int64                  `json:"too_long"`            // answers that no message takes
}

// Op is what is asked.
type Op string

// The requests.
const (
	OpHello  Op = "hello"
	OpPut    Op = "put"    // with Sockets descriptors: serve a sandbox; one that is served is replaced
	OpRules  Op = "rules"  // replaces a sandbox's rules, unless they are older; NOT_FOUND
	OpRemove Op = "remove" // ends all that a sandbox has open, and closes its sockets; one that is not served is no error
	OpList   Op = "list"
	OpFlows  Op = "flows" // acknowledges those up to After and waits for more
	OpStats  Op = "stats"
	OpWatch  Op = "watch" // is never answered: the connection ends with the process
	OpStop   Op = "stop"
)

// Request is one.
type Request struct {
	Op      Op       `json:"op"`
	Sandbox *Sandbox `json:"sandbox,omitempty"` // of OpPut, OpRules and OpRemove
	After   int64    `json:"after,omitempty"`

	From core.SandboxID `json:"from,omitempty"` // of OpList: those that follow this one
}

// Response answers one.
type Response struct {
	Problem *runnerapi.Problem `json:"problem,omitempty"`
	Hello   *Hello             `json:"hello,omitempty"`
	Served  []Served           `json:"served,omitempty"`
	More    bool               `json:"more,omitempty"` // sandboxes follow the last one of Served: ask again from it
	Batch   *Batch             `json:"batch,omitempty"`
	Stats   *Stats             `json:"stats,omitempty"`
}
