package placement_test

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

var class = runnerapi.RunnerClass{Arch: "amd64", Accelerator: "tcg", CPUModel: "max", VMM: "qemu", VMMVersion: "7.2", MachineType: "pc-q35-7.2"}

func runner(id string, change func(*placement.Runner)) placement.Runner {
	r := placement.Runner{
		ID: core.RunnerID(id), Class: class, Fresh: true, Capacity: runnerapi.Capacity{Sandboxes: 10, VCPUs: 20, MemoryMiB: 10_000},
		Images: []core.Digest{"sha256:base"}, DiskFreeMB: 100_000,
	}
	if change != nil {
		change(&r)
	}
	return r
}

func TestChoose(t *testing.T) {
	t.Parallel()
	shape := core.Resources{VCPUs: 2, MemoryMiB: 1000}
	other := class
	other.CPUModel = "host+avx512"
	arm := other
	arm.Arch = "arm64"
	full := func(r *placement.Runner) { r.Used = runnerapi.Capacity{Sandboxes: 9} }
	for name, c := range map[string]struct {
		fleet  []placement.Runner
		req    placement.Request
		want   core.RunnerID
		code   core.Code
		detail string
	}{
		"nobody":     {req: placement.Request{Count: 1}, code: core.CodeNoRunner},
		"all silent": {fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.Fresh = false })}, req: placement.Request{Count: 1}, code: core.CodeNoRunner},
		"draining":   {fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.Draining = true })}, req: placement.Request{Count: 1}, code: core.CodeNoRunner, detail: "all runners that can be reached are draining"},
		"the only":   {fleet: []placement.Runner{runner("a", nil)}, req: placement.Request{Count: 1, Resources: shape}, want: "a"},
		"the emptier": {
			fleet: []placement.Runner{runner("a", full), runner("b", nil), runner("c", full)}, req: placement.Request{Count: 1, Resources: shape}, want: "b",
		},
		"the fuller when it holds the bytes": {
			fleet: []placement.Runner{runner("a", full), runner("b", nil)}, req: placement.Request{Count: 1, Resources: shape, Holder: "a", Class: &class}, want: "a",
		},
		"one near": {
			fleet: []placement.Runner{runner("a", nil), runner("b", full), runner("c", nil)}, req: placement.Request{Count: 1, Resources: shape, Near: map[core.RunnerID]int{"b": 0, "c": 1}}, want: "b",
		},
		"the emptier of those near": {
			fleet: []placement.Runner{runner("a", full), runner("b", nil), runner("c", nil)}, req: placement.Request{Count: 1, Resources: shape, Near: map[core.RunnerID]int{"a": 0, "c": 0}}, want: "c",
		},
		"the next nearest when there is no room": {
			fleet: []placement.Runner{runner("a", nil), runner("b", full), runner("c", nil)}, req: placement.Request{Count: 2, Resources: shape, Near: map[core.RunnerID]int{"b": 0, "c": 1}}, want: "c",
		},
		"far away when those near drain or are silent": {
			fleet: []placement.Runner{runner("a", nil), runner("b", func(r *placement.Runner) { r.Draining = true }), runner("c", func(r *placement.Runner) { r.Fresh = false })},
			req:   placement.Request{Count: 1, Near: map[core.RunnerID]int{"b": 0, "c": 0, "gone": 0}}, want: "a",
		},
		"near, of another class": {
			fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.Class = other }), runner("b", full)},
			req:   placement.Request{Count: 1, Class: &class, Near: map[core.RunnerID]int{"a": 0}}, want: "b",
		},
		"ties go by id": {fleet: []placement.Runner{runner("b", nil), runner("a", nil)}, req: placement.Request{Count: 1}, want: "a"},
		"holder silent": {
			fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.Fresh = false }), runner("b", nil)}, req: placement.Request{Count: 1, Holder: "a"},
			code: core.CodeRunnerUnreachable, detail: "runner a",
		},
		"holder unknown":  {fleet: []placement.Runner{runner("b", nil)}, req: placement.Request{Count: 1, Holder: "a"}, code: core.CodeRunnerUnreachable},
		"holder draining": {fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.Draining = true })}, req: placement.Request{Count: 1, Holder: "a"}, code: core.CodeNoRunner},
		"other cpu": {
			fleet: []placement.Runner{runner("a", nil)}, req: placement.Request{Count: 1, Holder: "a", Class: &other}, code: core.CodeIncompatibleHost,
			detail: `its cpu_model is "host+avx512" and the runner's is "max"`,
		},
		"other arch": {fleet: []placement.Runner{runner("a", nil)}, req: placement.Request{Count: 1, Class: &arm}, code: core.CodeIncompatibleHost, detail: `its arch is "arm64"`},
		"one of the class": {
			fleet: []placement.Runner{runner("a", nil), runner("b", func(r *placement.Runner) { r.Class = other })}, req: placement.Request{Count: 1, Class: &other}, want: "b",
		},
		"image elsewhere": {
			fleet: []placement.Runner{runner("a", nil), runner("b", func(r *placement.Runner) { r.Images = []core.Digest{"sha256:demo"} })},
			req:   placement.Request{Count: 1, Image: "sha256:demo"}, want: "b",
		},
		"image nowhere": {fleet: []placement.Runner{runner("a", nil)}, req: placement.Request{Count: 1, Image: "sha256:demo"}, code: core.CodeImageNotFound},
		"sandboxes":     {fleet: []placement.Runner{runner("a", full)}, req: placement.Request{Count: 2}, code: core.CodeCapacity, detail: "sandboxes"},
		"vcpus": {
			fleet: []placement.Runner{runner("a", nil)}, req: placement.Request{Count: 6, Resources: core.Resources{VCPUs: 4, MemoryMiB: 1}}, code: core.CodeCapacity, detail: "vcpus",
		},
		"memory": {
			fleet: []placement.Runner{runner("a", nil)}, req: placement.Request{Count: 6, Resources: core.Resources{VCPUs: 1, MemoryMiB: 2000}}, code: core.CodeCapacity, detail: "memory_mib",
		},
		"the fuller when the other's disk is full": {
			fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.DiskFreeMB = 0 }), runner("b", full)}, req: placement.Request{Count: 1, Resources: shape}, want: "b",
		},
		"far away when the disk of one near is full": {
			fleet: []placement.Runner{runner("a", nil), runner("b", func(r *placement.Runner) { r.DiskFreeMB = placement.RequestDiskMB + 3*placement.ForkDiskMB - 1 })},
			req:   placement.Request{Count: 3, Near: map[core.RunnerID]int{"b": 0}}, want: "a",
		},
		"a disk with just enough": {
			fleet: []placement.Runner{runner("a", nil), runner("b", func(r *placement.Runner) { r.DiskFreeMB = placement.RequestDiskMB + 3*placement.ForkDiskMB })},
			req:   placement.Request{Count: 3, Near: map[core.RunnerID]int{"b": 0}}, want: "b",
		},
		"24 children on a small disk": {
			fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.Capacity, r.DiskFreeMB = runnerapi.Capacity{}, 64 })}, req: placement.Request{Count: 24}, want: "a",
		},
		"every disk full": {
			fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.DiskFreeMB = 0 }), runner("b", func(r *placement.Runner) { r.DiskFreeMB = -5 })},
			req:   placement.Request{Count: 1}, code: core.CodeDiskFull, detail: "delete checkpoints",
		},
		"holder's disk full": {
			fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.DiskFreeMB = 0 }), runner("b", nil)}, req: placement.Request{Count: 1, Holder: "a"},
			code: core.CodeDiskFull, detail: "runner a, which holds the checkpoint",
		},
		"one disk full and the other runner busy": {
			fleet: []placement.Runner{runner("b", func(r *placement.Runner) { r.Used.Sandboxes = 10 }), runner("a", func(r *placement.Runner) { r.DiskFreeMB = 0 })},
			req:   placement.Request{Count: 1}, code: core.CodeCapacity, detail: "sandboxes",
		},
		"just enough": {fleet: []placement.Runner{runner("a", nil)}, req: placement.Request{Count: 10, Resources: core.Resources{VCPUs: 2, MemoryMiB: 1000}}, want: "a"},
		"unlimited": {
			fleet: []placement.Runner{runner("a", func(r *placement.Runner) { r.Capacity = runnerapi.Capacity{} })}, req: placement.Request{Count: 256, Resources: shape}, want: "a",
		},
		"unlimited, but for its addresses": {
			fleet: []placement.Runner{runner("a", func(r *placement.Runner) {
				r.Capacity, r.Used = runnerapi.Capacity{}, runnerapi.Capacity{Sandboxes: placement.MaxSandboxes - 1}
			})},
			req: placement.Request{Count: 2, Resources: shape}, code: core.CodeCapacity, detail: "addresses",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := placement.Choose(c.fleet, c.req)
			if got != c.want || core.CodeOf(err) != c.code || c.detail != "" && !strings.Contains(err.Error(), c.detail) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

// TestFullDiskIsNotForever: room on a disk comes back when a checkpoint is deleted, so the request may wait for it. A request that
// is too big for every empty runner does not wait, whatever the disks hold.
func TestFullDiskIsNotForever(t *testing.T) {
	t.Parallel()
	fleet := []placement.Runner{runner("a", func(r *placement.Runner) { r.DiskFreeMB = 0 })}
	for count, never := range map[int]bool{1: false, 2: false, 11: true} {
		for _, even := range []bool{false, true} {
			_, err := placement.Spread(fleet, placement.Request{Count: count, Resources: core.Resources{VCPUs: 1, MemoryMiB: 1}}, even)
			if full, ok := errors.AsType[*placement.FullError](err); !ok || full.Never != never {
				t.Errorf("%d, even: %t: got %+v, %v; want never: %t", count, even, full, err, never)
			}
		}
	}
}

// TestChooseLeavesItsInputAlone calls it twice with one fleet.
func TestChooseLeavesItsInputAlone(t *testing.T) {
	t.Parallel()
	fleet := []placement.Runner{runner("a", func(r *placement.Runner) { r.Fresh = false }), runner("b", nil)}
	for range 2 {
		if got, err := placement.Choose(fleet, placement.Request{Count: 1, Image: "sha256:base", Class: &class}); got != "b" || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
	}
	if fleet[0].ID != "a" || fleet[1].ID != "b" {
		t.Errorf("%+v", fleet)
	}
}

func TestSpread(t *testing.T) {
	t.Parallel()
	shape := core.Resources{VCPUs: 2, MemoryMiB: 1000} // ten of them fill a runner
	used := func(n int) func(*placement.Runner) {
		return func(r *placement.Runner) {
			r.Used = runnerapi.Capacity{Sandboxes: n, VCPUs: 2 * n, MemoryMiB: 1000 * n}
		}
	}
	other := class
	other.VMMVersion = "8"
	fleet := []placement.Runner{runner("a", used(4)), runner("b", nil), runner("c", used(8))}
	for name, c := range map[string]struct {
		fleet []placement.Runner
		req   placement.Request
		even  bool
		want  map[core.RunnerID]int
		code  core.Code
		never bool
	}{
		"all on one":                 {fleet: fleet, req: placement.Request{Count: 10}, want: map[core.RunnerID]int{"b": 10}},
		"near first, then others":    {fleet: fleet, req: placement.Request{Count: 12, Near: map[core.RunnerID]int{"c": 0, "a": 1}}, want: map[core.RunnerID]int{"a": 6, "b": 4, "c": 2}},
		"all that there is room for": {fleet: fleet, req: placement.Request{Count: 18}, want: map[core.RunnerID]int{"a": 6, "b": 10, "c": 2}},
		"one more":                   {fleet: fleet, req: placement.Request{Count: 19}, code: core.CodeCapacity},
		"never":                      {fleet: fleet, req: placement.Request{Count: 31}, code: core.CodeCapacity, never: true},
		"not beyond the holder":      {fleet: fleet, req: placement.Request{Count: 7, Holder: "a"}, code: core.CodeCapacity},
		"even":                       {fleet: fleet, even: true, req: placement.Request{Count: 6, Near: map[core.RunnerID]int{"c": 0}}, want: map[core.RunnerID]int{"a": 1, "b": 5}},
		"evener":                     {fleet: fleet[:2], even: true, req: placement.Request{Count: 10}, want: map[core.RunnerID]int{"a": 3, "b": 7}},
		"even, of one class": {
			fleet: append([]placement.Runner{runner("d", func(r *placement.Runner) { r.Class = other })}, fleet...), even: true, req: placement.Request{Count: 3, Class: &class}, want: map[core.RunnerID]int{"b": 3},
		},
		"even, nobody": {even: true, req: placement.Request{Count: 3}, code: core.CodeNoRunner},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.req.Resources = shape
			list, err := placement.Spread(c.fleet, c.req, c.even)
			got := map[core.RunnerID]int{}
			for _, id := range list {
				if id != "" {
					got[id]++
				}
			}
			full, _ := errors.AsType[*placement.FullError](err)
			if !maps.Equal(got, c.want) || core.CodeOf(err) != c.code || full != nil && full.Never != c.never {
				t.Errorf("got %v, %v; want %v", got, err, c.want)
			}
		})
	}
}
