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

// lockFile is locked during accounting. It holds 8 bytes: a number of bytes that is at least the size of all files. It
// includes bytes that are accounted and still being written. If a process dies after accounting, the number is too
// large until somebody counts again.
const lockFile = ".lock"

// lockWait is the maximum time to wait for the lock. Another process may have been stopped while it held the lock.
const lockWait = 50 * time.Millisecond

// newAge is the age at which a file that is being made counts as left by a dead process.
const newAge = time.Minute

type account struct {
	mu   sync.Mutex // the same lock as the lock file's, within this process
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

// with calls do while it holds the lock. If it cannot get the lock, it returns false.
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

// read returns the accounted number of bytes, or math.MaxInt64 if it is unknown.
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

// Used returns approximately how many bytes of the disk the cache takes.
func (c *Cache) Used() int64 {
	if n := c.account.read(); n != math.MaxInt64 {
		return n
	}
	return 0
}

// reserve accounts n bytes that are about to be written, and makes room for them. If it returns false, they must not be
// written.
func (c *Cache) reserve(n int64) bool {
	n += c.block // for the file system's own data about the file
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

// trim counts again, and evicts files beyond the budget.
func (c *Cache) trim() {
	c.account.with(func() bool { return c.account.write(c.evict(0)) })
}

// giveWayEvery is the time between two looks at the free room of the file system. In that time, others must not take
// all of Spare.
const giveWayEvery = time.Second

// Run gives way to others until ctx ends: when less than Spare is free in the file system, the cache evicts files.
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

// room returns how many bytes of the file system the cache may still take.
func (c *Cache) room() int64 {
	var fs unix.Statfs_t
	if unix.Fstatfs(int(c.account.file.Fd()), &fs) != nil {
		return 0
	}
	return int64(fs.Bavail)*fs.Bsize - c.cfg.Spare //nolint:gosec // G115: sizes of disks are below 2^63
}

// evict removes the least recently used files until there is room for n bytes and a sixteenth of the budget, and
// returns the remaining size. It returns math.MaxInt64 if there is still no room.
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
		if err != nil { // removed meanwhile
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
