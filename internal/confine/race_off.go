//go:build !race

package confine

// raceDetector says whether this program has Go's race detector, which reserves terabytes of writable memory. Limits of memory
// cannot hold then. No program that is shipped has it.
const raceDetector = false
