// Package placement picks a runner for new sandboxes. It is a pure function of a snapshot of the
// fleet, so every rule can be tested as a table. It knows nothing of rows or calls. The chosen
// runner may still refuse.
package placement

import (
	"cmp"
	"errors"
	"math"
	"slices"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Runner is what placement needs to know of a runner.
type Runner struct {
	ID       core.RunnerID
	Class    runnerapi.RunnerClass
	Fresh    bool // its lease has not run out
	Draining bool
	Capacity runnerapi.Capacity // a dimension of 0 is not limited
	Used     runnerapi.Capacity
	Images   []core.Digest
	// DiskFreeMB is what may be written on its disk, as its last heartbeat said: 0 when only the floor for running machines is left.
	DiskFreeMB int64
}

// RequestDiskMB is the free disk that a runner needs to get a request. ForkDiskMB is the free disk
// that it needs in addition for each new sandbox. A sandbox shares the files that it is forked from, so
// a new one takes little. The runner itself reserves the room for a fetch.
const (
	RequestDiskMB = 32
	ForkDiskMB    = 1
)

// MaxSandboxes bounds the sandboxes of a runner, also if the runner reports more: it has 65,279 addresses for guests, and among the
// last of them a free one is hard to find. runner_loads.cap_sandboxes has it too.
const MaxSandboxes = 64_000

// diskMB is the free disk that so many new sandboxes need.
func diskMB(count int) int64 {
	if count == 0 {
		return 0
	}
	return RequestDiskMB + int64(count)*ForkDiskMB
}

// disk is the name of that dimension.
const disk = "disk"

// Request says what is to be placed.
type Request struct {
	Count     int
	Resources core.Resources
	Image     core.Digest            // only runners that hold it; empty: any
	Holder    core.RunnerID          // the only runner with the bytes of the checkpoint; empty: any
	Near      map[core.RunnerID]int  // the lower, the less has to be fetched there; runners that are not in it come last
	Class     *runnerapi.RunnerClass // a hard rule: equal in every field; nil: any
}

// Choose returns a runner with room: one that has to fetch the least, and among these the one with the most room. Its errors say what to
// do: NO_RUNNER when none can be reached, RUNNER_UNREACHABLE when the one with the bytes cannot, INCOMPATIBLE_HOST naming the field,
// IMAGE_NOT_FOUND, CAPACITY naming the dimension, and DISK_FULL.
func Choose(fleet []Runner, req Request) (core.RunnerID, error) {
	candidates, err := eligible(fleet, req)
	if err != nil {
		return "", err
	}
	full, never := "", true
	candidates = slices.DeleteFunc(candidates, func(r Runner) bool {
		what := lacks(r, req)
		never = never && lacks(emptied(r), req) != ""
		if what != "" && (what != disk || full == "") { // a lack that ends when others end is the better advice
			full = what
		}
		return what != ""
	})
	if len(candidates) == 0 {
		err := Full(req, full)
		err.Never = never
		return "", err
	}
	return slices.MinFunc(candidates, func(a, b Runner) int {
		return cmp.Or(distance(req, a)-distance(req, b), cmp.Compare(load(a), load(b)), cmp.Compare(a.ID, b.ID))
	}).ID, nil
}

// emptied is the runner as it would be when nothing ran on it and its disk had room.
func emptied(r Runner) Runner {
	r.Used, r.DiskFreeMB = runnerapi.Capacity{}, math.MaxInt64
	return r
}

func distance(req Request, r Runner) int {
	if d, ok := req.Near[r.ID]; ok {
		return d
	}
	return math.MaxInt32
}

// Spread returns a runner for each of those that are asked for. They all go to one, as Choose says, if there is one with room for them
// and they are not to be even; else each goes to where Choose would have put it after those before. Even ones go to the emptiest,
// wherever the least has to be fetched.
func Spread(fleet []Runner, req Request, even bool) ([]core.RunnerID, error) {
	if !even {
		id, err := Choose(fleet, req)
		if _, full := errors.AsType[*FullError](err); !full || req.Holder != "" || req.Count == 1 {
			return slices.Repeat([]core.RunnerID{id}, req.Count), err
		}
	}
	list, err := spread(fleet, req, even)
	full, ok := errors.AsType[*FullError](err)
	if !ok {
		return list, err
	}
	empty := slices.Clone(fleet)
	for i := range empty {
		empty[i] = emptied(empty[i])
	}
	_, err = spread(empty, req, even)
	never := Full(req, full.what)
	never.Never = err != nil
	return nil, never
}

func spread(fleet []Runner, req Request, even bool) ([]core.RunnerID, error) {
	fleet = slices.Clone(fleet)
	one := req
	if one.Count = 1; even {
		one.Near = nil
	}
	list := make([]core.RunnerID, req.Count)
	for i := range list {
		id, err := Choose(fleet, one)
		if err != nil {
			return nil, err
		}
		list[i] = id
		at := slices.IndexFunc(fleet, func(r Runner) bool { return r.ID == id })
		used := &fleet[at].Used
		used.Sandboxes++
		used.VCPUs += req.Resources.VCPUs
		used.MemoryMiB += req.Resources.MemoryMiB
		fleet[at].DiskFreeMB -= ForkDiskMB
	}
	return list, nil
}

// Fits returns a FullError when a runner, with what was asked for placed on it already, has more than it has room for.
func Fits(r Runner, req Request) error {
	if what := lacks(r, Request{}); what != "" {
		return Full(req, what)
	}
	return nil
}

// FullError is CAPACITY: there is no room now.
type FullError struct {
	Holder core.RunnerID // the runner that it would have to be; empty: any
	Never  bool          // there would be none if all that runs were gone and every disk had room
	what   string
	err    *core.Error
}

// Full makes a FullError that names what there is not enough of.
func Full(req Request, what string) *FullError {
	if what == disk {
		where := "no runner has"
		if req.Holder != "" {
			where = "runner " + string(req.Holder) + ", which holds the checkpoint, does not have"
		}
		return &FullError{Holder: req.Holder, what: what, err: core.Errorf(core.Exhausted, core.CodeDiskFull,
			"%s room on its disk for %d sandboxes: they need %d MB that may be written; delete checkpoints, give the data directories of runners more room, or add a runner",
			where, req.Count, diskMB(req.Count))}
	}
	return &FullError{Holder: req.Holder, what: what, err: core.Errorf(core.Exhausted, core.CodeCapacity,
		"no runner has room for %d sandboxes of %d vCPU and %d MiB: not enough %s; terminate workspaces or add a runner",
		req.Count, req.Resources.VCPUs, req.Resources.MemoryMiB, what)}
}

func (e *FullError) Error() string { return e.err.Error() }

// Unwrap returns the core error.
func (e *FullError) Unwrap() error { return e.err }

// eligible applies every rule but room, in the order in which their errors help most.
func eligible(fleet []Runner, req Request) ([]Runner, error) {
	list := slices.DeleteFunc(slices.Clone(fleet), func(r Runner) bool { return !r.Fresh || r.Draining })
	if req.Holder != "" {
		at := slices.IndexFunc(fleet, func(r Runner) bool { return r.ID == req.Holder })
		if at < 0 || !fleet[at].Fresh {
			return nil, core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "runner %s, which holds the checkpoint, has not been heard of lately; start it or wait for it", req.Holder)
		}
		// A draining runner takes no new work, and no other host has the bytes: forks are refused, not moved.
		if fleet[at].Draining {
			return nil, core.Errorf(core.Unavailable, core.CodeNoRunner, "runner %s, which holds the checkpoint, is draining", req.Holder)
		}
		list = []Runner{fleet[at]}
	}
	if len(list) == 0 && slices.ContainsFunc(fleet, func(r Runner) bool { return r.Fresh && r.Draining }) {
		return nil, core.Errorf(core.Unavailable, core.CodeNoRunner, "all runners that can be reached are draining and take no new work; start another, or end the drain of one with `coppice fleet undrain`")
	}
	if len(list) == 0 {
		return nil, core.Errorf(core.Unavailable, core.CodeNoRunner, "no runner is registered and reachable; start one with `coppice dev` or `coppice runner`")
	}
	if req.Class != nil {
		differs := ""
		list = slices.DeleteFunc(list, func(r Runner) bool {
			field := req.Class.Difference(r.Class)
			if field != "" {
				differs = field
			}
			return field != ""
		})
		if len(list) == 0 {
			return nil, core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost,
				"no runner can load this checkpoint: %s; start its runner again as it was when the checkpoint was taken (--vmm, --accel, the VMM's version), or create a new workspace", differs)
		}
	}
	if req.Image != "" {
		list = slices.DeleteFunc(list, func(r Runner) bool { return !slices.Contains(r.Images, req.Image) })
		if len(list) == 0 {
			return nil, core.Errorf(core.NotFound, core.CodeImageNotFound, "no reachable runner holds image %s; build it there with `coppice image build`", req.Image.Short())
		}
	}
	return list, nil
}

func lacks(r Runner, req Request) string {
	for _, d := range dimensions(r, req) {
		if d.capacity > 0 && d.used+d.asked > d.capacity {
			return d.name
		}
	}
	if diskMB(req.Count) > r.DiskFreeMB {
		return disk
	}
	return ""
}

// load is how full the fullest dimension of a runner is.
func load(r Runner) float64 {
	worst := 0.0
	for _, d := range dimensions(r, Request{}) {
		if d.capacity > 0 {
			worst = max(worst, float64(d.used)/float64(d.capacity))
		}
	}
	return worst
}

type dimension struct {
	name                  string
	capacity, used, asked int
}

func dimensions(r Runner, req Request) []dimension {
	return []dimension{
		{"sandboxes", r.Capacity.Sandboxes, r.Used.Sandboxes, req.Count},
		{"vcpus", r.Capacity.VCPUs, r.Used.VCPUs, req.Count * req.Resources.VCPUs},
		{"memory_mib", r.Capacity.MemoryMiB, r.Used.MemoryMiB, req.Count * req.Resources.MemoryMiB},
		{"addresses", MaxSandboxes, r.Used.Sandboxes, req.Count},
	}
}
