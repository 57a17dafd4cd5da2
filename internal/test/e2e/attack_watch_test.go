package e2e

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/runner/egress"
)

// watch observes the processes and the disk of a stack.
type watch struct {
	x     *assault
	first map[string]lived // by their part in the stack
	base  map[string]int64 // bytes on the disk at the start, by their place

	mu     sync.Mutex // guards what follows
	bounds map[string]int64
	peak   map[string]int64
	gone   []string
	volume int64 // the most that was used of it
}

type lived struct {
	pid     int
	start   string // in clock ticks
	files   int    // that it had open
	threads int
}

// memoryBounds are what the resident memory of each part may come to, in bytes. The server is controller and runner in one process. PostgreSQL
// is the sum of its processes, each with its share of what they have in common.
var memoryBounds = map[string]int64{"server": 1 << 30, "egress": 384 << 20, "postgres": 1 << 30}

// What a part may have more of after a phase than before the first. The Go runtime keeps a thread that a system call has once needed.
const (
	moreFiles   = 128
	moreThreads = 128
)

// What may be on the disk beyond what was there before, in bytes.
const (
	// copiesSize is what the runner is told that copies of stored checkpoints may take.
	copiesSize = 512 << 20
	// maxVolume is for the copies, the one that is being fetched beside them, and what the attacker has captured and runs.
	maxVolume = copiesSize + 1<<30
	// storeSlack is for the bytes that the store has beyond the checkpoints that it was given: the template that came with them.
	storeSlack = 320 << 20
	// maxRest is for the database, the spool of flows and everything else of the data directory.
	maxRest = 512 << 20
)

func newWatch(x *assault) *watch {
	x.t.Helper()
	w := &watch{x: x, peak: map[string]int64{}, bounds: maps.Clone(memoryBounds)}
	w.first = w.parts()
	for part := range w.bounds {
		if w.first[part].pid == 0 {
			x.t.Fatalf("no process is the %s: %v", part, w.first)
		}
	}
	w.base = w.sizes()
	return w
}

// parts finds the processes that must outlive every attack.
func (w *watch) parts() map[string]lived {
	out := map[string]lived{}
	add := func(part string, pid int) {
		if start, err := startOf(pid); err == nil {
			out[part] = lived{pid, start, openFiles(pid), threadsOf(pid)}
		}
	}
	add("server", w.x.s.cmd.Process.Pid)
	ctx, cancel := context.WithTimeout(w.x.t.Context(), 10*time.Second)
	defer cancel()
	if hello, err := egress.NewClient(egress.SocketPath(filepath.Join(w.x.s.runDir(), "egress"))).Hello(ctx); err == nil {
		add("egress", hello.PID)
	}
	for pid, cmdline := range allProcesses() {
		args := strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
		if bytes.Contains(cmdline, []byte(w.x.s.data)) && filepath.Base(args[0]) == "postgres" && slices.Contains(args, "-D") {
			add("postgres", pid)
		}
	}
	return out
}

// startOf is when a process began, so that a new one with its number is not taken for it.
func startOf(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	const start = 19 // field 22, the first after the name being 3
	if len(fields) <= start {
		return "", fmt.Errorf("strange state of process %d", pid)
	}
	return fields[start], nil
}

func (w *watch) run(ctx context.Context) {
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		w.look()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (w *watch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for part, p := range w.first {
		if start, err := startOf(p.pid); err != nil || start != p.start {
			if fault := part + " has ended or was started again"; !slices.Contains(w.gone, fault) {
				w.gone = append(w.gone, fault)
			}
			continue
		}
		n := memoryOf(p.pid)
		if part == "postgres" {
			for _, child := range childrenOf(p.pid) {
				n += memoryOf(child)
			}
		}
		w.peak[part] = max(w.peak[part], n)
	}
	w.volume = max(w.volume, w.volumeUsed()-w.base["volume"])
}

// memoryOf is the memory of a process that it shares with nobody, plus its share of the rest, in bytes.
func memoryOf(pid int) int64 {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "Pss:"); ok {
			kib, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kib << 10
		}
	}
	return 0
}

func childrenOf(pid int) []int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	var out []int
	for f := range strings.FieldsSeq(string(b)) {
		if n, err := strconv.Atoi(f); err == nil {
			out = append(out, n)
		}
	}
	return out
}

func openFiles(pid int) int {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)) // one that has ended has none
	return len(entries)
}

func threadsOf(pid int) int {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return len(entries)
}

