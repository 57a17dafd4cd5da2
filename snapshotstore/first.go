package snapshotstore

import "github.com/coppice-dev/coppice/snapshotstore/manifest"

// pageSet is a set of pages of an image.
type pageSet map[int64]bool

// pagesOf returns the pages that ranges overlap.
func pagesOf(ranges []Range, size int64) pageSet {
	set := make(pageSet)
	for from, n := range chunks(ranges, size) {
		for at := from; at < from+n; at += manifest.PageSize {
			set[at/manifest.PageSize] = true
		}
	}
	return set
}

// common returns the intersection of two sorted lists of ranges.
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
