package guest_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// blocks is how many blocks of guest code QEMU has translated so far. Unlike any time, it does not depend on the load of the
// machine; translating one takes about 10 us.
func (v *vm) blocks() int {
	v.t.Helper()
	var text string
	if err := json.Unmarshal(v.ask("human-monitor-command", map[string]any{"command-line": "info jit"}), &text); err != nil {
		v.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(text, "TB count")
	var n int
	if _, err := fmt.Sscan(rest, &n); err != nil {
		v.t.Fatalf("%v in %q", err, text)
	}
	return n
}

// TestVMCost says what a sealed fork executes beyond an unsealed one, up to its first command. Each clone begins with nothing
// translated, so that distinct code is what costs.
func TestVMCost(t *testing.T) {
	const unsealed = "unsealed"
	parent := startVM(t, vmOptions{})
	c := parent.dial()
	for range 3 {
		sh(t, c, "true")
	}
	thawed := parent.save()
	reseals := map[string]int{} // blocks of a reseal
	measure := func(t *testing.T, what, state, authority string) int {
		t.Helper()
		v := startVM(t, vmOptions{incoming: state, overlay: parent.overlay})
		defer func() {
			_ = v.cmd.Process.Kill()
			<-v.done
		}()
		a, total, begin := v.blocks(), 0, time.Now()
		lap := func(part string) {
			d := time.Since(begin)
			b := v.blocks()
			t.Logf("%-10s %6d blocks %6.1f ms", part, b-a, float64(d.Microseconds())/1000)
			if part == "reseal" {
				reseals[what] = b - a
			}
			a, begin, total = b, time.Now(), total+b-a
		}
		t.Log(what)
		c := v.dial()
		lap("dial")
		if what != unsealed {
			want := wantReseal(2, "gen-2")
			want.CA = authority
			reseal(t, c, want)
			lap("reseal")
			if _, err := c.Release(t.Context(), guestapi.ReleaseRequest{Generation: want.Identity.Generation}); err != nil {
				t.Fatal(err)
			}
			lap("release")
		}
		sh(t, c, "true")
		lap("exec")
		t.Logf("%-10s %6d blocks", "in all", total)
		sh(t, c, "true")
		lap("again")
		return total
	}
	bare := measure(t, unsealed, thawed, "")
	parent.ask("cont", nil)
	quiesce(t, c, "ckpt_1")
	captured := parent.save()
	sealed := measure(t, "sealed", captured, "")
	t.Logf("a sealed fork executes %.2f x what an unsealed one does", float64(sealed)/float64(bare))
	measure(t, "sealed, with an authority", captured, testCA)

	// A fork of a fork: the parent has been resealed itself.
	parent.ask("cont", nil)
	reseal(t, c, wantReseal(3, "gen-3"))
	if _, err := c.Release(t.Context(), guestapi.ReleaseRequest{Generation: "gen-3"}); err != nil {
		t.Fatal(err)
	}
	quiesce(t, c, "ckpt_2")
	measure(t, "sealed, with the parent's authority", parent.save(), testCA)
	if kept, none := reseals["sealed, with the parent's authority"], reseals["sealed"]; kept > none+none/10 {
		t.Errorf("a reseal with the parent's authority executes %d blocks, one without any %d", kept, none)
	}
}
