package core_test

import (
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestChanges: a flow that was sent may have changed something, whatever the guest was told about it; a denied flow was
// not sent.
func TestChanges(t *testing.T) {
	t.Parallel()
	for _, o := range []core.Outcome{core.FlowAllowed, core.FlowDenied, core.FlowCut, core.FlowFailed} {
		for method, may := range map[string]bool{"GET": false, "HEAD": false, "OPTIONS": false, "POST": true, "PUT": true, "PATCH": true, "DELETE": true, "get": true, "": true} {
			if got, want := (core.Flow{Outcome: o, Method: method}).Changes(), may && o != core.FlowDenied; got != want {
				t.Errorf("%s %q changes something: %v", o, method, got)
			}
		}
	}
}
