//go:build !linux

// Command coppice-guest is the program inside a guest, which is always Linux.
package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "coppice-guest runs on Linux only")
	os.Exit(2)
}
