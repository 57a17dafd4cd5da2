//go:build linux

package reseal

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/guestagent/guesttest"
)

func TestAddCA(t *testing.T) {
	t.Parallel()
	one := addCA([]byte("A\nB"), "X\n")
	if want := "A\nB\n" + caBegin + "X\n" + caEnd; string(one) != want {
		t.Errorf("got %q, want %q", one, want)
	}
	two := addCA(append(one, "C\n"...), "Y")
	if want := "A\nB\nC\n" + caBegin + "Y\n" + caEnd; string(two) != want {
		t.Errorf("got %q, want %q", two, want)
	}
	if got := string(addCA(nil, "X")); got != caBegin+"X\n"+caEnd {
		t.Errorf("got %q", got)
	}
}

func TestRuntimeByName(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]string{
		"/usr/bin/python3.11": "python", "/usr/lib/libpython3.12.so.1.0": "python", "/usr/bin/node": "node", "/usr/bin/nodejs": "node",
		"/lib/libnode.so.108": "node", "/usr/lib/jvm/x/lib/server/libjvm.so": "java", "/usr/lib/libcrypto.so.3": "openssl",
		"/usr/bin/nodeenv": "", "/usr/bin/bash": "", "/usr/lib/libc.so.6": "", "": "",
	} {
		if got := runtimeByName([]byte(path)); got != want {
			t.Errorf("%q is %q, want %q", path, got, want)
		}
	}
}

// TestStaleScan scans processes of the test: itself, which is Go, and a shell.
func TestStaleScan(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	w := &guesttest.Workload{Started: []int{os.Getpid(), cmd.Process.Pid, 1 << 22}}
	var s scanner
	for range 2 { // the second time with the cached findings
		got, err := s.scan(w)
		if err != nil || len(got) != 1 || got[0].PID != os.Getpid() || got[0].Runtime != "go" {
			t.Errorf("got %+v (%v), want this process alone", got, err)
		}
	}
	if len(s.known) != 2 {
		t.Errorf("%d processes are known, want 2", len(s.known))
	}
}

// TestStaleProcessesAreBounded: a report names so many, and the list of the workload does not end there.
func TestStaleProcessesAreBounded(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]int{maxStale - 1: maxStale - 1, maxStale: maxStale, maxStale + 1: maxStale, maxStale + 100: maxStale} {
		w := &guesttest.Workload{}
		for range n {
			w.Started = append(w.Started, os.Getpid()) // which is Go
		}
		var s scanner
		if got, err := s.scan(w); err != nil || len(got) != want || len(s.running) != n || s.truncated {
			t.Errorf("of %d processes %d are named and %d listed (%v), want %d and %d", n, len(got), len(s.running), err, want, n)
		}
	}
}

func TestWorkloadIsBounded(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = errors.Join(cmd.Process.Kill(), cmd.Wait()) }()
	w := &guesttest.Workload{}
	for range maxWorkload + 1 {
		w.Started = append(w.Started, cmd.Process.Pid)
	}
	var s scanner
	if _, err := s.scan(w); err != nil || len(s.running) != maxWorkload || !s.truncated {
		t.Errorf("%d processes, truncated %t, %v", len(s.running), s.truncated, err)
	}
	if args := argsOf(os.Getpid()); args == "" || len(args) > 128+3 {
		t.Errorf("own arguments: %s", strconv.Quote(args))
	}
}

// TestRenameInHosts: a reseal keeps every line of a long /etc/hosts, and does not touch one that is too long to be edited.
func TestRenameInHosts(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "hosts")
	for _, lines := range []int{0, 1, 10_000, 300_000} {
		text := "127.0.0.1\tlocalhost\n" + strings.Repeat("0.0.0.0\tads.example\n", lines) + "127.0.1.1\told\n"
		want := strings.TrimSuffix(text, "127.0.1.1\told\n") + "127.0.1.1\tnew\n"
		if len(text) > maxHosts {
			want = text
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := renameInHosts(path, "old", "new"); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != want {
			t.Errorf("%d lines: %d bytes became %d, want %d: %v", lines, len(text), len(b), len(want), err)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := renameInHosts(path, "old", "new"); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "127.0.0.1\tlocalhost\n127.0.1.1\tnew\n" {
		t.Errorf("%q, %v", b, err)
	}
}
