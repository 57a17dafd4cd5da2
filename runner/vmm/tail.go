package vmm

import "sync"

// ConsoleBytes is how much of a guest's console a Machine keeps.
const ConsoleBytes = 64 << 10

// Tail keeps the end of the text that is written to it, as printable ASCII with line feeds and tabs. Other bytes are
// replaced, so that it can be shown on a terminal. Its memory is bounded. It is safe for concurrent use.
type Tail struct {
	limit int

	mu   sync.Mutex // guards ring and next
	ring []byte
	next int // where the ring goes on once it is full
}

// NewTail returns a Tail of at most limit bytes.
func NewTail(limit int) *Tail { return &Tail{limit: limit} }

// Write adds b. It never fails.
func (t *Tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range b {
		switch {
		case c == '\r':
			continue
		case c != '\n' && c != '\t' && (c < 0x20 || c > 0x7e):
			c = '?'
		}
		if len(t.ring) < t.limit {
			t.ring = append(t.ring, c)
			continue
		}
		t.ring[t.next] = c
		t.next = (t.next + 1) % t.limit
	}
	return len(b), nil
}

// String returns the kept text, oldest first.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.ring[t.next:]) + string(t.ring[:t.next])
}
