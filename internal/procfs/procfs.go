// Package procfs reads files of /proc: the stat file of a process or a thread, and files with an amount of memory on each line.
package procfs

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// TicksPerSecond is the unit of the times in a stat file, on every Linux.
const TicksPerSecond = 100

// Stat has the fields of a stat file, beginning with field 3 of proc(5). Field 2, the name, may contain any byte.
type Stat []string

// The numbers of some fields, as in proc(5).
const (
	Parent        = 4
	Flags         = 9
	UserTicks     = 14
	SystemTicks   = 15
	ChildUser     = 16 // of children that the process has waited for
	ChildSystem   = 17
	StartTime     = 22 // in ticks since the boot
	firstField    = 3
	expectedCount = StartTime - firstField + 1
)

// ReadStat reads a stat file.
func ReadStat(path string) (Stat, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	s := Stat(strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])))
	if len(s) < expectedCount {
		return nil, fmt.Errorf("%s has an unexpected form", path)
	}
	return s, nil
}

// State is the state: R, S, D, T, Z and so on. It is empty for a Stat that was not read.
func (s Stat) State() string {
	if len(s) == 0 {
		return ""
	}
	return s[0]
}

// Number returns one of the fields above.
func (s Stat) Number(field int) (uint64, error) {
	return strconv.ParseUint(s[field-firstField], 10, 64)
}

// Sum adds several fields.
func (s Stat) Sum(fields ...int) (sum uint64, err error) {
	for _, f := range fields {
		n, err := s.Number(f)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// KiB finds an amount of memory by its name, as in "MemAvailable: 12 kB" of /proc/meminfo.
func KiB(path, name string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		var n int64
		if found, _ := fmt.Sscanf(line, name+": %d kB", &n); found == 1 {
			return n, nil
		}
	}
	return 0, fmt.Errorf("%s does not have %s", path, name)
}
