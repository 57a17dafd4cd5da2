package fakeguest

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// State is everything of a guest. It can be stored as JSON.
type State struct {
	Changes uint64        // how often it has changed
	Uptime  time.Duration // of the guest, without its time in checkpoints; Memory keeps it

	BootNonce  string
	State      guestapi.State
	Generation string
	CaptureID  string
	Sealed     bool     // quarantined, and every step of the reseal succeeded
	Reseeded   bool     // frozen, and reseeded: the machine may go on
	Rehearsed  bool     // frozen, and provisionally resealed: only another reseal is possible
	Used       []string // every generation before this one
	Quiesced   guestapi.QuiesceResponse

	Random []byte // the key of the random generator
	Drawn  uint64 // how often it was used under this key

	Hostname string // of the last reseal

	Counter     int64           // of the program inc
	Files       map[string]File // by absolute path; a directory of a file need not be there itself
	Sessions    []*Session      // oldest first
	Watches     []*Watch        // oldest first
	NextPID     int
	Lacks       []string // features of guestapi that the agent is too old for
	OutputBytes int      // how much output of each stream is kept
}

// LacksIdentityFiles in Lacks makes an agent that does not report the files with the identity at a capture. It is no feature that a host asks for.
const LacksIdentityFiles = "identity_files"

// NewState is the state of a guest that was switched on.
func NewState() *State {
	s := &State{Random: make([]byte, sha256.Size), State: guestapi.StateReleased, NextPID: 41, OutputBytes: 1 << 20}
	_, _ = rand.Read(s.Random) // never fails
	s.BootNonce = hex.EncodeToString(s.draw()[:8])
	s.Generation = "boot-" + s.BootNonce
	s.Files = map[string]File{"/root": {Dir: true}, "/tmp": {Dir: true}, "/workspace": {Dir: true}}
	return s
}

// Clone copies the state. The bytes of files and outputs are shared, because nothing writes them again.
func (s *State) Clone() *State {
	c := *s
	c.Used, c.Files, c.Sessions, c.Watches = slices.Clone(s.Used), maps.Clone(s.Files), slices.Clone(s.Sessions), slices.Clone(s.Watches)
	for i, n := range c.Sessions {
		own := *n
		own.Stdin, own.Out.Data, own.Err.Data = slices.Clip(own.Stdin), slices.Clip(own.Out.Data), slices.Clip(own.Err.Data)
		c.Sessions[i] = &own
	}
	for i, w := range c.Watches {
		own := *w
		own.Events = slices.Clip(own.Events)
		c.Watches[i] = &own
	}
	return &c
}

// draw is the guest's random generator. Its output depends on the state alone, so clones draw the same until one is
// reseeded.
func (s *State) draw() []byte {
	s.Drawn++
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(slices.Clone(s.Random), s.Drawn))
	return sum[:]
}

func (s *State) reseedRandom(entropy []byte) {
	sum := sha256.Sum256(append(s.draw(), entropy...))
	s.Random, s.Drawn = sum[:], 0
}

// Memory keeps the state of a guest.
type Memory interface {
	// Do calls fn with the state, one call at a time. With change, it keeps what fn has changed, unless fn returns an error.
	Do(change bool, fn func(s *State) error) error
}

// heap is a Memory in this process. It relies on functions that change nothing before they return an error.
type heap struct {
	mu   sync.Mutex // guards the fields below
	s    *State
	seen time.Time // when Uptime was right
}

// InProcess returns a Memory with a state, which belongs to it from now on.
func InProcess(s *State) Memory { return &heap{s: s, seen: time.Now()} }

// Do implements Memory.
func (h *heap) Do(_ bool, fn func(s *State) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	h.s.Uptime, h.seen = h.s.Uptime+now.Sub(h.seen), now
	return fn(h.s)
}
