package testprog_test

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testprog"
)

// TestWrite runs what it has just written while others start processes.
func TestWrite(t *testing.T) {
	t.Parallel()
	for range 4 {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "program")
			for range 50 {
				testprog.Write(t, path, []byte("#!/bin/sh\nexit 0\n"))
				if out, err := exec.CommandContext(t.Context(), path).CombinedOutput(); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
			}
		})
	}
}
