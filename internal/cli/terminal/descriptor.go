package terminal

import (
	"io"
	"os"

	"golang.org/x/term"

	"github.com/coppice-dev/coppice/internal/foreign"
)

// Descriptor returns the file descriptor of a stream that is a terminal.
func Descriptor(stream any) (int, bool) {
	f, ok := stream.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return 0, false
	}
	return int(f.Fd()), true
}

// ForGuest gives a writer for bytes of a guest, and a function that ends it: as they are into a pipe or if raw, shown on a
// terminal.
func ForGuest(w io.Writer, raw bool) (io.Writer, func() error) {
	if _, ok := Descriptor(w); !ok || raw {
		return w, func() error { return nil }
	}
	f := foreign.NewWriter(w)
	return f, f.Close
}
