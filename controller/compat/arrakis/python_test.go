//go:build compat

package arrakis_test

import (
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testpython"
)

// TestPythonClient runs the unmodified Python package against the layer, with a runner without machines. `make test-compat` makes the
// interpreter's environment.
func TestPythonClient(t *testing.T) {
	w := newWorld(t)
	testpython.Run(t, "py-arrakis", 15, "ARRAKIS_URL="+w.url)
}
