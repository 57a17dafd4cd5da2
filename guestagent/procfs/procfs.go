//go:build linux

package procfs

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

const (
	maxProcesses = 4096
	maxCmdline   = 4096
)

// Stat is a part of the content of /proc/<pid>/stat.
type Stat struct {
	Comm       string
	State      string
	PPID, SID  int
	RSSPages   int64
	StartTicks uint64
	VSize      string // of the address space, in bytes
}

// ReadStat reads the stat of a process in the given /proc.
func ReadStat(proc string, pid int) (Stat, error) {
	b, err := smallfile.Read(proc + "/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return Stat{}, err
	}
	// The command is in parentheses and may contain any byte, so the fields are counted from the last parenthesis.
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return Stat{}, fmt.Errorf("stat of process %d cannot be read", pid)
	}
	f := strings.Fields(string(b[end+1:]))
	if len(f) < 22 {
		return Stat{}, fmt.Errorf("stat of process %d is too short", pid)
	}
	s := Stat{Comm: string(b[open+1 : end]), State: f[0]}
	s.PPID, _ = strconv.Atoi(f[1])
	s.SID, _ = strconv.Atoi(f[3])
	s.StartTicks, _ = strconv.ParseUint(f[19], 10, 64)
	s.VSize = f[20]
	s.RSSPages, _ = strconv.ParseInt(f[21], 10, 64)
	return s, nil
}

// pids lists the processes in a /proc.
func pids(proc string) ([]int, error) {
	list, err := smallfile.List(proc)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, n := range list {
		if pid, err := strconv.Atoi(n); err == nil {
			out = append(out, pid)
		}
	}
	slices.Sort(out)
	return out, nil
}

// SessionMembers lists the processes of a kernel session, with the numbers that the agent sees.
func SessionMembers(sid int) []int {
	all, err := pids("/proc")
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(all, func(pid int) bool {
		st, err := ReadStat("/proc", pid)
		return err != nil || st.SID != sid
	})
}

// NormalOOM gives a child the normal OOM score instead of the agent's protection.
func NormalOOM(pid int) {
	_ = smallfile.Write("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte("0"), 0)
}

// Processes lists the processes in a /proc.
func Processes(proc string) (guestapi.Processes, error) {
	list, err := pids(proc)
	if err != nil {
		return guestapi.Processes{}, core.Wrapf(err, core.Internal, core.CodeInternal, "the guest's process list cannot be read")
	}
	out := guestapi.Processes{Processes: []guestapi.Process{}}
	page := int64(os.Getpagesize())
	for _, pid := range list[:min(len(list), maxProcesses)] {
		st, err := ReadStat(proc, pid)
		if err != nil {
			continue // it has ended meanwhile
		}
		cmdline, _ := smallfile.Read(proc + "/" + strconv.Itoa(pid) + "/cmdline")
		cmdline = bytes.ReplaceAll(bytes.TrimRight(cmdline[:min(len(cmdline), maxCmdline)], "\x00"), []byte{0}, []byte{' '})
		out.Processes = append(out.Processes, guestapi.Process{
			PID: pid, PPID: st.PPID, Comm: st.Comm, Cmdline: string(cmdline), State: st.State, RSSBytes: st.RSSPages * page,
		})
	}
	return out, nil
}
