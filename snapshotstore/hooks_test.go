package snapshotstore

// MaxSeen and MaxExportHeader are bounds, for tests.
const (
	MaxSeen         = maxSeen
	MaxExportHeader = maxExportHeader
	MaxNodeBytes    = maxNodeBytes
)

// Remember sets how many frames a checker remembers, and returns the previous number.
func (c *Checker) Remember(n int) int {
	n, c.most = c.most, n
	return n
}

// Seen returns how many frames a checker remembers now.
func (c *Checker) Seen() int { return len(c.seen) }
