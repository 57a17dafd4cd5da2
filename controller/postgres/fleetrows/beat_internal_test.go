package fleetrows

import (
	"strconv"
	"testing"

	"github.com/coppice-dev/coppice/controller/fleet"
)

func TestMaxRemoved(t *testing.T) {
	t.Parallel()
	if want := strconv.Itoa(fleet.MaxTokens); maxRemoved != want {
		t.Errorf("an answer to a heartbeat names at most %s removed runners, but %s can have joined", maxRemoved, want)
	}
}
