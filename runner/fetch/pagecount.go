package fetch

import (
	"iter"
	"sync"

	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// pageCount counts each page of data that one step of a fetch writes, once. It takes one bit a page, and nothing for large holes. It is
// safe for concurrent use.
type pageCount struct {
	mu   sync.Mutex // guards left
	left map[int64]*pageBits
}

// pageBits has a bit for each page of a part of an image.
type pageBits [512]uint64

// bitsPages is how many pages a part has: 128 MiB.
const bitsPages = int64(len(pageBits{}) * 64)

func newPageCount() *pageCount { return &pageCount{left: make(map[int64]*pageBits)} }

// data yields runs, and notes the pages of those that are not zeros.
func (c *pageCount) data(runs iter.Seq[manifest.Run]) iter.Seq[manifest.Run] {
	return func(yield func(manifest.Run) bool) {
		for run := range runs {
			if run.Frame != nil {
				c.note(run)
			}
			if !yield(run) {
				return
			}
		}
	}
}

func (c *pageCount) note(run manifest.Run) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range int64(run.Count) {
		page := run.Page + i
		bits := c.left[page/bitsPages]
		if bits == nil {
			bits = new(pageBits)
			c.left[page/bitsPages] = bits
		}
		bits[page%bitsPages/64] |= 1 << (page % 64)
	}
}

// count returns how many of n bytes from a page are data that was not counted before.
func (c *pageCount) count(page int64, n int) (bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range int64((n + manifest.PageSize - 1) / manifest.PageSize) {
		at := page + i
		bits, mask := c.left[at/bitsPages], uint64(1)<<(at%64)
		if bits != nil && bits[at%bitsPages/64]&mask != 0 {
			bits[at%bitsPages/64] &^= mask
			bytes += manifest.PageSize
		}
	}
	return bytes
}
