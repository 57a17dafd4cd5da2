package confine

import (
	"bytes"
	"testing"
)

// FuzzFrame reads what a compromised helper could write. No message exceeds its bound.
func FuzzFrame(f *testing.F) {
	f.Add([]byte("a\x02\x00\x00\x00{}d\x00\x00\x00\x00"))
	f.Add([]byte("a\xff\xff\xff\xff"))
	f.Add([]byte("f\x02\x00\x00\x00{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 100
		r := bytes.NewReader(b)
		for {
			kind, content, err := readFrame(r, limit)
			if err != nil {
				return
			}
			if bound := map[byte]int{frameFailed: maxFailure, frameReady: 0, frameDone: 0}; len(content) > limit && len(content) > bound[kind] {
				t.Fatalf("a message %q of %d bytes", kind, len(content))
			}
			if kind == frameFailed {
				if e := taskError(content); len(e.Code) > 64 || len(e.Message) > 1024 {
					t.Fatalf("%d bytes of code, %d of message", len(e.Code), len(e.Message))
				}
			}
		}
	})
}
