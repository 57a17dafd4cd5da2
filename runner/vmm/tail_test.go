package vmm_test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/runner/vmm"
)

func TestTail(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		limit  int
		writes []string
		want   string
	}{
		{8, nil, ""},
		{8, []string{"abc"}, "abc"},
		{8, []string{"abcdefgh"}, "abcdefgh"},
		{8, []string{"abcdefgh", "ij"}, "cdefghij"},
		{8, []string{"abcdefghijklmnopqrstuvwxyz"}, "stuvwxyz"},
		{8, []string{"a\r\nb\tc\x1b[31m"}, "b\tc?[31m"},
		{16, []string{"a\r\nb\tc\x00\xff\u00e9"}, "a\nb\tc????"},
	} {
		tail := vmm.NewTail(c.limit)
		for _, w := range c.writes {
			if n, err := tail.Write([]byte(w)); n != len(w) || err != nil {
				t.Errorf("a write of %d bytes: %d, %v", len(w), n, err)
			}
		}
		if got := tail.String(); got != c.want {
			t.Errorf("%q: got %q, want %q", c.writes, got, c.want)
		}
	}
}

// TestTailIsBounded writes without end, from several goroutines.
func TestTailIsBounded(t *testing.T) {
	t.Parallel()
	tail := vmm.NewTail(vmm.ConsoleBytes)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			b := bytes.Repeat(fmt.Appendf(nil, "%d", i), 4096)
			for range 500 {
				_, _ = tail.Write(b)
				if n := len(tail.String()); n > vmm.ConsoleBytes {
					t.Errorf("%d bytes are kept", n)
				}
			}
		})
	}
	wg.Wait()
	if n := len(tail.String()); n != vmm.ConsoleBytes {
		t.Errorf("%d bytes are kept in the end", n)
	}
}
