package guest

import (
	"encoding/binary"
	"errors"
	"io"
	"sync/atomic"

	"github.com/hashicorp/yamux"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// What the multiplexer's frames look like (yamux's spec.md).
const (
	frameHead    = 12
	frameData    = 0
	frameWindow  = 1
	frameGoAway  = 3
	flagSYN      = 1
	maxFrame     = 256 << 10 // the window of a stream, so no honest frame is longer
	maxOpening   = 64        // streams on their way to be accepted
	maxUnasked   = 4 << 20   // bytes a guest may send while no request is open: what was under way when the last was given up
	minUsualData = 16        // a frame below it counts as this much, so that floods of empty frames are noticed
)

var errMisbehaved = errors.New("the guest does not keep to the multiplexer's protocol")

// guard stands between the channel and the multiplexer and lets in only what an honest agent sends. yamux itself would
// answer each ping with a goroutine, keep streams that the guest opens, and read without end what belongs to no stream.
type guard struct {
	*guestapi.Link
	streams atomic.Pointer[yamux.Session]
	head    [frameHead]byte
	headAt  int
	body    int // bytes of a data frame still to come
	unasked int // bytes since a request was last open
}

func newGuard(l *guestapi.Link) *guard { return &guard{Link: l} }

func (g *guard) watch(s *yamux.Session) { g.streams.Store(s) }

// Read reads from the link and judges each frame by its head.
func (g *guard) Read(b []byte) (int, error) {
	n, err := g.Link.Read(b)
	for rest := b[:n]; len(rest) > 0; {
		if g.body > 0 {
			m := min(g.body, len(rest))
			g.body, rest = g.body-m, rest[m:]
			continue
		}
		m := copy(g.head[g.headAt:], rest)
		g.headAt, rest = g.headAt+m, rest[m:]
		if g.headAt < frameHead {
			break
		}
		g.headAt = 0
		if !g.allow() {
			return 0, errors.Join(errMisbehaved, io.ErrUnexpectedEOF)
		}
	}
	return n, err
}

// allow judges one frame's head and counts what nobody asked for.
func (g *guard) allow() bool {
	length := binary.BigEndian.Uint32(g.head[8:])
	size := minUsualData
	switch {
	case g.head[0] != 0, binary.BigEndian.Uint16(g.head[2:])&flagSYN != 0:
		return false
	case g.head[1] == frameData:
		if length > maxFrame {
			return false
		}
		g.body = int(length)
		size += int(length)
	case g.head[1] == frameWindow, g.head[1] == frameGoAway:
	default:
		return false
	}
	if s := g.streams.Load(); s == nil || s.NumStreams() > 0 {
		g.unasked = 0
		return true
	}
	g.unasked += size
	return g.unasked <= maxUnasked
}
