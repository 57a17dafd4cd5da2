package slots

import (
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestSlots: the lowest free number is given out, none twice, and a host that has none left says so.
func TestSlots(t *testing.T) {
	t.Parallel()
	s := New(3)
	if !s.Reserve(2) || s.Reserve(2) || s.Reserve(0) || s.Reserve(4) {
		t.Error("a number was reserved that is taken or out of range, or one was not that is free")
	}
	for _, want := range []int{1, 3} {
		if n, err := s.Take(); n != want || err != nil {
			t.Errorf("got %d, %v, want %d", n, err, want)
		}
	}
	if free, all := s.Free(); free != 0 || all != 3 {
		t.Errorf("%d of %d are free", free, all)
	}
	if _, err := s.Take(); core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("a full host: %v", err)
	}
	s.Give(2)
	if n, err := s.Take(); n != 2 || err != nil {
		t.Errorf("got %d, %v after a return", n, err)
	}
}
