//go:build linux

package procfs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

func TestReadStat(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.MkdirAll(dir+"/7", 0o755); err != nil {
		t.Fatal(err)
	}
	line := "7 (a) b (c)) S 3 4 5 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987 12345 67 18446744073709551615 1 1"
	if err := os.WriteFile(dir+"/7/stat", []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := ReadStat(dir, 7)
	want := Stat{Comm: "a) b (c)", State: "S", PPID: 3, SID: 5, StartTicks: 987, VSize: "12345", RSSPages: 67}
	if err != nil || got != want {
		t.Errorf("got %+v (%v), want %+v", got, err, want)
	}
}

func TestParseSocketAddr(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"0100007F:1F90":                         "127.0.0.1:8080",
		"00000000:0016":                         "0.0.0.0:22",
		"00000000000000000000000001000000:0050": "[::1]:80",
		"0000000000000000FFFF00000100007F:0050": "127.0.0.1:80",
	} {
		got, ok := parseSocketAddr(in)
		if !ok || got.String() != want {
			t.Errorf("%s is %s (%t), want %s", in, got, ok, want)
		}
	}
	for _, in := range []string{"", "0100007F", "0100007F:", "01:1", "zz00007F:1F90", "0100007F:1F90F"} {
		if got, ok := parseSocketAddr(in); ok {
			t.Errorf("%q is taken for %s", in, got)
		}
	}
}

// newCrowd makes a /proc with that many processes, all alike, with a command line. The last one has a file open.
func newCrowd(t *testing.T, n int, cmdline, open string) string {
	t.Helper()
	all := t.TempDir()
	one, last := t.TempDir(), filepath.Join(all, fmt.Sprint(n))
	for _, dir := range []string{one, last} {
		if err := os.MkdirAll(filepath.Join(dir, "fd"), 0o700); err != nil {
			t.Fatal(err)
		}
		for name, content := range map[string]string{
			"stat": "7 (many) S 3 4 5 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987 12345 67 1 1 1", "cmdline": cmdline,
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for pid := 1; pid < n; pid++ {
		if err := os.Symlink(one, filepath.Join(all, fmt.Sprint(pid))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(open, filepath.Join(last, "fd", "3")); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestProcessesAreBounded: of more processes than a list takes, the first ones are listed, and each command line is cut.
func TestProcessesAreBounded(t *testing.T) {
	t.Parallel()
	proc := newCrowd(t, maxProcesses+1, strings.Repeat("x", maxCmdline)+"y", "socket:[12345]")
	for beyond := 1; beyond >= 0; beyond-- {
		list, err := Processes(proc)
		if err != nil || len(list.Processes) != maxProcesses {
			t.Fatalf("%d beyond: %d processes are listed, want %d: %v", beyond, len(list.Processes), maxProcesses, err)
		}
		for _, p := range list.Processes {
			if p.Cmdline != strings.Repeat("x", maxCmdline) || p.Comm != "many" {
				t.Fatalf("%d beyond: process %d, %s, has a command line of %d bytes", beyond, p.PID, p.Comm, len(p.Cmdline))
			}
		}
		// Nor are more of them looked at for who listens at a port. The port is listed all the same.
		ports := []guestapi.Port{{Port: 80}}
		nameOwners(proc, map[string]int{"socket:[12345]": 0}, ports)
		if found := ports[0].PID == maxProcesses+1; found != (beyond == 0) {
			t.Errorf("%d beyond: process %d listens", beyond, ports[0].PID)
		}
		if beyond == 1 { // one ends, and the last has its place
			if err := os.Remove(filepath.Join(proc, "1")); err != nil {
				t.Fatal(err)
			}
		}
	}
}
