package sealing

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// maxManifests bounds the manifests that are compared with rows at the same time: each takes up to twice manifest.MaxBytes of memory.
const maxManifests = 4

// checkManifest reads the manifest that a runner wants to commit and compares it with the
// checkpoint's row. Other runners get the digest of this manifest and believe it, so its project,
// image, class and sizes must be those that the controller knows, and it must not name an object
// that the checkpoint does not need.
func (s *Sealer) checkManifest(ctx context.Context, runner core.RunnerID, id core.CheckpointID, in runnerapi.CommitSeal) error {
	var at Attempt
	var cp model.Checkpoint
	err := s.store.InSystem(ctx, func(tx Tx) (err error) {
		if err := tx.HasLease(ctx, runner, in.LeaseEpoch); err != nil {
			return err
		}
		at, cp, err = tx.LockSeal(ctx, id)
		return err
	})
	if err != nil {
		return err
	}
	if cp.State == core.CheckpointSealed && *cp.Stored == in.Stored || at.RunnerID != runner || at.Attempt != in.Attempt || at.LeaseEpoch != in.LeaseEpoch {
		return nil // it was committed before, or CommitSeal refuses it for this reason
	}
	if err := checkCommit(at, in); err != nil {
		return err
	}
	select {
	case s.manifests <- struct{}{}:
		defer func() { <-s.manifests }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	store := s.cfg.Blobs
	if envelope.Encrypted(in.Stored.Manifest) {
		keys, err := s.cfg.Keys.Of(ctx, []string{in.Stored.Manifest})
		if err != nil {
			return err
		}
		store = envelope.With(store, envelope.NewRing(keys))
	}
	h, err := snapshotstore.ReadHeader(ctx, store, manifest.Ref{Key: in.Stored.Manifest, Digest: in.Stored.Digest, Bytes: in.Stored.Bytes})
	if err != nil {
		return err
	}
	if err := h.Check(rowClaim(cp)); err != nil {
		return err
	}
	return checkHeader(cp, h, in)
}

// rowClaim returns the fields that a checkpoint's row requires of its manifest.
func rowClaim(cp model.Checkpoint) manifest.Claim {
	want := cp.Expected()
	return manifest.Claim{
		ProjectID: want.ProjectID, CheckpointID: cp.ID, Parent: want.Parent, GuestImage: want.Image, Class: want.Class.Fields(), Resources: want.Resources,
	}
}

// checkHeader refuses sizes that the checkpoint cannot have, and objects that are not its own to name.
func checkHeader(cp model.Checkpoint, h manifest.Header, in runnerapi.CommitSeal) error {
	bad := func(format string, a ...any) error {
		return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest of checkpoint "+string(cp.ID)+": "+format, a...)
	}
	most := map[string]int64{
		runnerapi.ImageMemory: int64(cp.Resources.MemoryMiB) << 20, runnerapi.ImageDisk: int64(cp.Resources.DiskGiB) << 30,
		runnerapi.ImageState: runnerapi.MaxDeviceState, runnerapi.ImageSurvey: runnerapi.MaxDeviceState, runnerapi.ImageRoot: runnerapi.MaxRoot,
	}
	for _, image := range h.Images {
		if bytes, known := most[image.Name]; !known || image.Bytes > bytes {
			return bad("its image %q of %d bytes is too large, or is not an image of a checkpoint", core.Clip(image.Name), image.Bytes)
		}
	}
	needed := make(map[string]bool, len(in.Needs)+1)
	for _, key := range in.Needs {
		needed[key] = true
	}
	written := make(map[string]int64, len(in.Written))
	for _, o := range in.Written {
		written[o.Key] = o.Bytes
	}
	for _, o := range h.Objects {
		if bytes, own := written[o.Key]; !needed[o.Key] || own && bytes != o.Bytes {
			return bad("it names the object %q, but its runner named no such object, or one of another size", core.Clip(o.Key))
		}
	}
	for _, s := range h.Shared {
		if !needed[s.Key] {
			return bad("it shares nodes with %q, but its runner named no such object", core.Clip(s.Key))
		}
	}
	return nil
}
