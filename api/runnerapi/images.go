package runnerapi

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
)

// SumImages is the checksum of a list of images, whatever its order. A runner says it in its heartbeats, so that a controller asks for
// the list only when it has changed.
func SumImages(list []Image) string {
	sorted := slices.SortedFunc(slices.Values(list), func(a, b Image) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Digest, b.Digest), a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.SizeBytes, b.SizeBytes))
	})
	h := sha256.New()
	for _, i := range sorted {
		fmt.Fprintf(h, "%q %s %d %d\n", i.Name, i.Digest, i.SizeBytes, i.CreatedAt.UnixNano())
		if i.Unlisted {
			fmt.Fprintln(h, "unlisted")
		}
		for _, r := range i.References {
			fmt.Fprintf(h, "%q\n", r)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}
