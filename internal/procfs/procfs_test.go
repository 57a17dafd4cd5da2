package procfs_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/internal/procfs"
)

// TestStat reads the file of a process whose name looks like the fields behind it.
func TestStat(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "stat")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("7 (a) S 1) (b) D 4 0 0 0 0 2097152 0 0 0 0 14 15 16 17 20 0 1 0 22\n")
	s, err := procfs.ReadStat(path)
	if err != nil || s.State() != "D" {
		t.Fatalf("got the state %q, %v", s.State(), err)
	}
	for field, want := range map[int]uint64{
		procfs.Parent: 4, procfs.Flags: 2097152, procfs.UserTicks: 14, procfs.SystemTicks: 15, procfs.ChildUser: 16, procfs.ChildSystem: 17, procfs.StartTime: 22,
	} {
		if got, err := s.Number(field); err != nil || got != want {
			t.Errorf("field %d: got %d, %v, want %d", field, got, err, want)
		}
	}
	if sum, err := s.Sum(procfs.UserTicks, procfs.SystemTicks); err != nil || sum != 29 {
		t.Errorf("the sum is %d, %v", sum, err)
	}
	for _, text := range []string{"", "7 (a", "7 (a) S 1 2 3\n"} {
		if write(text); true {
			if s, err := procfs.ReadStat(path); err == nil || s.State() != "" {
				t.Errorf("%q: got %v", text, s)
			}
		}
	}
	write("7 (a) S 4 0 0 0 0 x 0 0 0 0 x 15 16 17 20 0 1 0 22\n")
	if s, err = procfs.ReadStat(path); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sum(procfs.SystemTicks, procfs.UserTicks); err == nil {
		t.Error("a field that is no number was read")
	}
}

func TestKiB(t *testing.T) {
	t.Parallel()
	if n, err := procfs.KiB("/proc/self/status", "VmRSS"); err != nil || n <= 0 {
		t.Errorf("got %d, %v", n, err)
	}
	for _, name := range []string{"Name", "VmNothing"} {
		if n, err := procfs.KiB("/proc/self/status", name); err == nil {
			t.Errorf("%s: got %d", name, n)
		}
	}
}
