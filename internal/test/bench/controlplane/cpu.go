package controlplane

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
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
	wall         time.Duration
}

func (u cpuUse) all() float64 { return u.self + u.server }

// serverShare is the server's share, in cores.
func (u cpuUse) serverShare() float64 { return u.server / 1000 / u.wall.Seconds() }

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
	return cpuUse{self: now.self - m.start.self, server: now.server - m.start.server, wall: time.Since(m.began)}, err
}

func (m *cpuMeter) now() (cpuUse, error) {
	var u cpuUse
	var self unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &self); err != nil {
		return u, fmt.Errorf("read this process's processor time: %w", err)
	}
	u.self = float64(self.Utime.Nano()+self.Stime.Nano()) / 1e6
	var err error
	u.server, err = treeCPU("/proc", m.server)
	return u, err
}

const tickMS = 1000 / procfs.TicksPerSecond

// treeCPU is the processor time in milliseconds of a process, its living children and those that have ended. It fails when it
// sees no process or no child, as where /proc hides those of other users: 0 would look like a good figure.
func treeCPU(proc string, pid int) (float64, error) {
	stats, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "stat"))
	if err != nil {
		return 0, err
	}
	var sum float64
	parent, children := false, 0
	for _, path := range stats {
		stat, err := procfs.ReadStat(path)
		if err != nil {
			continue // it has ended
		}
		above, err := stat.Number(procfs.Parent)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		count := []int{procfs.UserTicks, procfs.SystemTicks}
		switch {
		case filepath.Base(filepath.Dir(path)) == strconv.Itoa(pid):
			parent, count = true, append(count, procfs.ChildUser, procfs.ChildSystem)
		case above == uint64(pid): //nolint:gosec // G115: a process
			children++
		default:
			continue
		}
		ticks, err := stat.Sum(count...)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		sum += tickMS * float64(ticks)
	}
	if !parent || children == 0 {
		return 0, errors.New("the processes of PostgreSQL cannot be seen in " + proc + ", so what it uses cannot be measured: run as root, or mount it without hidepid")
	}
	return sum, nil
}
