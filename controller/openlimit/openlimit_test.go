package openlimit_test

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller/openlimit"
)

func in48(r *rand.Rand, site uint16) netip.Addr {
	var b [16]byte
	copy(b[:], []byte{0x20, 0x01, 0x0d, 0xb8})
	binary.BigEndian.PutUint16(b[4:], site)
	binary.BigEndian.PutUint64(b[8:], r.Uint64())
	binary.BigEndian.PutUint16(b[6:], uint16(r.Uint32()))
	return netip.AddrFrom16(b)
}

// TestOnePrefixAgainstAll has the owner of a /48 ask from a million addresses.
func TestOnePrefixAgainstAll(t *testing.T) { //nolint:paralleltest // it measures the heap of the process
	now := time.Now()
	tree := openlimit.New(100, 500)
	r := rand.New(rand.NewPCG(1, 2))
	known, guesser := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("198.51.100.9")
	for range 500 {
		if _, wait := tree.Take(now, known); wait > 0 {
			t.Fatal("a burst is refused")
		}
	}
	for range 40 {
		tree.Failed(now, guesser)
	}
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	passed := 0
	for range 200_000 { // each with an entry of its own would be far above the bound of the heap
		a := in48(r, 7)
		if _, wait := tree.Take(now, a); wait == 0 {
			passed++
		}
		tree.Failed(now, a)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if passed > 16*500 {
		t.Errorf("%d requests of one /48 passed at once", passed)
	}
	if size := tree.Size(); size > 600 {
		t.Errorf("there are %d entries", size)
	}
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 4<<20 {
		t.Errorf("the heap grew by %d KiB", grown>>10)
	}
	if _, wait := tree.Take(now, known); wait == 0 {
		t.Error("the bucket of a busy address was forgotten")
	}
	if over := tree.Failed(now, guesser); over < 30 {
		t.Errorf("the failures of a guesser were forgotten: %d", over)
	}
	for _, a := range []string{"192.0.2.8", "2001:db8:8::1", "2a00::1"} {
		if _, wait := tree.Take(now, netip.MustParseAddr(a)); wait > 0 {
			t.Errorf("%s has to wait %s for what a stranger did", a, wait)
		}
		if over := tree.Failed(now, netip.MustParseAddr(a)); over > 0 {
			t.Errorf("%s is punished for what a stranger did", a)
		}
	}
	// Others of the attacker's own prefix come through again when the prefix has rested.
	if _, wait := tree.Take(now.Add(10*time.Second), in48(r, 7)); wait > 0 {
		t.Errorf("the /48 has to wait %s after it rested", wait)
	}
	tree.Sweep(now.Add(time.Hour))
	if size := tree.Size(); size != 0 {
		t.Errorf("%d entries are kept for ever", size)
	}
}

// TestManyPrefixes fills the whole tree: memory stays bounded, and those who were there before keep what they had.
func TestManyPrefixes(t *testing.T) { //nolint:paralleltest // it measures the heap of the process
	now := time.Now()
	tree := openlimit.New(100, 500)
	r := rand.New(rand.NewPCG(3, 4))
	known := netip.MustParseAddr("192.0.2.7")
	for range 500 {
		tree.Take(now, known)
	}
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 400_000 {
		var b [16]byte
		binary.BigEndian.PutUint64(b[:], r.Uint64())
		b[0] = 0x20
		tree.Take(now, netip.AddrFrom16(b))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if size := tree.Size(); size > openlimit.Most {
		t.Errorf("there are %d entries", size)
	}
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 64<<20 {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
	if _, wait := tree.Take(now, known); wait == 0 {
		t.Error("the bucket of a busy address was forgotten")
	}
	// When they rest, their entries make room.
	later := now.Add(2 * time.Minute)
	for i := range 3 {
		if _, wait := tree.Take(later, netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})); wait > 0 {
			t.Errorf("a newcomer has to wait %s", wait)
		}
	}
	if size := tree.Size(); size > 100 {
		t.Errorf("%d entries are left of those that rest", size)
	}
}

// TestLevels takes what addresses of one customer share.
func TestLevels(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, c := range []struct {
		a, b   string
		shared bool
	}{
		{"2001:db8:1:2:3::4", "2001:db8:1:2:9::9", true},
		{"10.0.0.1", "::ffff:10.0.0.1", true},
		{"fe80::1%eth0", "fe80::2", true},
		{"10.0.0.1", "10.0.0.2", false},
		{"2001:db8:1:2::1", "2001:db8:1:3::1", false},
	} {
		tree := openlimit.New(1, 2)
		tree.Take(now, netip.MustParseAddr(c.a))
		if left, wait := tree.Take(now, netip.MustParseAddr(c.b)); wait > 0 || (left.Remaining == 0) != c.shared {
			t.Errorf("%s after %s: %+v, %s", c.b, c.a, left, wait)
		}
	}
	tree := openlimit.New(1, 1)
	if _, wait := tree.Take(now, netip.Addr{}); wait > 0 {
		t.Error("a local request is refused")
	}
	if _, wait := tree.Take(now, netip.Addr{}); wait != time.Second {
		t.Errorf("the second local request waits %s", wait)
	}
}

// TestGiveBack takes what was given back, and no more than a bucket holds.
func TestGiveBack(t *testing.T) {
	t.Parallel()
	now, tree, a := time.Now(), openlimit.New(1, 3), netip.MustParseAddr("192.0.2.1")
	for range 10 {
		if _, wait := tree.Take(now, a); wait > 0 {
			t.Fatal("what was given back is missing")
		}
		tree.GiveBack(now, a)
	}
	tree.GiveBack(now, a)
	passed := 0
	for range 10 {
		if _, wait := tree.Take(now, a); wait == 0 {
			passed++
		}
	}
	if passed != 3 {
		t.Errorf("%d pass, want 3", passed)
	}
}
