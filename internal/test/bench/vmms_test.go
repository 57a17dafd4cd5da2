package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
)

// TestFindCloudHypervisor finds a cloud-hypervisor as the driver starts it, before and after it maps RAM, and only by
// its cluster.
func TestFindCloudHypervisor(t *testing.T) {
	t.Parallel()
	const memoryMiB = 64
	fake := testvm.BuildFakeCloudHypervisor(t)
	random := make([]byte, 4)
	_, _ = rand.Read(random) // never fails
	cluster := hex.EncodeToString(random)
	dir, err := os.MkdirTemp("", "bench") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	base := filepath.Join(dir, "base")
	if err := os.WriteFile(base, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(base, memoryMiB<<20); err != nil {
		t.Fatal(err)
	}
	open := func(path string) *os.File {
		t.Helper()
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	spawn := func(restore bool) vmm.Machine {
		t.Helper()
		id := core.NewID[core.SandboxID]()
		own := filepath.Join(dir, string(id))
		if err := os.Mkdir(own, 0o700); err != nil {
			t.Fatal(err)
		}
		m, err := cloudhypervisor.New(cloudhypervisor.Config{Binary: fake.Path}).Spawn(t.Context(), vmm.Spec{
			ID: id, Cluster: cluster, Dir: own, VCPUs: 1, MemoryMiB: memoryMiB, Base: open(base), Kernel: open(fake.Path), Initrd: open(os.DevNull), Restore: restore,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			clean, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
			defer cancel()
			_ = m.Kill(clean) // it may have ended
		})
		return m
	}
	waits, runs := spawn(true), spawn(false)
	if err := runs.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	all, err := findVMMs(cluster)
	if err != nil {
		t.Fatal(err)
	}
	found := map[int]process{}
	for _, p := range all {
		found[p.pid] = p
	}
	if p := found[runs.Handle().PID]; len(all) != 2 || p.memoryMiB != memoryMiB {
		t.Errorf("of %d and %d were found %+v", waits.Handle().PID, runs.Handle().PID, all)
	} else if u, err := measureVMM(p); err != nil || u.base == (inode{}) {
		t.Errorf("the one that runs is measured as %+v, %v", u, err)
	}
	if p := found[waits.Handle().PID]; p.memoryMiB != 0 {
		t.Errorf("the one that waits is %+v", p)
	} else if u, err := measureVMM(p); err != nil || u.base != (inode{}) || u.runs() || u.vmm == 0 {
		t.Errorf("the one that waits is measured as %+v, %v", u, err)
	}
	if others, err := findVMMs("0" + cluster); err != nil || len(others) > 0 {
		t.Errorf("of another cluster: %+v, %v", others, err)
	}
	if err := killLeftovers(cluster); err != nil {
		t.Error(err)
	}
	for _, m := range []vmm.Machine{waits, runs} {
		select {
		case <-m.Done():
		case <-time.After(time.Minute):
			t.Error("it outlived killLeftovers")
		}
	}
}
