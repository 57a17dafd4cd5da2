// Package line is the program that the guests of package vmmtest run, on a real machine and on a fake one: a line
// protocol over the agent's channel, and state that lives in one stretch of memory, so that a copy of the memory is a
// copy of the program.
//
// Each request is a line of words, and so is each answer:
//
//	hi WORD         hi WORD: says which answers are to requests of this connection
//	inc             adds one to the count and answers it
//	count           the count
//	ticks           how often the clock has ticked
//	uptime          CLOCK_MONOTONIC in milliseconds
//	fill N          makes the blob N MiB longer and answers its length in bytes
//	sum             a checksum of the blob
//	read I OFFSET   eight bytes of disk I as a decimal number
//	write I OFFSET N
//	size I          the size of disk I in bytes
//	say WORDS       prints a line on the console
//	print N         prints N bytes on the console, in the background
//	babble N        sends N bytes of rubbish on the channel, in the background
//	off             powers off
//	crash           ends the machine in the way of a kernel that panics
//
// A request that cannot be done gets the answer "error" and a reason. A request that is not understood gets no answer.
package line

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
	"time"
)

// Magic begins the program's memory.
const Magic = "coppice/vmmtest: this page counts"

// The places of the program's data in its memory. Everything is little-endian. The blob begins with the second page.
const (
	OffsetTicks  = 64
	OffsetCount  = 72
	offsetBlob   = 80 // its length
	offsetPrint  = 88 // bytes still to print
	offsetBabble = 96 // bytes still to send
	offsetNoise  = 104
	blobStart    = 4096
)

// BlockSize is the unit of disk access.
const BlockSize = 4096

// Disk is a disk of the machine.
type Disk interface {
	// ReadBlock and WriteBlock move one block, past any cache of the guest.
	ReadBlock(b *[BlockSize]byte, number int64) error
	WriteBlock(b *[BlockSize]byte, number int64) error
	Size() (int64, error)
}

// Program is the guest program. Its methods are called one at a time.
type Program struct {
	Memory  []byte // all its state; zeros at first
	Disks   []Disk
	Console func(b []byte)
	Channel func(b []byte) // what babble writes to
	Off     func(crash bool)
	Uptime  func() time.Duration // CLOCK_MONOTONIC
}

// Start marks the memory. If the memory is marked already, the program continues.
func (p *Program) Start() { copy(p.Memory, Magic) }

func (p *Program) get(at int) uint64    { return binary.LittleEndian.Uint64(p.Memory[at:]) }
func (p *Program) set(at int, v uint64) { binary.LittleEndian.PutUint64(p.Memory[at:], v) }

// Tick advances the clock.
func (p *Program) Tick() { p.set(OffsetTicks, p.get(OffsetTicks)+1) }

// Background does a piece of the background work, and reports whether there was any.
func (p *Program) Background() bool {
	return p.work(offsetPrint, p.Console) || p.work(offsetBabble, p.Channel)
}

func (p *Program) work(at int, out func([]byte)) bool {
	left := p.get(at)
	if left == 0 {
		return false
	}
	b := make([]byte, min(left, 1024))
	noise := p.get(offsetNoise)
	for i := range b {
		noise = noise*6364136223846793005 + 1442695040888963407
		b[i] = byte(noise >> 56) // escapes, line feeds, NULs and all
	}
	p.set(offsetNoise, noise)
	p.set(at, left-uint64(len(b)))
	out(b)
	return true
}

// errNotUnderstood is for requests that are not answered.
var errNotUnderstood = errors.New("not understood")

// Do executes one request and returns the answer, without a line feed. ok is false if no answer must be sent.
func (p *Program) Do(request string) (answer string, ok bool) {
	words := strings.Fields(request)
	if len(words) == 0 {
		return "", false
	}
	answer, err := p.do(words[0], words[1:])
	switch {
	case errors.Is(err, errNotUnderstood):
		return "", false
	case err != nil:
		return "error " + err.Error(), true
	}
	return answer, true
}

func (p *Program) do(verb string, words []string) (string, error) {
	switch verb {
	case "hi":
		return "hi " + strings.Join(words, " "), nil
	case "say":
		p.Console([]byte(strings.Join(words, " ") + "\n"))
		return "ok", nil
	case "off", "crash":
		p.Off(verb == "crash")
		return "ok", nil
	}
	var n [3]int64
	if len(words) > len(n) {
		return "", errNotUnderstood
	}
	for i, w := range words {
		var err error
		if n[i], err = strconv.ParseInt(w, 10, 64); err != nil || n[i] < 0 {
			return "", errNotUnderstood
		}
	}
	switch verb {
	case "inc":
		p.set(OffsetCount, p.get(OffsetCount)+1)
		return strconv.FormatUint(p.get(OffsetCount), 10), nil
	case "count":
		return strconv.FormatUint(p.get(OffsetCount), 10), nil
	case "uptime":
		return strconv.FormatInt(p.Uptime().Milliseconds(), 10), nil
	case "ticks":
		return strconv.FormatUint(p.get(OffsetTicks), 10), nil
	case "fill":
		return p.fill(n[0])
	case "sum":
		return strconv.FormatUint(uint64(crc32.ChecksumIEEE(p.Memory[blobStart:blobStart+p.get(offsetBlob)])), 10), nil
	case "print":
		p.set(offsetPrint, uint64(n[0]))
		return "ok", nil
	case "babble":
		p.set(offsetBabble, uint64(n[0]))
		return "ok", nil
	case "read", "write", "size":
		return p.disk(verb, n[0], n[1], n[2])
	}
	return "", errNotUnderstood
}

func (p *Program) fill(mib int64) (string, error) {
	blob := p.Memory[blobStart:]
	have := p.get(offsetBlob)
	want := have + uint64(mib)<<20
	if want > uint64(len(blob)) {
		return "", fmt.Errorf("no room for %d bytes", want)
	}
	for at := have; at < want; at += 512 { // eight places in each page
		binary.LittleEndian.PutUint64(blob[at:], at^p.get(OffsetCount)<<40)
	}
	p.set(offsetBlob, want)
	return strconv.FormatUint(want, 10), nil
}

func (p *Program) disk(verb string, i, offset, value int64) (string, error) {
	if i >= int64(len(p.Disks)) {
		return "", fmt.Errorf("no disk %d", i)
	}
	d := p.Disks[i]
	if verb == "size" {
		n, err := d.Size()
		return strconv.FormatInt(n, 10), err
	}
	number, in := offset/BlockSize, offset%BlockSize
	if in > BlockSize-8 {
		return "", errors.New("across two blocks")
	}
	var b [BlockSize]byte
	if err := d.ReadBlock(&b, number); err != nil {
		return "", err
	}
	if verb == "read" {
		return strconv.FormatUint(binary.LittleEndian.Uint64(b[in:]), 10), nil
	}
	binary.LittleEndian.PutUint64(b[in:], uint64(value))
	return "ok", d.WriteBlock(&b, number)
}
