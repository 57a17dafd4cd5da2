// Package confinetest lets tests that do not run as root use confined helpers. It links package
// testing, so no shipped program can link it.
package confinetest

import (
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/confine/internal/mode"
)

// AllowWithoutRoot must be called in TestMain. It lets a user other than root start helpers, with the limits, the
// seccomp filter and the empty environment, but without namespaces and without their own user. For root it changes
// nothing.
func AllowWithoutRoot(_ *testing.M) { mode.WithoutRoot.Store(os.Geteuid() != 0) }
