package tarcopy

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/coppice-dev/coppice/controller/builds/plan"
	"github.com/coppice-dev/coppice/core"
)

// TestUnpackedIsBounded: a context that is too large without its compression is refused when the bound is reached, and not at its end.
func TestUnpackedIsBounded(t *testing.T) {
	t.Parallel()
	head := new(bytes.Buffer)
	if err := tar.NewWriter(head).WriteHeader(&tar.Header{Name: "bomb", Typeflag: tar.TypeReg, Size: 1 << 40}); err != nil {
		t.Fatal(err)
	}
	endless := &zeros{}
	_, err := Select(plan.Copy{Sources: []string{"bomb"}, Dest: "/x"}, func() io.Reader { return io.MultiReader(head, endless) })
	if core.CodeOf(err) != core.CodeBodyTooLarge || endless.given > maxUnpacked+1<<20 {
		t.Errorf("%v after %d bytes", err, endless.given)
	}
	b := &bounded{from: bytes.NewReader(make([]byte, 11)), left: 10}
	if n, err := io.Copy(io.Discard, b); n != 10 || !errors.Is(err, errLarge) {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// zeros never ends.
type zeros struct{ given int64 }

func (z *zeros) Read(b []byte) (int, error) {
	z.given += int64(len(b))
	return len(b), nil
}
