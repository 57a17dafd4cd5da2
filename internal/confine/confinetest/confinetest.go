// Package confinetest lets tests that do not run as root use confined helpers. It links package
// testing, so no shipped program can link it.
package confinetest

import (
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/confine/internal/mode"
)

// AllowWithoutRoot is called in TestMain. Helpers then also start for a user other than root: with the limits, the seccomp filter
// and the empty environment, but without namespaces and without a user of their own. It changes nothing for root.
func AllowWithoutRoot(_ *testing.M) { mode.WithoutRoot.Store(os.Geteuid() != 0) }
