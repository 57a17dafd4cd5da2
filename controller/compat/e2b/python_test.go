//go:build compat

package e2b_test

import (
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testpython"
)

// TestPythonClient runs the unmodified Python package against the layer, with a runner without machines. `make test-compat` makes the
// interpreter's environment.
func TestPythonClient(t *testing.T) {
	w := newWorld(t)
	testpython.Run(t, "e2b", 32, "E2B_API_KEY="+firstKey, "E2B_API_URL="+w.url, "E2B_SANDBOX_URL="+w.url)
}
