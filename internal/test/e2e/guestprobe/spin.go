//go:build linux

package main

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

var order = binary.NativeEndian

// stream is what spin and draw print: numbers, and when they were drawn.
type stream struct {
	// Count is how often the loop had begun when this was written.
	Count uint64 `json:"count"`
	// Thaw is the turn of the loop that first saw a new generation file; 0 if there was none. What turn Thaw-1 drew may
	// be from before the freeze or from after the thaw: the process may have been frozen anywhere in that turn.
	Thaw uint64 `json:"thaw"`
	// First is the turn that drew Values[0].
	First  uint64   `json:"first"`
	TimeNS []int64  `json:"time_ns"` // CLOCK_MONOTONIC right after each draw
	Values []uint64 `json:"values"`
}

// The header of spin's memory: a marker that stands nowhere else in the guest, then the number of the turn.
const (
	headerBytes = 4096
	counterAt   = 32
	entryBytes  = 16
	generation  = "generation"
	runDir      = "/run/coppice"
)

// spin draws 8 bytes of getrandom after 8 bytes of getrandom, and keeps each with its time in memory that was mapped for it:
// room turns, then it stops. Each turn begins by counting and by looking whether the generation file was replaced. WANT turns
// after it saw that it writes what it drew since to OUT and ends.
//
// The memory begins with the complement of NONCE (64 hex digits), so that the page can be found in a copy of the guest's
// memory, where NONCE itself may stand many times, and the count at the very moment of the capture be read. On SIGUSR1
// WANT turns from the one on whose number stands in OUT.from are written to OUT, as soon as they are made, and it ends, too.
func spin(args []string, _ io.Writer) error {
	nonce, err := hex.DecodeString(args[0])
	if err != nil || len(nonce) != counterAt {
		return errUsage
	}
	n, err := numbers(args[1], args[2])
	if err != nil {
		return err
	}
	room, want, out := uint64(n[0]), uint64(n[1]), args[3]
	mem, err := unix.Mmap(-1, 0, headerBytes+n[0]*entryBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return fmt.Errorf("map memory: %w", err)
	}
	for i, b := range nonce {
		mem[i] = ^b
	}
	counter := (*uint64)(unsafe.Pointer(&mem[counterAt])) // one aligned word of a mapping
	w, err := watch(runDir, unix.IN_MOVED_TO, unix.IN_NONBLOCK)
	if err != nil {
		return err
	}
	var asked atomic.Bool
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		for range signals {
			asked.Store(true)
		}
	}()
	if err := publish(out+".pid", os.Getpid()); err != nil {
		return err
	}
	var thaw, first uint64
	var value [8]byte
	for i := uint64(1); i <= room; i++ {
		atomic.StoreUint64(counter, i)
		names, err := w.names()
		if err != nil {
			return err
		}
		for _, name := range names {
			if name == generation && thaw == 0 {
				thaw = i
			}
		}
		if _, err := unix.Getrandom(value[:], 0); err != nil {
			return err
		}
		entry := mem[headerBytes+(i-1)*entryBytes:][:entryBytes]
		order.PutUint64(entry, uint64(monotonic())) // time since boot
		copy(entry[8:], value[:])
		if asked.Swap(false) {
			if first, err = turnIn(out + ".from"); err != nil {
				return err
			}
		}
		switch {
		case thaw != 0 && i == thaw+want:
			return publish(out, collect(mem, i, thaw, thaw-2, i))
		case first != 0 && i >= first+want+2:
			return publish(out, collect(mem, i, thaw, first-1, first+want+1))
		}
	}
	return fmt.Errorf("no room for more than %d turns", room)
}

func turnIn(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	n, err := numbers(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, err
	}
	return uint64(max(n[0], 1)), nil // positive
}

// collect copies the turns from+1 to to.
func collect(mem []byte, count, thaw, from, to uint64) stream {
	s := stream{Count: count, Thaw: thaw, First: from + 1}
	for i := from; i < to; i++ {
		entry := mem[headerBytes+i*entryBytes:][:entryBytes]
		s.TimeNS = append(s.TimeNS, int64(order.Uint64(entry))) // time since boot
		s.Values = append(s.Values, order.Uint64(entry[8:]))
	}
	return s
}

// draw prints what getrandom gives to a process that has just begun.
func draw(args []string, out io.Writer) error {
	n, err := numbers(args[0])
	if err != nil {
		return err
	}
	s := stream{Count: uint64(n[0]), First: 1}
	var value [8]byte
	for range n[0] {
		if _, err := unix.Getrandom(value[:], 0); err != nil {
			return err
		}
		s.TimeNS = append(s.TimeNS, int64(monotonic()))
		s.Values = append(s.Values, order.Uint64(value[:]))
	}
	return json.NewEncoder(out).Encode(s)
}
