package daemon

import (
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/runner/diffhelper"
)

// EnterConfined makes this process a confined helper if it was started as one, and then does not return. A program that has a runner
// or builds images calls it before anything else.
func EnterConfined() { confine.Enter(diffhelper.Task(), diffhelper.FilesTask(), build.ConfinedTask()) }
