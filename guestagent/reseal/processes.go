//go:build linux

package reseal

import (
	"bytes"
	"encoding/binary"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/procfs"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

const (
	maxStale    = 256
	maxWorkload = 1024 // this many fit in an answer, even with the longest command lines
)

// scanner finds the processes with random generators that a reseal cannot reach. A positive finding about a
// process stays true as long as the process lives; a negative one stays true as long as the process maps nothing more.
type scanner struct {
	known     map[processKey]verdict
	timers    []string               // programs that act by themselves after the thaw, like cron
	running   []core.WorkloadProcess // all processes that were found
	truncated bool                   // there are more processes
}

type processKey struct {
	pid   int
	start uint64
}

type verdict struct {
	runtime string // "" for none
	inner   int
	size    string // of the address space at the time of the scan
	comm    string // at the time of the scan
	args    string // at the time of the scan
}

// Processes are the processes of the workload.
type Processes struct {
	Stale     []core.StaleProcess    // those with random generators that a reseal cannot reach
	All       []core.WorkloadProcess // all, up to a bound
	Truncated bool                   // there are more than All has
}

// Scan lists the processes of the workload. Only one caller at a time.
func (r *Resealer) Scan() (Processes, error) {
	stale, err := r.processes.scan(r.work)
	return Processes{Stale: stale, All: r.processes.running, Truncated: r.processes.truncated}, err
}

// scan lists the workload's processes with such a generator. Only one caller at a time.
func (s *scanner) scan(w Workload) ([]core.StaleProcess, error) {
	pids, err := w.PIDs()
	if err != nil {
		return nil, err
	}
	found := []core.StaleProcess{}
	s.timers, s.truncated = nil, false
	s.running = make([]core.WorkloadProcess, 0, min(len(pids), maxWorkload))
	known := make(map[processKey]verdict, len(pids))
	for _, pid := range pids {
		st, err := procfs.ReadStat("/proc", pid)
		if err != nil || st.State == "Z" {
			continue
		}
		if runsByItself(st.Comm) {
			s.timers = append(s.timers, st.Comm)
		}
		key := processKey{pid, st.StartTicks}
		v, ok := s.known[key]
		if !ok {
			v.inner = w.InnerPID(pid)
		}
		if !ok || v.comm != st.Comm || v.size != st.VSize { // a new program changes both
			v.comm, v.args = st.Comm, argsOf(pid)
		}
		if !ok || v.runtime == "" && v.size != st.VSize {
			v.runtime = runtimeOf(pid)
		}
		v.size = st.VSize
		known[key] = v
		if len(s.running) == maxWorkload {
			s.truncated = true
		} else {
			s.running = append(s.running, core.WorkloadProcess{PID: v.inner, StartTicks: st.StartTicks, Command: core.Clip(st.Comm), Args: v.args})
		}
		if v.runtime != "" && len(found) < maxStale {
			found = append(found, core.StaleProcess{PID: v.inner, Command: core.Clip(st.Comm), Runtime: v.runtime})
		}
	}
	s.known = known
	return found, nil
}

// argsOf returns the beginning of a process's command line.
func argsOf(pid int) string {
	fd, err := smallfile.Open("/proc/"+strconv.Itoa(pid)+"/cmdline", unix.O_RDONLY, 0)
	if err != nil {
		return ""
	}
	defer func() { _ = unix.Close(fd) }()
	var head [128]byte
	n, err := unix.Read(fd, head[:])
	if err != nil || n <= 0 {
		return ""
	}
	args := bytes.TrimRight(head[:n], "\x00")
	return core.Clip(string(bytes.ReplaceAll(args, []byte{0}, []byte{' '})))
}

func runsByItself(comm string) bool {
	switch comm {
	case "cron", "crond", "atd", "anacron", "fcron", "systemd", "systemd-timesyn", "chronyd", "ntpd":
		return true
	}
	return false
}

// runtimeOf names the runtime from which a process gets random numbers, by its program or else by its mapped files.
func runtimeOf(pid int) string {
	proc := "/proc/" + strconv.Itoa(pid)
	var buf [256]byte
	if n, err := unix.Readlink(proc+"/exe", buf[:]); err == nil {
		if runtime := runtimeByName(buf[:n]); runtime != "" && runtime != "openssl" {
			return runtime
		}
	}
	b, err := os.ReadFile(proc + "/maps")
	if err != nil {
		return ""
	}
	openssl := false
	for line := range bytes.Lines(b) {
		// Only the first mapping of each file counts, which has the offset 0.
		i := bytes.IndexByte(line, '/')
		if i < 0 || !bytes.Contains(line[:i], []byte(" 00000000 ")) {
			continue
		}
		switch runtime := runtimeByName(bytes.TrimSpace(line[i:])); runtime {
		case "":
		case "openssl":
			openssl = true
		default:
			return runtime
		}
	}
	switch {
	case isGo(proc + "/exe"):
		return "go"
	case openssl:
		return "openssl"
	}
	return ""
}

// runtimeByName recognizes the files of a runtime.
func runtimeByName(path []byte) string {
	name := path[bytes.LastIndexByte(path, '/')+1:]
	begins := func(s string) bool { return bytes.HasPrefix(name, []byte(s)) }
	switch {
	case begins("node") && (len(name) == 4 || string(name) == "nodejs"), begins("libnode.so"):
		return "node"
	case begins("libjvm.so"):
		return "java"
	case begins("python3"), begins("libpython3"):
		return "python"
	case begins("libcrypto.so"):
		return "openssl"
	}
	return ""
}

// isGo looks for one of two things that Go's linker writes, also with -s and -w: the note with the build id, near the beginning, or the build
// information, at the beginning of a writable segment. A program that a C linker linked without a build id is not found.
func isGo(exe string) bool {
	fd, err := smallfile.Open(exe, unix.O_RDONLY, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	var head [4096]byte
	n, err := unix.Pread(fd, head[:], 0)
	if err != nil {
		return false
	}
	if bytes.Contains(head[:n], []byte("\x04\x00\x00\x00Go\x00\x00")) {
		return true
	}
	const info = "\xff Go buildinf:"
	var data [len(info)]byte
	var offsets [maxSegments]int64
	for _, at := range writableSegments(head[:n], offsets[:0]) {
		if n, err := unix.Pread(fd, data[:], at); err == nil && n == len(data) && string(data[:]) == info {
			return true
		}
	}
	return false
}

// maxSegments bounds the writable segments of a program that are looked at. Go's linker makes two at most.
const maxSegments = 4

// writableSegments appends where the writable segments of a 64-bit little-endian ELF file begin in the file, as far as its first bytes say it.
func writableSegments(head []byte, offsets []int64) []int64 {
	const (
		size     = 56 // of a program header
		load     = 1  // PT_LOAD
		writable = 2  // PF_W
	)
	if len(head) < 64 || string(head[:6]) != "\x7fELF\x02\x01" || binary.LittleEndian.Uint16(head[54:]) != size {
		return offsets
	}
	first, count := binary.LittleEndian.Uint64(head[32:]), int(binary.LittleEndian.Uint16(head[56:]))
	for i := range count {
		at := first + uint64(i)*size
		if at > uint64(len(head)-size) || len(offsets) == maxSegments {
			break
		}
		h := head[at:]
		if binary.LittleEndian.Uint32(h) != load || binary.LittleEndian.Uint32(h[4:])&writable == 0 {
			continue
		}
		if offset := int64(binary.LittleEndian.Uint64(h[8:])); offset >= 0 {
			offsets = append(offsets, offset)
		}
	}
	return offsets
}
