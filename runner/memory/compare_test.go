package memory

import (
	"bytes"
	"os"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestChanged compares two machines in every combination of base and delta that has the same bytes.
func TestChanged(t *testing.T) {
	t.Parallel()
	const size = 4 << 20
	rng := newRand(t)
	s := newStore(t, false)
	zero := zeroBase(t, s, size)
	grown := func(from *Base, writes int) (*Base, *Delta, []byte) {
		r, m := mapPrivate(t, from.File(), size), newModel(content(t, from))
		randomWrites(rng, r, m, writes)
		return from, capture(t, r.Region), m.bytes
	}
	_, d, _ := grown(zero, 100)
	base := rebase(t, s, zero, d)
	type machine struct {
		images []Image
		bytes  []byte
	}
	file := func(b *Base) *os.File {
		f, err := s.OpenFile(b.ID)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	var machines []machine
	for _, writes := range []int{0, 1, 50, 300} {
		_, d, b := grown(base, writes)
		machines = append(machines, machine{[]Image{{file(base), d}, {file(rebase(t, s, base, d)), nil}}, b})
	}
	for i, a := range machines {
		for j, b := range machines {
			var want int64
			for at := 0; at < size; at += PageSize {
				if !bytes.Equal(a.bytes[at:at+PageSize], b.bytes[at:at+PageSize]) {
					want += PageSize
				}
			}
			for _, x := range a.images {
				for _, y := range b.images {
					got, err := Changed(t.Context(), x, y)
					if err != nil || got != want {
						t.Errorf("machines %d and %d differ in %d bytes, want %d (%v)", i, j, got, want, err)
					}
				}
			}
		}
	}
}

func TestChangedRefusesOtherSize(t *testing.T) {
	t.Parallel()
	s := newStore(t, false)
	a, b := Image{Base: zeroBase(t, s, 1<<20).File()}, Image{Base: zeroBase(t, s, 2<<20).File()}
	if _, err := Changed(t.Context(), a, b); core.CategoryOf(err) != core.Invalid {
		t.Errorf("got %v", err)
	}
	if _, err := s.OpenFile("base_absent"); core.CodeOf(err) != core.CodeCheckpointCorrupt {
		t.Errorf("got %v", err)
	}
}