// fault says which process ended or took too much.
func (w *watch) fault() error {
	w.look()
	w.mu.Lock()
	defer w.mu.Unlock()
	faults := slices.Clone(w.gone)
	for part := range w.first {
		switch n := w.peak[part]; {
		case n == 0:
			faults = append(faults, "nothing is known of the memory of "+part)
		case n > w.bounds[part]:
			faults = append(faults, fmt.Sprintf("%s took %d MiB, at most %d are allowed", part, n>>20, w.bounds[part]>>20))
		}
	}
	return inOne(faults)
}

func inOne(faults []string) error {
	if len(faults) == 0 {
		return nil
	}
	slices.Sort(faults)
	return errors.New(strings.Join(faults, "; "))
}

// leaks says which process keeps files or threads open that a phase has made it open. What is just being closed may take a while.
func (w *watch) leaks(patience time.Duration) error {
	ctx, cancel := context.WithTimeout(w.x.t.Context(), patience)
	defer cancel()
	again := time.NewTicker(500 * time.Millisecond)
	defer again.Stop()
	for {
		var faults []string
		for part, p := range w.first {
			if n := openFiles(p.pid) - p.files; n > moreFiles {
				faults = append(faults, fmt.Sprintf("%s has %d open files more than at first, at most %d are allowed", part, n, moreFiles))
			}
			if n := threadsOf(p.pid) - p.threads; n > moreThreads {
				faults = append(faults, fmt.Sprintf("%s has %d threads more than at first, at most %d are allowed", part, n, moreThreads))
			}
		}
		if len(faults) == 0 {
			return nil
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return inOne(faults)
		}
	}
}

// disk says that what is kept has grown too much.
func (w *watch) disk() error {
	w.look()
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.sizes()
	var faults []string
	for place, n := range map[string]int64{"volume": w.volume, "store": now["store"] - w.base["store"], "rest": now["rest"] - w.base["rest"]} {
		if most := w.allowed(place); n > most {
			faults = append(faults, fmt.Sprintf("the %s grew by %d MiB, at most %d are allowed", place, n>>20, most>>20))
		}
	}
	return inOne(faults)
}

// allowed is how much a place on the disk may grow, in bytes.
func (w *watch) allowed(place string) int64 {
	switch place {
	case "volume":
		return maxVolume
	case "store":
		return w.x.given() + storeSlack
	}
	return maxRest
}

// volumeDir is where checkpoints and machines are: on a volume of its own, unless the data directory's file system can share extents.
func (w *watch) volumeDir() string {
	if dir := filepath.Join(w.x.s.data, "volume"); isDir(dir) {
		return dir
	}
	return filepath.Join(w.x.s.data, "runner")
}

// runnerDir is the runner's own directory there.
func (w *watch) runnerDir() string {
	if dir := w.volumeDir(); filepath.Base(dir) == "runner" {
		return dir
	}
	return filepath.Join(w.volumeDir(), "runner")
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// volumeUsed is what the volume's file system says that it has in use: files there share extents. Without a volume of its own it is what the
// files take.
func (w *watch) volumeUsed() int64 {
	var here, above unix.Stat_t
	var all unix.Statfs_t
	dir := w.volumeDir()
	if unix.Stat(dir, &here) == nil && unix.Stat(w.x.s.data, &above) == nil && here.Dev != above.Dev && unix.Statfs(dir, &all) == nil {
		return int64(all.Blocks-all.Bfree) * all.Bsize
	}
	return filesIn(dir, "")
}

// sizes are what the places of the stack take on the disk, in bytes.
func (w *watch) sizes() map[string]int64 {
	return map[string]int64{"volume": w.volumeUsed(), "store": filesIn(w.x.store, ""), "rest": filesIn(w.x.s.data, w.volumeDir())}
}

// filesIn is what the files below a directory take, without those below another and without the file that the volume is in.
func filesIn(dir, without string) (n int64) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && path == without {
			return fs.SkipDir
		}
		if err == nil && d.Type().IsRegular() && d.Name() != "volume.xfs" {
			if info, err := d.Info(); err == nil { // files come and go
				n += info.Sys().(*syscall.Stat_t).Blocks * 512
			}
		}
		return nil
	})
	return n
}

func (w *watch) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var parts []string
	for part, n := range w.peak {
		p := w.first[part]
		parts = append(parts, fmt.Sprintf("%s %d of %d MiB (%+d files, %+d threads)", part, n>>20, w.bounds[part]>>20, openFiles(p.pid)-p.files, threadsOf(p.pid)-p.threads))
	}
	slices.Sort(parts)
	now := w.sizes()
	return fmt.Sprintf("memory at most: %s; disk grew: volume %d of %d MiB, store %d of %d MiB, rest %d of %d MiB", strings.Join(parts, ", "),
		w.volume>>20, w.allowed("volume")>>20, (now["store"]-w.base["store"])>>20, w.allowed("store")>>20, (now["rest"]-w.base["rest"])>>20, w.allowed("rest")>>20)
}
