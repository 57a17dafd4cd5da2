package lazy

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/pager"
)

// TestWhoWaits: a machine waits if a thread of its VMM does, or the kernel for somebody; not because others do.
func TestWhoWaits(t *testing.T) {
	t.Parallel()
	const kernel, other = 2, 1 // kthreadd, init
	since := time.Now().Add(-time.Millisecond)
	own := pager.Waiter{Thread: os.Getpid(), Since: since}
	machine := Machine{ID: "sb_1", Pager: "one", Base: "base_2", Root: "key"}
	elsewhere := machine
	elsewhere.Pager = "" // it has everything from complete files
	for _, c := range []struct {
		name    string
		image   string
		waiters []pager.Waiter
		machine Machine
		want    bool
	}{
		{"its own", RootID("key"), []pager.Waiter{{Thread: other, Since: since}, own}, machine, true},
		{"its own, in its memory", "base_2", []pager.Waiter{own}, machine, true},
		{"the kernel's", RootID("key"), []pager.Waiter{{Thread: kernel, Since: since}}, machine, true},
		{"another's", RootID("key"), []pager.Waiter{{Thread: other, Since: since}}, machine, false},
		{"another image", "base_1", []pager.Waiter{own}, machine, false},
		{"no pager", RootID("key"), []pager.Waiter{own}, elsewhere, false},
	} {
		var w Waits
		got, why := w.Since(Awaited{c.image: {Waiters: c.waiters}}, c.machine, os.Getpid())
		if got.IsZero() == c.want || (why != nil) != c.want {
			t.Errorf("%s: %v, %+v", c.name, got, why)
		}
	}
}

// TestStallProblem: a machine that waits for the host's disk is not said to wait for the store.
func TestStallProblem(t *testing.T) {
	t.Parallel()
	for code, cause := range map[core.Code]*runnerapi.Problem{
		core.CodeStoreUnavailable: nil,
		core.CodeStoreAuth:        {Category: core.Unavailable, Code: core.CodeStoreAuth, Message: "the store refuses the credentials"},
		core.CodeDiskFull:         {Category: core.Exhausted, Code: core.CodeDiskFull, Message: "the runner's disk is full"},
		core.CodeInternal:         {Category: core.Internal, Code: core.CodeInternal, Message: "the runner's disk is failing"},
	} {
		want := code
		if code == core.CodeStoreAuth {
			want = core.CodeStoreUnavailable
		}
		if got := stallProblem("sb_1", time.Now(), "pack-1", cause); got.Code != want || cause != nil && !strings.Contains(got.Message, cause.Message) {
			t.Errorf("%s: %+v", code, got)
		}
	}
}
