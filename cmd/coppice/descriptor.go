package main

import (
	"io"
	"os"

	"golang.org/x/term"
)

// terminal returns the file descriptor of a stream that is a terminal.
func terminal(stream any) (int, bool) {
	f, ok := stream.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return 0, false
	}
	return int(f.Fd()), true
}

// forTerminal gives a writer for bytes of a guest, and a function that ends it: as they are into a pipe or if raw, shown on a
// terminal.
func forTerminal(w io.Writer, raw bool) (io.Writer, func() error) {
	if _, ok := terminal(w); !ok || raw {
		return w, func() error { return nil }
	}
	f := &foreignWriter{w: w}
	return f, f.Close
}
