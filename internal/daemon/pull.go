package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/images/registry"
	"github.com/coppice-dev/coppice/runner/pulls"
	"github.com/coppice-dev/coppice/runner/room"
)

// Bounds of the images that a runner pulls for projects.
const (
	maxPulledBytes = 16 << 30      // of the layers of one, and of its files
	maxPulled      = 200           // that are kept
	pulledKept     = 2 * time.Hour // longer than the trash of a runner keeps checkpoints
	pullTime       = time.Hour
)

// pulling is how this host pulls an image for a project: without credentials, and onto the kernel of the image that the operator has
// named base. used says which images must stay; false: it does not know all.
func pulling(store *images.Store, floor int64, used func() (map[core.Digest]bool, bool)) pulls.Work {
	return func(ctx context.Context, in runnerapi.Pull, report func(runnerapi.PullState)) (_ runnerapi.PullState, err error) {
		if err := mayUnpack(); err != nil {
			return runnerapi.PullState{}, err
		}
		ctx, cancel := context.WithTimeoutCause(ctx, pullTime, core.Errorf(core.TimedOut, core.CodeTimedOut, "the image was not pulled within %s", pullTime))
		defer cancel()
		left, err := store.RemovePulled(ctx, used, pulledKept)
		if err == nil && left >= maxPulled {
			err = core.Errorf(core.Exhausted, core.CodeCapacity, "the runner has %d pulled images that are in use or younger than %s", left, pulledKept)
		}
		if err != nil {
			return runnerapi.PullState{}, err
		}
		most, err := roomForPull(store, floor)
		if err != nil {
			return runnerapi.PullState{}, err
		}
		layers, err := store.Layers(ctx)
		if err != nil {
			return runnerapi.PullState{}, err
		}
		defer func() { err = errors.Join(err, layers.Close()) }()
		state := runnerapi.PullState{Stage: runnerapi.PullFetching}
		report(state)
		pulled, err := registry.Pull(ctx, layers, registry.Options{
			Reference: in.Reference, Public: true, TrustedHosts: in.Hosts, PlainHTTP: in.PlainHTTP, MaxBytes: most, Timeout: pullTime,
			Keychain: authn.NewMultiKeychain(), // nobody's
			Progress: func(p registry.Progress) {
				state.Layers, state.LayersDone, state.Bytes, state.BytesDone = p.Layers, p.LayersDone, p.Bytes, p.BytesDone
				report(state)
			},
		})
		if err != nil {
			return runnerapi.PullState{}, err
		}
		state.Stage, state.Reference, state.Manifest = runnerapi.PullUnpacking, pulled.Reference, pulled.Manifest
		report(state)
		img, err := build.Image(ctx, store, build.Options{
			On: images.DefaultName, ForProject: true, MaxBytes: most,
			Pulled: &build.Pulled{Reference: pulled.Reference, Repository: pulled.Repository, Manifest: pulled.Manifest, Layers: pulled.Layers, Config: pulled.Config, Store: layers},
		})
		state.Image = img.Digest
		return state, err
	}
}

// roomForPull is how many bytes the layers of a pull, and its files, may have. All pulls may take half of the space above the floor,
// because machines and checkpoints need the rest; what earlier pulls have left is in it, so failed ones add up to no more.
func roomForPull(store *images.Store, floor int64) (int64, error) {
	free, err := room.New(store.Dir(), floor).Free()
	if err != nil {
		return 0, err
	}
	used, err := store.PulledBytes()
	if err != nil {
		return 0, err
	}
	most := min(maxPulledBytes, ((free+used)/2-used)/(3*pulls.Parallel)) // the layers, the unpacked files, and the root file system made of them
	if most <= 0 {
		return 0, core.Errorf(core.Exhausted, core.CodeDiskFull, "the runner has no space for another pulled image: those that it has take %d MiB, and %d MiB are free", used>>20, free>>20)
	}
	return most, nil
}

// usedImages are the images of which this host has a checkpoint. It returns false if a sandbox is of a checkpoint that is gone: it may
// need any image.
func (h *Host) usedImages() (map[core.Digest]bool, bool) {
	used, known := map[core.Digest]bool{}, map[core.CheckpointID]bool{}
	sandboxes := h.Runner.Sandboxes() // first: a checkpoint that is made later is younger than its image
	for _, c := range h.Runner.Checkpoints() {
		used[c.Image], known[c.ID] = true, true
	}
	for _, s := range sandboxes {
		if s.State != runnerapi.SandboxDead && !known[s.Checkpoint] {
			return used, false
		}
	}
	return used, true
}

// mayUnpack fails if this process may not give the files of an image their owners, modes and attributes.
func mayUnpack() error {
	for name, number := range map[string]uintptr{"CAP_FSETID": unix.CAP_FSETID, "CAP_MKNOD": unix.CAP_MKNOD, "CAP_SETFCAP": unix.CAP_SETFCAP} {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, number, 0, 0, 0)
		if err != nil {
			return fmt.Errorf("read the capabilities of the runner: %w", err)
		}
		if has == 0 {
			return core.Errorf(core.FailedPrecondition, core.CodeUnsupported,
				"the runner's unit lacks %s, which unpacking an image needs; the operator installs deploy/systemd/pull-images.conf", name)
		}
	}
	return nil
}
