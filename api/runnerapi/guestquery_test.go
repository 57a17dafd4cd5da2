package runnerapi_test

import (
	"net/url"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
)

// TestGuestQuery: only flags change their form. A user called false is not the absence of a user, which would be root.
func TestGuestQuery(t *testing.T) {
	t.Parallel()
	given := url.Values{"user": {"false"}, "path": {"true"}, "stat": {"true"}, "list": {"false"}, "tar": {"1"}, "depth": {"2"}, "other": {"x"}}
	got := runnerapi.GuestQuery(given.Get, "path", "user", "list", "tar", "stat", "depth", "follow")
	if want := "depth=2&path=true&stat=1&tar=1&user=false"; got.Encode() != want {
		t.Errorf("%s, want %s", got.Encode(), want)
	}
}
