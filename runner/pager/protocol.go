package pager

import (
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob/peers"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// A client and the pager speak over a unix socket of whole messages: a request and its answer, one after the other, each JSON with at most
// one descriptor.

// protocolVersion is said in Hello: a pager may be older than its runner, or newer. What a runner says of images that are served already keeps its
// meaning in every later version, and so does Status: hello, dir, taken, drop, watch and stop. By these a runner goes on with a pager of another
// version until nobody has memory from it. The others are for pagers of the same version.
const protocolVersion = 4

// Range is a run of pages.
type Range struct {
	First int64 `json:"f"`
	Count int64 `json:"n"`
}

// Source says where an image is in the store.
type Source struct {
	Manifest     manifest.Ref      `json:"manifest"`
	CheckpointID core.CheckpointID `json:"checkpoint_id"` // whose manifest that must be
	Image        string            `json:"image"`         // the name of the image in the manifest
}

// Image describes an image to be served.
type Image struct {
	ID     string `json:"id"`
	Source Source `json:"source"`
	// Seed is the image whose bytes the file has already; nil for a file of zeros.
	Seed *Source `json:"seed,omitempty"`
	// Want are pages that machines will ask for soon, in no order. It is only a hint.
	Want []Range `json:"want,omitempty"`
	// Peers are runners that may have it, and are asked before the store is.
	Peers []peers.Peer `json:"peers,omitempty"`
	// Memory says that it is mapped as a machine's memory: the kernel asks for the page that is touched, and no others.
	Memory bool `json:"memory,omitempty"`
	// Record has the pages noted that are asked for (Client.Touched). Nothing of it is in the store then, and Source is zero: the file has
	// everything, is only read, and the image is served until it is dropped.
	Record bool `json:"record,omitempty"`
}

// Status says how far an image is.
type Status struct {
	ID       string             `json:"id"`
	Inode    uint64             `json:"inode"` // of the file that machines map
	Part     uint64             `json:"part"`  // inode of the file that its bytes are written to
	Pages    int64              `json:"pages"`
	Here     int64              `json:"here"`             // pages whose bytes are on this host; zeros are
	Whole    bool               `json:"whole"`            // the image's file has everything, durably
	Taken    bool               `json:"taken"`            // see Client.Taken
	Record   bool               `json:"record,omitempty"` // see Image
	Opened   int64              `json:"opened"`
	Demanded int64              `json:"demanded"` // pages that were asked for before they were here
	Bytes    int64              `json:"bytes"`    // that the store has given
	Requests int64              `json:"requests"` // to the store
	Problem  *runnerapi.Problem `json:"problem,omitempty"`
	Stalled  time.Time          `json:"stalled,omitzero"`  // since when it waits for the store or the disk; zero with a problem: the image is damaged
	Waiters  []Waiter           `json:"waiters,omitempty"` // the oldest first; only those that have waited for a while, and of them maxWaiters
	Waiting  int                `json:"waiting,omitempty"` // how many have waited for a while, with those that Waiters leaves out
}

// Totals are sums over all images of a pager, those that have ended too.
type Totals struct {
	Demanded int64 `json:"demanded"` // as in Status
	Bytes    int64 `json:"bytes"`
	Requests int64 `json:"requests"`
}

func (t *Totals) add(s Status) {
	if s.Record { // a rehearsal asks for everything that it touches
		return
	}
	t.Demanded, t.Bytes, t.Requests = t.Demanded+s.Demanded, t.Bytes+s.Bytes, t.Requests+s.Requests
}

// Waiter is a thread that has touched a page which is not here.
type Waiter struct {
	Thread int       `json:"thread"` // its number on the host; one of the kernel's own where that asks for somebody
	Since  time.Time `json:"since"`
	Object string    `json:"object"` // of the store, that the page is in
}

// How long somebody has waited before it is said, and for how many of an image.
const (
	waitNotice = time.Second
	maxWaiters = 32
)

// The bounds of a status, so that a message has room for some whatever a manifest or a store says, and of the statuses in an answer.
const (
	maxID          = 255      // bytes of an image's id, which is the name of a file
	maxObject      = 256      // of the encoding of an object's key
	maxProblem     = 1 << 10  // of that of a problem's message in a status
	maxStatusBytes = 96 << 10 // of encoded statuses in an answer
)

// Damaged reports whether what was asked for will never come.
func (s Status) Damaged() bool { return s.Problem != nil && s.Stalled.IsZero() }

// Hello says who the pager is.
type Hello struct {
	PID      int    `json:"pid"`
	Instance string `json:"instance"` // of no other pager, ever
	Version  int    `json:"version"`  // of this protocol
}

// Foreign reports whether the pager is of another version: nothing new can be put there.
func (h Hello) Foreign() bool { return h.Version != protocolVersion }

type op string

const (
	opHello   op = "hello"
	opKeys    op = "keys"    //
	opPut     op = "put"     // with the image's file
	opDir     op = "dir"     // answers with a descriptor of the directory with the image's file
	opDrop    op = "drop"    //
	opTaken   op = "taken"   //
	opTouched op = "touched" //
	opWatch   op = "watch"   // answers when the version is another
	opStop    op = "stop"
)

type request struct {
	Op      op     `json:"op"`
	ID      string `json:"id,omitempty"`
	Image   *Image `json:"image,omitempty"`
	Version int64  `json:"version,omitempty"`
	After   string `json:"after,omitempty"` // of opWatch: the images whose ids follow this one, at once; a pager that does not know it has said all

	Keys runnerapi.Keys `json:"keys,omitempty"`
}

type response struct {
	Problem *runnerapi.Problem `json:"problem,omitempty"`
	Hello   *Hello             `json:"hello,omitempty"`
	Status  *Status            `json:"status,omitempty"`
	Images  []Status           `json:"images,omitempty"` // in the order of their ids
	More    bool               `json:"more,omitempty"`   // images follow the last one
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
