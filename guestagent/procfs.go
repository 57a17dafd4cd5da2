//go:build linux

package guestagent

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

const (
	maxProcesses = 4096
	maxCmdline   = 4096
)

// stat is the content of /proc/<pid>/stat.
type stat struct {
	comm       string
	state      string
	ppid, sid  int
	rssPages   int64
	startTicks uint64
	vsize      string
}

func readStat(proc string, pid int) (stat, error) {
	b, err := readSmall(proc + "/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return stat{}, err
	}
	// The command is in parentheses and may contain any byte, so the fields are counted from the last parenthesis.
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return stat{}, fmt.Errorf("stat of process %d cannot be read", pid)
	}
	f := strings.Fields(string(b[end+1:]))
	if len(f) < 22 {
		return stat{}, fmt.Errorf("stat of process %d is too short", pid)
	}
	s := stat{comm: string(b[open+1 : end]), state: f[0]}
	s.ppid, _ = strconv.Atoi(f[1])
	s.sid, _ = strconv.Atoi(f[3])
	s.startTicks, _ = strconv.ParseUint(f[19], 10, 64)
	s.vsize = f[20]
	s.rssPages, _ = strconv.ParseInt(f[21], 10, 64)
	return s, nil
}

// numbers lists the processes in a /proc.
func numbers(proc string) ([]int, error) {
	list, err := names(proc)
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

// sessionMembers lists the processes of a kernel session, with the numbers that the agent sees.
func sessionMembers(sid int) []int {
	all, err := numbers("/proc")
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(all, func(pid int) bool {
		st, err := readStat("/proc", pid)
		return err != nil || st.sid != sid
	})
}

// normalOOM gives a child the normal OOM score instead of the agent's protection.
func normalOOM(pid int) {
	_ = writeSmall("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte("0"), 0)
}

// listProcesses lists the workload's processes as the workload itself sees them.
func listProcesses(w workload) (guestapi.Processes, error) {
	proc := w.proc()
	pids, err := numbers(proc)
	if err != nil {
		return guestapi.Processes{}, core.Wrapf(err, core.Internal, core.CodeInternal, "the guest's process list cannot be read")
	}
	out := guestapi.Processes{Processes: []guestapi.Process{}}
	page := int64(os.Getpagesize())
	for _, pid := range pids[:min(len(pids), maxProcesses)] {
		st, err := readStat(proc, pid)
		if err != nil {
			continue // it has ended meanwhile
		}
		cmdline, _ := readSmall(proc + "/" + strconv.Itoa(pid) + "/cmdline")
		cmdline = bytes.ReplaceAll(bytes.TrimRight(cmdline[:min(len(cmdline), maxCmdline)], "\x00"), []byte{0}, []byte{' '})
		out.Processes = append(out.Processes, guestapi.Process{
			PID: pid, PPID: st.ppid, Comm: st.comm, Cmdline: string(cmdline), State: st.state, RSSBytes: st.rssPages * page,
		})
	}
	return out, nil
}
