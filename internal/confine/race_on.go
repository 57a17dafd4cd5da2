//go:build race

package confine

// raceDetector reports whether this program has Go's race detector, which reserves terabytes of writable memory. Memory
// limits cannot work then. No shipped program has it.
const raceDetector = true
