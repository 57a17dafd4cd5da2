package pager

import (
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob/peers"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// A client and the pager speak over a unix socket that keeps message boundaries: requests and answers in turn, each
// JSON with at most one descriptor.

// ProtocolVersion is sent in Hello: a pager may be older than its runner, or newer. The requests about images that are
// already served keep their meaning in every later version, and so does Status: hello, dir, taken, drop, watch and
// stop. With these, a runner uses a pager of another version until nobody has memory from it. The other requests need a
// pager of the same version.
const ProtocolVersion = 4

// Range is a run of pages.
type Range struct {
	First int64 `json:"f"`
	Count int64 `json:"n"`
}

// Source says where an image is in the store.
type Source struct {
	Manifest     manifest.Ref      `json:"manifest"`
	CheckpointID core.CheckpointID `json:"checkpoint_id"` // the checkpoint that the manifest must belong to
	Image        string            `json:"image"`         // the name of the image in the manifest
}

// Image describes an image to serve.
type Image struct {
	ID     string `json:"id"`
	Source Source `json:"source"`
	// Seed is the image whose bytes the file already has; nil for a file of zeros.
	Seed *Source `json:"seed,omitempty"`
	// Want are the pages that machines will soon read, in no order. It is only a hint.
	Want []Range `json:"want,omitempty"`
	// Peers are runners that may have the image. They are asked before the store.
	Peers []peers.Peer `json:"peers,omitempty"`
	// Memory says that the image is mapped as a machine's memory: the kernel reads only the touched page.
	Memory bool `json:"memory,omitempty"`
	// Record makes the pager record the pages that are read (Client.Touched). Then nothing of the image is in the
	// store, and Source is zero: the file has everything and is only read, and the image is served until it is dropped.
	Record bool `json:"record,omitempty"`
}

// Status is the progress of an image.
type Status struct {
	ID       string             `json:"id"`
	Inode    uint64             `json:"inode"` // inode of the file that machines map
	Part     uint64             `json:"part"`  // inode of the file that its bytes are written to
	Pages    int64              `json:"pages"`
	Here     int64              `json:"here"`             // pages whose bytes are on this host, including pages of zeros
	Whole    bool               `json:"whole"`            // the image's file has everything, durably
	Taken    bool               `json:"taken"`            // see Client.Taken
	Record   bool               `json:"record,omitempty"` // see Image
	Opened   int64              `json:"opened"`
	Demanded int64              `json:"demanded"` // pages that were read before they were present
	Bytes    int64              `json:"bytes"`    // bytes received from the store
	Requests int64              `json:"requests"` // to the store
	Problem  *runnerapi.Problem `json:"problem,omitempty"`
	Stalled  time.Time          `json:"stalled,omitzero"`  // since when it waits for the store or the disk; if zero and there is a problem, the image is damaged
	Waiters  []Waiter           `json:"waiters,omitempty"` // oldest first; at most maxWaiters of those that have waited for a while
	Waiting  int                `json:"waiting,omitempty"` // number of threads that have waited for a while, including those not in Waiters
}

// Totals are sums over all images of a pager, including images that have ended.
type Totals struct {
	Demanded int64 `json:"demanded"` // as in Status
	Bytes    int64 `json:"bytes"`
	Requests int64 `json:"requests"`
}

func (t *Totals) add(s Status) {
	if s.Record { // in a rehearsal, every page counts as demanded
		return
	}
	t.Demanded, t.Bytes, t.Requests = t.Demanded+s.Demanded, t.Bytes+s.Bytes, t.Requests+s.Requests
}

// Waiter is a thread that has touched a missing page.
type Waiter struct {
	Thread int       `json:"thread"` // its number on the host; a kernel thread's if the kernel reads for another thread
	Since  time.Time `json:"since"`
	Object string    `json:"object"` // object of the store that contains the page
}

// After how long a waiting thread is reported, and how many threads of an image are reported.
const (
	waitNotice = time.Second
	maxWaiters = 32
)

// The bounds of a status and of the statuses in an answer, so that a message has room for at least one, whatever a
// manifest or a store contains.
const (
	maxID          = 255      // bytes of an image's id, which is the name of a file
	maxObject      = 256      // of the encoding of an object's key
	maxProblem     = 1 << 10  // of the encoding of a problem's message
	maxStatusBytes = 96 << 10 // of encoded statuses in an answer
)

// Damaged reports whether the missing pages will never arrive.
func (s Status) Damaged() bool { return s.Problem != nil && s.Stalled.IsZero() }

// Hello identifies the pager.
type Hello struct {
	PID      int    `json:"pid"`
	Instance string `json:"instance"` // unique: no other pager ever has it
	Version  int    `json:"version"`  // version of this protocol
}

// Foreign reports whether the pager has another version of the protocol: no new images can be put there.
func (h Hello) Foreign() bool { return h.Version != ProtocolVersion }

type op string

const (
	opHello   op = "hello"
	opKeys    op = "keys"    //
	opPut     op = "put"     // with the image's file
	opDir     op = "dir"     // answers with a descriptor of the directory with the image's file
	opDrop    op = "drop"    //
	opTaken   op = "taken"   //
	opTouched op = "touched" //
	opWatch   op = "watch"   // answered when the version has changed
	opStop    op = "stop"
)

type request struct {
	Op      op     `json:"op"`
	ID      string `json:"id,omitempty"`
	Image   *Image `json:"image,omitempty"`
	Version int64  `json:"version,omitempty"`
	After   string `json:"after,omitempty"` // for opWatch: list the images after this id, at once; an old pager, which ignores this, has already listed all

	Keys runnerapi.Keys `json:"keys,omitempty"`
}

type response struct {
	Problem *runnerapi.Problem `json:"problem,omitempty"`
	Hello   *Hello             `json:"hello,omitempty"`
	Status  *Status            `json:"status,omitempty"`
	Images  []Status           `json:"images,omitempty"` // in the order of their ids
	More    bool               `json:"more,omitempty"`   // there are images after the last one
	Touched []Range            `json:"touched,omitempty"`
	Version int64              `json:"version,omitempty"`
	Totals  *Totals            `json:"totals,omitempty"`
}

func problemOf(err error) *runnerapi.Problem {
	p := runnerapi.ProblemOf(err)
	if p != nil {
		p.Message = core.ClipText(p.Message, 4096)
	}
	return p
}
