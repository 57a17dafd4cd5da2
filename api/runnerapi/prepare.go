package runnerapi

import "github.com/coppice-dev/coppice/core"

// Prepare begins, renews and ends asks for prepared machines. Those that are not in it stay until their time is up.
type Prepare struct {
	Asks []PrepareAsk `json:"asks"`
}

// MaxPrepareAsks bounds the asks of one request.
const MaxPrepareAsks = 256

// PrepareAsk asks for machines of one checkpoint.
type PrepareAsk struct {
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	Count        int               `json:"count"`        // that wait at the same time; 0: the ask ends
	CA           string            `json:"ca,omitempty"` // the authority of the children, as in Child
	Version      int64             `json:"version"`      // another version makes the runner try again
	Moves        int64             `json:"moves"`        // another number begins another instance of the counts
	ForSeconds   float64           `json:"for_seconds"`  // until the ask ends, if it is not repeated
}

// Prepared says what became of the asks of a request, in its order.
type Prepared struct {
	Max  int             `json:"max"` // machines that the runner keeps for all; 0: it prepares none
	Asks []PreparedState `json:"asks"`
}

// PreparedState is the state of an ask. The counts are those of an instance: one that began later has another name, and begins at zero.
type PreparedState struct {
	Instance    string `json:"instance,omitempty"` // empty: the runner has no such ask
	Ready       int    `json:"ready,omitempty"`
	MemoryBytes int64  `json:"memory_bytes,omitempty"` // that the ready machines do not share with others
	GivenUp     bool   `json:"given_up,omitempty"`     // no machine was taken in its time, so no other one is made
	PreparedCounts
}

// PreparedCounts say what became of prepared machines of a checkpoint, and of the forks of it.
type PreparedCounts struct {
	Hits             int64   `json:"hits,omitempty"`               // forks that took a machine
	Misses           int64   `json:"misses,omitempty"`             // forks for which none was ready
	Wasted           int64   `json:"wasted,omitempty"`             // machines that no fork took
	TakenCPUSeconds  float64 `json:"taken_cpu_seconds,omitempty"`  // of machines until a fork took them
	WastedCPUSeconds float64 `json:"wasted_cpu_seconds,omitempty"` // of machines that no fork took
}
