package boundjson

import (
	"errors"
	"io"
	"sync"
)

// Budget bounds the bytes that all messages under way hold together. No owner may hold more than Share of Total, so that one
// tenant cannot use up what the others need. The first Free bytes of each message are not counted: they are no more than the
// connection costs anyway, and small answers come through however full the budget is.
type Budget struct {
	Total, Share, Free int

	// mu guards the fields below.
	mu     sync.Mutex
	used   int
	owners map[string]int
	full   int64
}

// ErrFull ends a message that finds no room.
var ErrFull = errors.New("too many bytes of answers are being read")

// Open starts the account of one message. Close it.
func (b *Budget) Open(owner string) *Account { return &Account{budget: b, owner: owner, free: b.Free} }

// Used is how many bytes are held now. Full is how many messages found no room so far.
func (b *Budget) Used() (used int, full int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used, b.full
}

// Account is what one message holds. It is not safe for concurrent use.
type Account struct {
	budget     *Budget
	owner      string
	free, held int
}

// Reserve takes room for a message of n bytes before any of them is read, and reports whether there is that much. Grow then finds it.
func (a *Account) Reserve(n int) bool {
	more := n - a.free
	if more <= 0 {
		return true
	}
	a.budget.mu.Lock()
	defer a.budget.mu.Unlock()
	if !a.take(more) {
		return false
	}
	a.free = n
	return true
}

// Grow takes room for n more bytes, or fails with ErrFull.
func (a *Account) Grow(n int) error {
	gift := min(a.free, n)
	a.free -= gift
	if n -= gift; n == 0 {
		return nil
	}
	b := a.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if !a.take(n) {
		b.full++
		return ErrFull
	}
	return nil
}

// take is called with the budget's mutex held.
func (a *Account) take(n int) bool {
	b := a.budget
	if b.used+n > b.Total || b.owners[a.owner]+n > b.Share {
		return false
	}
	if b.owners == nil {
		b.owners = map[string]int{}
	}
	b.used, a.held = b.used+n, a.held+n
	b.owners[a.owner] += n
	return true
}

// Close gives the room back.
func (a *Account) Close() {
	if a.held == 0 {
		return
	}
	b := a.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= a.held
	if b.owners[a.owner] -= a.held; b.owners[a.owner] <= 0 {
		delete(b.owners, a.owner)
	}
	a.held = 0
}

// Charged reads from r and charges for each byte.
func Charged(r io.Reader, a Charger) io.Reader { return charged{r, a} }

type charged struct {
	r io.Reader
	a Charger
}

func (c charged) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if n > 0 {
		if full := c.a.Grow(n); full != nil {
			return 0, full
		}
	}
	return n, err
}
