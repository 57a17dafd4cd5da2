package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Limits bound one VMM. A zero field bounds nothing.
type Limits struct {
	MemoryBytes int64 // of its own; the base's shared pages are charged to the group that touched them first. None of it is swapped out
	Processes   int   // threads count
	Weight      int   // of processor time and of the disk's, in relation to other VMMs when there is not enough for all; 100 is usual
	CPUPercent  int   // of one processor, at most; 200 is two
	IOBytes     int64 // a second, read and written each, on the device of LimitDevice
	IOPS        int   // operations a second, likewise
}

// The kernel's bounds of a weight.
const minWeight, maxWeight = 1, 10_000

// cpuPeriod is over what time a bound of processor time is kept, in microseconds: the kernel's default.
const cpuPeriod = 100_000

// limit writes the limits of the group in dir, as far as there are controllers for them.
func (t *Tree) limit(dir string, l Limits) error {
	var errs []error
	set := func(controller string, wanted bool, file, value string) {
		if wanted && slices.Contains(t.controllers, controller) {
			errs = append(errs, write(dir, file, value))
		}
	}
	set("memory", l.MemoryBytes > 0, "memory.max", strconv.FormatInt(l.MemoryBytes, 10))
	if l.MemoryBytes > 0 && slices.Contains(t.controllers, "memory") {
		errs = append(errs, optional(write(dir, "memory.swap.max", "0"))) // absent where the kernel has no swap
	}
	set("pids", l.Processes > 0, "pids.max", strconv.Itoa(l.Processes))
	weight := strconv.Itoa(min(max(l.Weight, minWeight), maxWeight))
	set("cpu", l.Weight > 0, "cpu.weight", weight)
	set("cpu", l.CPUPercent > 0, "cpu.max", fmt.Sprintf("%d %d", l.CPUPercent*cpuPeriod/100, cpuPeriod))
	if l.Weight > 0 && slices.Contains(t.controllers, "io") {
		errs = append(errs, optional(write(dir, "io.weight", "default "+weight))) // absent where no scheduler knows weights
	}
	if t.device != "" && (l.IOBytes > 0 || l.IOPS > 0) {
		set("io", true, "io.max", t.device+ioMax(l))
	}
	return errors.Join(errs...)
}

// ioMax is the value of io.max behind the device.
func ioMax(l Limits) string {
	var b strings.Builder
	if l.IOBytes > 0 {
		fmt.Fprintf(&b, " rbps=%d wbps=%[1]d", l.IOBytes)
	}
	if l.IOPS > 0 {
		fmt.Fprintf(&b, " riops=%d wiops=%[1]d", l.IOPS)
	}
	return b.String()
}

// optional drops the error of a file that this kernel does not have.
func optional(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Missing names the controllers that should bound a VMM and cannot here; all of them for a nil Tree.
func (t *Tree) Missing() []string {
	var missing []string
	for _, c := range wanted {
		if !slices.Contains(t.Controllers(), c) {
			missing = append(missing, c)
		}
	}
	return missing
}

// LimitDevice says which device bounds of IO are for: that of the file system that holds path. A nil Tree has none. The kernel bounds whole
// disks only, so of a partition it is the disk.
func (t *Tree) LimitDevice(path string) error {
	if t == nil {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	number := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	dir, err := filepath.EvalSymlinks(filepath.Join("/sys/dev/block", number))
	if err != nil {
		return fmt.Errorf("the file system of %s is on no block device whose IO the kernel can bound: %w", path, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "partition")); err == nil {
		dir = filepath.Dir(dir)
	}
	disk, err := os.ReadFile(filepath.Join(dir, "dev"))
	if err != nil {
		return fmt.Errorf("find the disk of %s: %w", path, err)
	}
	t.device = strings.TrimSpace(string(disk))
	return nil
}
