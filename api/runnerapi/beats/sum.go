package beats

import (
	"crypto/sha256"
	"encoding/binary"
)

// Sum is the checksum of a set of ids: the exclusive or of the first 64 bits of each one's SHA-256. The database computes the same
// (coppice_id_sum). It finds mistakes; it does not keep out a runner that lies, which can harm only itself with it.
func Sum[T ~string](ids ...T) (sum int64) {
	for _, id := range ids {
		h := sha256.Sum256([]byte(id))
		sum ^= int64(binary.BigEndian.Uint64(h[:8])) //nolint:gosec // all 64 bits count, the first too
	}
	return sum
}
