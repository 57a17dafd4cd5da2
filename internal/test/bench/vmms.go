package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
)

// vmmThreads is the minimum number of threads of a waiting VMM: QEMU has a main thread, RCU and a vCPU;
// cloud-hypervisor has one each for signals, requests and the machine.
const vmmThreads = 3

// process is a VMM as seen from the host.
type process struct {
	pid       int
	memoryMiB int  // 0 for a cloud-hypervisor that waits: it maps no RAM yet
	waits     bool // it is past its start: it has its monitor and waits for state, or has had it
}

// findVMMs lists the VMMs of a cluster.
func findVMMs(cluster string) ([]process, error) {
	entries, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	var out []process
	for _, path := range entries {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		args := strings.Split(string(b), "\x00")
		if !named(args, "coppice-"+cluster+"-") {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(path, "/")[2])
		if err != nil {
			return nil, err
		}
		p := process{pid: pid, memoryMiB: memoryOf(args), waits: threads(pid) >= vmmThreads}
		if p.memoryMiB == 0 {
			p.memoryMiB = mappedMiB(pid)
		}
		out = append(out, p)
	}
	return out, nil
}

// named finds the name of a machine: it is in an argument of QEMU, and in the first argument of cloud-hypervisor.
func named(args []string, prefix string) bool {
	if strings.HasPrefix(args[0], cloudhypervisor.Program+":"+prefix) {
		return true
	}
	for i, a := range args[:max(0, len(args)-1)] {
		if a == "-name" && strings.HasPrefix(args[i+1], prefix) {
			return true
		}
	}
	return false
}

func memoryOf(args []string) int {
	for i, a := range args[:max(0, len(args)-1)] {
		if a == "-m" {
			n, _ := strconv.Atoi(strings.TrimSuffix(args[i+1], "M"))
			return n
		}
	}
	return 0
}

// mappedMiB returns how much RAM a VMM maps whose arguments do not say it: its writable private mappings of a large
// file.
func mappedMiB(pid int) int {
	const least = 64 << 20 // no program is that big
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0 // it has ended
	}
	var sum int64
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 5 && f[1] == "rw-p" && mappingBytes(f[0]) >= least {
			sum += mappingBytes(f[0])
		}
	}
	return int(sum >> 20)
}

func threads(pid int) int {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return len(entries)
}

// cpuMS returns the CPU time of a process since its start, in milliseconds. Unlike the elapsed time, it hardly depends
// on the other load of the host.
func cpuMS(pid int) (float64, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(tasks) == 0 {
		return 0, errors.Join(err, fmt.Errorf("process %d does not say what CPU time it had", pid))
	}
	var sum float64
	for _, path := range tasks {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // a thread that has ended
		}
		var ns float64
		if _, err := fmt.Sscan(string(b), &ns); err != nil {
			return 0, err
		}
		sum += ns / 1e6
	}
	return sum, nil
}

// onlySandbox finds the only VMM of a cluster with a running guest; the others are waiting shells.
func onlySandbox(cluster string, not int) (process, error) {
	all, err := findVMMs(cluster)
	if err != nil {
		return process{}, err
	}
	var found []process
	for _, p := range all {
		if p.pid == not {
			continue
		}
		if u, err := measureVMM(p); err == nil && u.runs() {
			found = append(found, p)
		}
	}
	if len(found) != 1 {
		return process{}, fmt.Errorf("%d sandboxes were found instead of one", len(found))
	}
	return found[0], nil
}

// usage is the memory of one VMM, in bytes.
type usage struct {
	anonymous int64 // private pages of the RAM mapping: its delta
	shared    int64 // pages of the base that the RAM mapping shows, whoever else shows them too
	vmm       int64 // everything else, shared pages divided by their users
	base      inode
	baseBytes int64 // of the base in the host's memory, once for all who map it
}

type inode struct{ dev, ino uint64 }

// measureVMM reads the kernel's account of a process. The RAM mapping is the mapping of a file with the length of RAM.
func measureVMM(p process) (usage, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", p.pid))
	if err != nil {
		return usage{}, err
	}
	var (
		u     usage
		isRAM bool
	)
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) >= 5 && strings.Contains(f[0], "-") { // the head of a mapping
			if isRAM = len(f) > 5 && mappingBytes(f[0]) == int64(p.memoryMiB)<<20; isRAM {
				if u.base, u.baseBytes, err = mappedFile(p.pid, f[0]); err != nil {
					return usage{}, err
				}
			}
			continue
		}
		if len(f) != 3 || f[2] != "kB" {
			continue
		}
		kib, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			return usage{}, err
		}
		switch {
		case isRAM && f[0] == "Anonymous:":
			u.anonymous += kib << 10
		case isRAM && f[0] == "Rss:":
			u.shared += kib << 10
		case !isRAM && f[0] == "Pss:":
			u.vmm += kib << 10
		}
	}
	u.shared -= u.anonymous
	if u.base == (inode{}) && p.memoryMiB > 0 {
		return usage{}, fmt.Errorf("the RAM of process %d was not found among its mappings", p.pid)
	}
	return u, nil
}

func mappingBytes(span string) int64 {
	low, high, _ := strings.Cut(span, "-")
	from, err1 := strconv.ParseUint(low, 16, 64)
	to, err2 := strconv.ParseUint(high, 16, 64)
	if errors.Join(err1, err2) != nil {
		return 0
	}
	return int64(to - from) //nolint:gosec // G115: a mapping's length
}

// mappedFile returns the file behind a mapping, and how much of it is in memory: all of a memfd; for a file, its part
// in the page cache, which is at most its allocated size.
func mappedFile(pid int, span string) (inode, int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/map_files/%s", pid, span), &st); err != nil {
		return inode{}, 0, fmt.Errorf("examine the base of process %d: %w", pid, err)
	}
	return inode{st.Dev, st.Ino}, st.Blocks * 512, nil
}

// killLeftovers ends the VMMs of a lab that was killed. Their name belongs to only one lab on this host.
func killLeftovers(cluster string) error {
	left, err := findVMMs(cluster)
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range left {
		if err := syscall.Kill(p.pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
