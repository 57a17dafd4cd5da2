package runner

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
)

// memorySum is a digest of all of RAM as a child of the checkpoint starts with it: the base with the delta over it.
func (r *rig) memorySum(id core.CheckpointID) string {
	r.t.Helper()
	o, err := r.checkpoints.Open(id)
	if err != nil {
		r.t.Fatal(err)
	}
	defer o.Close()
	ram := make([]byte, o.Memory.Size)
	if _, err := o.Memory.File().ReadAt(ram, 0); err != nil {
		r.t.Fatal(err)
	}
	if o.Delta != nil {
		if err := o.Delta.Each(func(e memory.Extent, data []byte) error {
			copy(ram[e.Offset:e.End()], data)
			return nil
		}); err != nil {
			r.t.Fatal(err)
		}
	}
	return fmt.Sprintf("%x", sha256.Sum256(ram))
}

// TestRebaseChangesNothing compares children of one checkpoint from before and after its rebase, and their descendants.
func TestRebaseChangesNothing(t *testing.T) { //nolint:paralleltest // its machines take both CPUs
	r := newRig(t, func(c *Config) { c.Rebase.Off = true })
	parent := r.fork(r.template())
	r.sh(parent, `
		dd if=/dev/urandom of=/dev/shm/memory bs=1M count=12 status=none
		dd if=/dev/urandom of=disk bs=1M count=6 oflag=direct status=none
		(
			secret=$(cat /proc/sys/kernel/random/uuid) n=0
			mkfifo ask answer
			while read -r _ <ask; do n=$((n + 1)); echo "$secret $n" >answer; done
		) </dev/null >/dev/null 2>&1 &
		until [ -p answer ]; do :; done`)
	look := `
		sha256sum </dev/shm/memory
		dd if=disk bs=1M iflag=direct status=none | sha256sum
		echo >ask
		cat answer`
	ckpt := r.capture(parent)
	r.destroy(parent)
	if ckpt.DeltaBytes < 12<<20 {
		t.Fatalf("the delta has %d bytes; 12 MiB were written", ckpt.DeltaBytes)
	}
	before := r.memorySum(ckpt.ID)
	plain := r.fork(ckpt.ID)
	want := r.sh(plain, look)
	if len(strings.Fields(want)) != 6 {
		t.Fatalf("the first child answered %q", want)
	}

	if err := r.Rebase(ckpt.ID); err != nil {
		t.Fatal(err)
	}
	after, err := r.Checkpoint(ckpt.ID)
	if err != nil {
		t.Fatal(err)
	}
	if after.Base == ckpt.Base || after.DeltaBytes != 0 {
		t.Errorf("after the rebase the base is %s and the delta %d bytes; it was %s", after.Base, after.DeltaBytes, ckpt.Base)
	}
	if got := r.memorySum(ckpt.ID); got != before {
		t.Errorf("the rebase changed the memory from %s to %s", before, got)
	}
	rebased := r.fork(ckpt.ID)
	if got := r.sh(rebased, look); got != want {
		t.Errorf("a child from after the rebase has\n%swant\n%s", got, want)
	}
	if got := r.sh(plain, look); got != strings.Replace(want, " 1\n", " 2\n", 1) {
		t.Errorf("the child from before the rebase goes on with\n%swant\n%s", got, want)
	}

	// The next generation: what was injected before is in the base now, so it is not in a child's delta.
	next := r.capture(rebased)
	if next.Base != after.Base || next.DeltaBytes > 10<<20 {
		t.Errorf("a checkpoint of the child names base %s and has a delta of %d bytes", next.Base, next.DeltaBytes)
	}
	if got := r.sh(r.fork(next.ID), look); got != strings.Replace(want, " 1\n", " 2\n", 1) {
		t.Errorf("a grandchild has\n%swant\n%s", got, want)
	}
}

// TestRebaseByPolicy forks until the policy wants a rebase, and finds the next child on the new base, on a shell that waited.
func TestRebaseByPolicy(t *testing.T) { //nolint:paralleltest // its machines take both CPUs
	r := newRig(t, func(c *Config) { c.Rebase.DeltaBytes, c.Warm = 12<<20, 1 })
	parent := r.fork(r.template())
	r.sh(parent, "dd if=/dev/urandom of=/dev/shm/memory bs=1M count=12 status=none")
	ckpt := r.capture(parent)
	r.destroy(parent)
	r.destroy(r.fork(ckpt.ID))
	deadline := time.After(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		now, err := r.Checkpoint(ckpt.ID)
		if err != nil {
			t.Fatal(err)
		}
		if now.Base != ckpt.Base && r.idle(now.Base) > 0 {
			break
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("the checkpoint was not rebased, or no shell waits on its new base: %+v", now)
		}
	}
	r.destroy(r.fork(ckpt.ID))
}

// idle counts the shells that wait on a base.
func (r *rig) idle(base core.BaseID) int {
	return r.warm.Ready(func(sh shape) bool { return sh.base == base })
}
