package prepared

// What must be left on a host. Machines are made only while there is clearly more than what makes them end, so that none is made and ended in
// turn.
const (
	makeMemory = 1 << 30   // bytes available besides a new machine: as much as a small guest writes
	keepMemory = 512 << 20 // with less, machines end
	// One in slotShare slots is left free, and at least one: a fork of another shape must not wait until a prepared machine is taken down.
	slotShare = 8
)

// Room is what a host has left.
type Room struct {
	Memory           int64 // bytes that are available
	Disk             int64 // bytes above the floor; 0 at the floor or below
	FreeSlots, Slots int
}

func (r Room) leave() int { return max(1, r.Slots/slotShare) }

// another reports whether there is room for one more machine.
func (r Room) another() bool {
	return r.Holds(0) && r.FreeSlots > r.leave()
}

// Holds reports whether there are memory and disk for a machine that needs more memory than usual.
func (r Room) Holds(bytes int64) bool { return r.Memory >= makeMemory+bytes && r.Disk > 0 }

// short reports whether machines must end.
func (r Room) short() bool {
	return r.Memory < keepMemory || r.Disk <= 0 || r.FreeSlots < r.leave()
}
