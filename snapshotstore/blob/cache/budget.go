package cache

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// lockFile is locked by whoever accounts. It holds, in 8 bytes, at least as many bytes as the files have, but for what has been accounted
// and is being written: who dies after accounting makes it too many, until somebody counts.
const lockFile = ".lock"

// lockWait is for how long the lock is waited for. Another process may have been stopped while it has it.
const lockWait = 50 * time.Millisecond

// newAge is after what time a file that is being made was left by who has died.
const newAge = time.Minute

type account struct {
	mu   sync.Mutex // the lock file's, within this process
	file *os.File
}

func (a *account) open(root *os.Root) (err error) {
	a.file, err = root.OpenFile(lockFile, os.O_RDWR|os.O_CREATE, 0o600)
	return err
}

func (a *account) close() error {
	if a.file == nil {
		return nil
	}
	return a.file.Close()
}

// with does something with the lock. Not to get it is not to account.
func (a *account) with(do func() bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for wait := lockWait / 64; ; wait *= 2 {
		err := unix.Flock(int(a.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if wait > lockWait || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return false
		}
		<-time.After(wait)
	}
	defer func() { _ = unix.Flock(int(a.file.Fd()), unix.LOCK_UN) }()
	return do()
}

// read returns what is accounted; the most there can be where it is not known.
func (a *account) read() int64 {
	var b [8]byte
	if _, err := a.file.ReadAt(b[:], 0); err != nil {
		return math.MaxInt64
	}
	if n := int64(binary.LittleEndian.Uint64(b[:])); n >= 0 { //nolint:gosec // G115: others are below zero and refused
		return n
	}
	return math.MaxInt64
}

func (a *account) write(n int64) bool {
	_, err := a.file.WriteAt(binary.LittleEndian.AppendUint64(nil, uint64(n)), 0) //nolint:gosec // G115: sizes are not below zero
	return err == nil
}

// Used is about how many bytes of the disk are taken.
func (c *Cache) Used() int64 {
	if n := c.account.read(); n != math.MaxInt64 {
		return n
	}
	return 0
}

// reserve accounts n bytes that are about to be written, and makes room for them. Without it nothing may be written.
func (c *Cache) reserve(n int64) bool {
	n += c.block // for what the file system keeps with it
	ok := c.account.with(func() bool {
		used := c.account.read()
		if used > c.cfg.Budget-n || c.room() < n {
			used = c.evict(n)
		}
		return used <= c.cfg.Budget-n && c.account.write(used+n)
	})
	if !ok {
		c.count.refused.Add(1)
	}
	return ok
}

// trim counts anew, and gives up what the budget has no room for.
func (c *Cache) trim() {
	c.account.with(func() bool { return c.account.write(c.evict(0)) })
}

// giveWayEvery is how often others are looked after. In that time they must not take all of Spare.
const giveWayEvery = time.Second

// Run gives way to others until ctx ends: when they take of what is to be left free of the file system, as much is given up.
func (c *Cache) Run(ctx context.Context) {
	tick := time.NewTicker(giveWayEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if c.room() < 0 && c.Used() > 0 {
			c.trim()
		}
	}
}

// room is what may be taken of the file system.
func (c *Cache) room() int64 {
	var fs unix.Statfs_t
	if unix.Fstatfs(int(c.account.file.Fd()), &fs) != nil {
		return 0
	}
	return int64(fs.Bavail)*fs.Bsize - c.cfg.Spare //nolint:gosec // G115: sizes of disks are below 2^63
}

// evict removes what was used longest ago until there is room for n bytes and a sixteenth of the budget, and returns what is left. It
// returns the most there can be where there is no room all the same.
func (c *Cache) evict(n int64) int64 {
	type kept struct {
		name  string
		bytes int64
		used  time.Time
	}
	dir, err := c.root.Open(".")
	if err != nil {
		return math.MaxInt64
	}
	entries, err := dir.ReadDir(-1)
	_ = dir.Close()
	if err != nil {
		return math.MaxInt64
	}
	var all []kept
	var total int64
	for _, e := range entries {
		info, err := e.Info()
		if err != nil { // gone
			continue
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok || e.Name() == lockFile {
			continue
		}
		if isNew(e.Name()) {
			if time.Since(info.ModTime()) > newAge {
				_ = c.root.Remove(e.Name())
			}
			continue
		}
		all = append(all, kept{e.Name(), st.Blocks * 512, info.ModTime()})
		total += st.Blocks * 512
	}
	goal := total
	if total > c.cfg.Budget-n {
		goal = c.cfg.Budget - n - c.cfg.Budget/16
	}
	short := n - c.room()
	if short > 0 {
		goal = min(goal, total-short)
	}
	slices.SortFunc(all, func(a, b kept) int { return cmp.Or(a.used.Compare(b.used), strings.Compare(a.name, b.name)) })
	for _, k := range all {
		if total <= goal {
			break
		}
		if c.root.Remove(k.name) == nil {
			c.count.evictions.Add(1)
		}
		total -= k.bytes
	}
	if n > 0 && short > 0 && c.room() < n {
		return math.MaxInt64
	}
	return total
}
