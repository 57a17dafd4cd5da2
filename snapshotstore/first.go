package snapshotstore

import "github.com/coppice-dev/coppice/snapshotstore/manifest"

// pageSet is pages of an image.
type pageSet map[int64]bool

// pagesOf are the whole pages that ranges have a part in.
func pagesOf(ranges []Range, size int64) pageSet {
	set := make(pageSet)
	for from, n := range chunks(ranges, size) {
		for at := from; at < from+n; at += manifest.PageSize {
			set[at/manifest.PageSize] = true
		}
	}
	return set
}

// common are the parts of one list of ranges that another has, too. Both are sorted.
func common(a, b []Range) (out []Range) {
	for len(a) > 0 && len(b) > 0 {
		from, to := max(a[0].Offset, b[0].Offset), min(a[0].Offset+a[0].Length, b[0].Offset+b[0].Length)
		if from < to {
			out = append(out, Range{from, to - from})
		}
		if a[0].Offset+a[0].Length < b[0].Offset+b[0].Length {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}
