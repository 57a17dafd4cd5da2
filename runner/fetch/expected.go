package fetch

import (
	"context"
	"errors"
	"fmt"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// The controller's rows decide what a checkpoint is. A manifest, an ancestor and a copy that is already on this host must all agree
// with them. It does not matter which request brought the copy and what that request expected.

// errUnfit says that nothing may use the copy on this host.
var errUnfit = errors.New("the copy must not be used")

func claimOf(id core.CheckpointID, want runnerapi.Expected) manifest.Claim {
	return manifest.Claim{
		ProjectID: want.ProjectID, CheckpointID: id, Parent: want.Parent, GuestImage: want.Image, Class: want.Class.Fields(), Resources: want.Resources,
	}
}

// expect compares a checkpoint on this host with what a caller knows of it: its place in the store and the fields of its row. The host does not
// know the project of a checkpoint that it captured itself, so it does not compare that field.
func (f *Fetcher) expect(ctx context.Context, rec *checkpoints.Record, sources []runnerapi.Stored, want *runnerapi.Expected) error {
	if err := f.checkOldRoot(rec); err != nil {
		return err
	}
	if rec.Fetched && len(sources) > 0 && sources[0].CheckpointID == rec.ID {
		if err := f.fetchedAs(rec.ID, sources[0]); err != nil {
			return err
		}
	}
	if want == nil {
		return nil
	}
	h := manifest.Header{
		ProjectID: want.ProjectID, CheckpointID: rec.ID, Parent: rec.Parent, GuestImage: rec.Image, Class: rec.Class.Fields(), Resources: rec.Resources,
	}
	if rec.Fetched {
		var err error
		if h.ProjectID, err = f.projectOf(ctx, rec); err != nil {
			return fmt.Errorf("find the project of the copy of checkpoint %s on this runner: %w", rec.ID, err)
		}
	}
	return h.Check(claimOf(rec.ID, *want))
}

// projectOf returns the project of a copy. Records of older runners do not name it, but the manifest of the copy does.
func (f *Fetcher) projectOf(ctx context.Context, rec *checkpoints.Record) (core.ProjectID, error) {
	if rec.Project != "" {
		return rec.Project, nil
	}
	at, err := f.cfg.Checkpoints.StoredAt(rec.ID)
	if err != nil {
		return "", err
	}
	snapshot, err := f.cfg.Uploads.Snapshot(ctx, at)
	if err != nil {
		return "", err
	}
	return snapshot.Header().ProjectID, nil
}

// fetchedAs refuses a copy that was fetched by a manifest other than at.
func (f *Fetcher) fetchedAs(id core.CheckpointID, at runnerapi.Stored) error {
	was, err := f.cfg.Checkpoints.StoredAt(id)
	if err != nil {
		return fmt.Errorf("find the manifest of the copy of checkpoint %s on this runner: %w", id, err)
	}
	if was.Digest != at.Digest {
		return core.Wrapf(errUnfit, core.DataLoss, core.CodeManifestInvalid,
			"the copy of checkpoint %s on this runner was fetched by the manifest %s, but the controller's row names %s; end what uses the copy, or fork on another runner",
			id, was.Digest.Short(), at.Digest.Short())
	}
	return nil
}

// checkOldRoot refuses a copy of an older runner whose root file system was never verified. Older runners kept root file systems from the store
// under the name of their image, shared by all projects. The copy is fetched again; it then has a root file system of its own project.
func (f *Fetcher) checkOldRoot(rec *checkpoints.Record) error {
	if !rec.Fetched || rec.Root != "" || rec.Project != "" {
		return nil
	}
	if _, err := f.cfg.Images.Get(string(rec.Image)); core.CategoryOf(err) != core.NotFound {
		return err // checkRoot compares it with the image
	}
	return core.Wrapf(errUnfit, core.DataLoss, core.CodeCheckpointCorrupt,
		"the copy of checkpoint %s on this runner has a root file system that an older runner kept without verifying it; end what uses the copy, or fork on another runner", rec.ID)
}

// checkAncestor refuses an ancestor that a checkpoint cannot descend from. An ancestor has the same image, and it is of the same
// project or of the system's, which has the templates.
func checkAncestor(h manifest.Header, project core.ProjectID, image core.Digest) error {
	var field string
	switch {
	case h.GuestImage != image:
		field = "guest_image"
	case h.ProjectID != project && h.ProjectID != core.SystemProject:
		field = "project_id"
	default:
		return nil
	}
	return core.Errorf(core.DataLoss, core.CodeManifestInvalid,
		"the manifest of checkpoint %s has another %s than the checkpoint that is said to descend from it, so its bytes are not used", h.CheckpointID, field)
}
