package controlplane

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/procfs"
)

// cpuMeter measures the processor time of this process and of a database server, over a period.
type cpuMeter struct {
	server int // PID of the server's first process
	began  time.Time
	start  cpuUse
}

// cpuUse is in milliseconds.
type cpuUse struct {
	self, server float64
	by           map[string]float64 // of the server, by what its processes are
	wall         time.Duration
}

func (u cpuUse) all() float64 { return u.self + u.server }

// serverShare is the server's share, in cores.
func (u cpuUse) serverShare() float64 { return u.server / 1000 / u.wall.Seconds() }

// serverShares is the server's share by kind of process, in cores.
func (u cpuUse) serverShares() map[string]float64 {
	out := map[string]float64{}
	for kind, ms := range u.by {
		if share := ms / 1000 / u.wall.Seconds(); share >= 0.001 {
			out[kind] = share
		}
	}
	return out
}

// selfShare is the share of this process, in cores.
func (u cpuUse) selfShare() float64 { return u.self / 1000 / u.wall.Seconds() }

// meter begins a period. It fails if the processes of the server cannot be seen.
func (p *plane) meter() (*cpuMeter, error) {
	m := &cpuMeter{server: p.cluster.PID(), began: time.Now()}
	var err error
	m.start, err = m.now()
	return m, err
}

// used returns the CPU time since the beginning of the period.
func (m *cpuMeter) used() (cpuUse, error) {
	now, err := m.now()
	if err != nil {
		return cpuUse{wall: time.Since(m.began)}, err
	}
	by := now.by
	for kind, ms := range m.start.by {
		by[kind] -= ms
	}
	return cpuUse{self: now.self - m.start.self, server: now.server - m.start.server, by: by, wall: time.Since(m.began)}, nil
}

func (m *cpuMeter) now() (cpuUse, error) {
	var u cpuUse
	var self unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &self); err != nil {
		return u, fmt.Errorf("read this process's processor time: %w", err)
	}
	u.self = float64(self.Utime.Nano()+self.Stime.Nano()) / 1e6
	var err error
	u.by, err = treeCPU("/proc", m.server)
	for _, ms := range u.by {
		u.server += ms
	}
	return u, err
}

const tickMS = 1000 / procfs.TicksPerSecond

// ended is the kind of processes of a server that have ended. Their time moves here from their own kind, which may become negative.
const ended = "ended"

// treeCPU is the processor time in milliseconds of a process, its living children and those that have ended, by kind of process. It fails
// when it sees no process or no child, as where /proc hides those of other users: 0 would look like a good figure.
func treeCPU(proc string, pid int) (map[string]float64, error) {
	stats, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "stat"))
	if err != nil {
		return nil, err
	}
	by := map[string]float64{}
	parent, children := false, 0
	for _, path := range stats {
		stat, err := procfs.ReadStat(path)
		if err != nil {
			continue // it has ended
		}
		above, err := stat.Number(procfs.Parent)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		var kind string
		switch {
		case filepath.Base(filepath.Dir(path)) == strconv.Itoa(pid):
			parent, kind = true, "postmaster"
			ticks, err := stat.Sum(procfs.ChildUser, procfs.ChildSystem)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			by[ended] += tickMS * float64(ticks)
		case above == uint64(pid): //nolint:gosec // G115: a process
			children++
			kind = serverKind(filepath.Dir(path))
		default:
			continue
		}
		ticks, err := stat.Sum(procfs.UserTicks, procfs.SystemTicks)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		by[kind] += tickMS * float64(ticks)
	}
	if !parent || children == 0 {
		return nil, errors.New("the processes of PostgreSQL cannot be seen in " + proc + ", so what it uses cannot be measured: run as root, or mount it without hidepid")
	}
	return by, nil
}

// serverKind says what a process of PostgreSQL is, by its title: "postgres: checkpointer", "postgres: USER DATABASE …" for a client.
func serverKind(dir string) string {
	title, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		return ended
	}
	for _, kind := range []string{"autovacuum worker", "autovacuum launcher", "background writer", "checkpointer", "walwriter", "parallel worker"} {
		if strings.HasPrefix(string(title), "postgres: "+kind) {
			return kind
		}
	}
	return "clients"
}
