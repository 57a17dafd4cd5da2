package controller

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// importLease is how long an import stays valid after its last renewal. The grace of the store must be longer.
const importLease = time.Minute

// ErrImportLost says that an import was given up because it was not renewed in time.
var ErrImportLost = core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "the import was given up: the database could not be reached for too long; repeat it")

// Where a controller may be killed while it imports.
var (
	importBegun   = failpoint.New("controller.import_begun")   // the row is there, no object is
	importWritten = failpoint.New("controller.import_written") // every object is there, the checkpoint's row is not
)

// ImportTx keeps imports under way.
type ImportTx interface {
	// BeginImport inserts an import and returns the prefix of the keys of its objects.
	BeginImport(ctx context.Context, project core.ProjectID, id core.CheckpointID, lease time.Duration) (prefix string, err error)
	// RenewImport extends the lease; ErrImportLost.
	RenewImport(ctx context.Context, id core.CheckpointID, lease time.Duration) error
	// CommitImport makes an import a sealed checkpoint; ErrImportLost, QUOTA_EXCEEDED, NAME_TAKEN.
	CommitImport(ctx context.Context, cp Checkpoint, in runnerapi.CommitSeal) (Checkpoint, error)
	// EndImport gives an import up, and says whether it had been committed. Objects that it has written become debris.
	EndImport(ctx context.Context, project core.ProjectID, id core.CheckpointID) (committed bool, err error)
	// AbandonImports gives up those that are not renewed, of all projects, and frees the idempotency keys of their requests.
	AbandonImports(ctx context.Context) ([]core.CheckpointID, error)
}

// importing is one import.
type importing struct {
	c       *Controller
	project core.ProjectID
	file    *snapshotstore.Import
	row     Checkpoint      // the row that will be inserted
	record  json.RawMessage // of its manifest
	prefix  string
}

// ImportCheckpoint reads an exported checkpoint and makes it a checkpoint of the project, without a parent. IMPORT_INVALID says what is wrong
// with a file. If it fails, there is no checkpoint, and the stored objects are removed like those of any failed attempt.
func (c *Controller) ImportCheckpoint(ctx context.Context, project core.ProjectID, name string, body io.Reader) (Checkpoint, error) {
	if err := c.StoreConfigured(); err != nil {
		return Checkpoint{}, err
	}
	leave, err := enter(c.imports, "imports")
	if err != nil {
		return Checkpoint{}, err
	}
	defer leave()
	im := &importing{c: c, project: project}
	if im.file, err = snapshotstore.ReadImport(body); err != nil {
		return Checkpoint{}, err
	}
	if err := im.describe(name); err != nil {
		return Checkpoint{}, err
	}
	if claim := request.ClaimOf(ctx); claim != nil { // the content of the file is part of the request
		claim.Hash = sha256.Sum256(slices.Concat(claim.Hash[:], []byte(im.file.Digest)))
	}
	im.prefix, err = read(ctx, c, InProject(project), func(tx Tx) (string, error) {
		if err := request.Bind(ctx, tx, project, string(im.row.ID)); err != nil {
			return "", err
		}
		return tx.BeginImport(ctx, project, im.row.ID, importLease)
	})
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		return c.repeatImport(ctx, project, again.Use)
	}
	if err != nil {
		return Checkpoint{}, err
	}
	cp, err := im.run(ctx)
	if err != nil {
		return Checkpoint{}, im.giveUp(ctx, err)
	}
	c.metrics.stored.Add(float64(cp.StoredBytes))
	c.feed.hint()
	c.log.InfoContext(ctx, "checkpoint imported", "checkpoint_id", cp.ID, "bytes", cp.StoredBytes)
	return cp, nil
}

func (c *Controller) repeatImport(ctx context.Context, project core.ProjectID, use KeyUse) (Checkpoint, error) {
	if use.Answer == nil {
		return Checkpoint{}, request.InProgress("the first request with this idempotency key imports %s, and has not ended; repeat yours later", use.Object)
	}
	cp, err := c.Checkpoint(ctx, project, core.CheckpointID(use.Object))
	if err == nil {
		request.ClaimOf(ctx).SetReplayed(true)
	}
	return cp, err
}

// giveUp ends an import that failed, and frees the key of its request, so that a repeat of the
// request begins anew. It removes at once what the import has stored: nothing reads these objects,
// and no quota counts them, so a tenant could pile them up with files that fail at their last byte.
func (im *importing) giveUp(ctx context.Context, failure error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	committed := false
	err := im.c.store.InTx(ctx, InProject(im.project), func(tx Tx) (err error) {
		committed, err = tx.EndImport(ctx, im.project, im.row.ID)
		if err != nil || committed {
			return err
		}
		return request.ClaimOf(ctx).Release(ctx, tx, im.project, string(im.row.ID))
	})
	switch {
	case err != nil: // its lease ends
		im.c.log.WarnContext(ctx, "an import that failed was not ended", "checkpoint_id", im.row.ID, "err", err)
	case !committed:
		im.removeStored(ctx)
	}
	return failure
}

// removeTime is how long a failed import tries to remove what it has stored, while it keeps its place among the imports under way.
const removeTime = 30 * time.Second

// removeStored removes the objects of an import that can no longer be committed. Its prefix stays listed as debris, so a later collection
// removes what this one could not.
func (im *importing) removeStored(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTime)
	defer cancel()
	if err := im.c.Collector.RemoveBelow(ctx, im.prefix); err != nil {
		im.c.log.WarnContext(ctx, "the objects of a failed import were not removed; the collection of garbage removes them later", "checkpoint_id", im.row.ID, "err", err)
	}
}

// errRehearsed ends a transaction that was only a trial.
var errRehearsed = errors.New("this would have been committed")

func (im *importing) run(ctx context.Context) (Checkpoint, error) {
	if err := importBegun.Hit(ctx); err != nil {
		return Checkpoint{}, err
	}
	// A problem with the row is reported before all the bytes have arrived.
	err := im.c.store.InTx(ctx, InProject(im.project), func(tx Tx) error {
		stored := runnerapi.Stored{CheckpointID: im.row.ID, Manifest: im.prefix + "manifest", Digest: im.file.Digest, Bytes: 1}
		_, err := tx.CommitImport(ctx, im.row, runnerapi.CommitSeal{Stored: stored, Written: []runnerapi.StoredObject{{Key: stored.Manifest, Bytes: 1}}})
		if err == nil {
			err = errRehearsed
		}
		return err
	})
	if !errors.Is(err, errRehearsed) {
		return Checkpoint{}, err
	}
	out, err := im.store(ctx)
	if err == nil {
		err = importWritten.Hit(ctx)
	}
	if err != nil {
		return Checkpoint{}, err
	}
	in := runnerapi.CommitSeal{
		Stored: runnerapi.Stored{CheckpointID: im.row.ID, Manifest: out.Manifest.Key, Digest: out.Manifest.Digest, Bytes: out.Manifest.Bytes},
		Needs:  out.Needs, StoredBytes: out.Stored,
	}
	for _, o := range out.Objects {
		in.Written = append(in.Written, runnerapi.StoredObject{Key: o.Key, Bytes: o.Bytes})
	}
	return read(ctx, im.c, InProject(im.project), func(tx Tx) (Checkpoint, error) {
		cp, err := tx.CommitImport(ctx, im.row, in)
		if err != nil {
			return cp, err
		}
		return cp, request.ClaimOf(ctx).Answer(ctx, tx, im.project, string(cp.ID), cp.ID)
	})
}

// store writes the objects under the lease.
func (im *importing) store(ctx context.Context) (*snapshotstore.Written, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		im.renew(ctx, cancel)
	}()
	defer func() {
		cancel(nil)
		<-renewed
	}()
	key, err := im.c.dataKeys.Attempt(ctx, im.project, im.prefix)
	if err != nil {
		return nil, err
	}
	out, err := im.file.Store(ctx, im.c.cfg.Store, im.prefix, key, manifest.Header{
		ProjectID: im.project, CheckpointID: im.row.ID, CapturedAt: im.file.Manifest.CapturedAt, GuestImage: im.row.Image.Digest, Class: im.file.Manifest.Class,
		Resources: im.row.Resources, Record: im.record,
	})
	if err != nil && errors.Is(context.Cause(ctx), ErrImportLost) {
		err = ErrImportLost
	}
	return out, err
}

// renew keeps the lease until ctx ends, or ends it when the lease is over by this process's clock.
func (im *importing) renew(ctx context.Context, lost context.CancelCauseFunc) {
	last := im.c.cfg.Clock()
	for pace.Pause(ctx, importLease/6) == nil {
		began := im.c.cfg.Clock()
		attempt, cancel := context.WithTimeout(ctx, importLease/6)
		err := im.c.store.InTx(attempt, InProject(im.project), func(tx Tx) error { return tx.RenewImport(attempt, im.row.ID, importLease) })
		cancel()
		switch {
		case err == nil:
			last = began
		case errors.Is(err, ErrImportLost) || im.c.cfg.Clock()-last > importLease/2:
			lost(ErrImportLost)
			return
		}
	}
}

// abandonImports ends the imports of controllers that have died.
func (c *Controller) abandonImports(ctx context.Context) error {
	list, err := read(ctx, c, System(), func(tx Tx) ([]core.CheckpointID, error) { return tx.AbandonImports(ctx) })
	for _, id := range list {
		c.log.InfoContext(ctx, "import given up with its controller", "checkpoint_id", id)
	}
	return err
}

// maxImportText bounds the bytes of one text of a file that rows keep.
const maxImportText = 512

// describe checks the file's description of the checkpoint, and makes the row.
func (im *importing) describe(name string) error {
	if name != "" {
		if err := core.ValidateName("name", name); err != nil {
			return err
		}
	}
	h := im.file.Manifest
	if err := h.Resources.Validate(); err != nil {
		return badImport("%s", core.MessageOf(err))
	}
	class := runnerapi.ClassOf(h.Class)
	fields := class.Fields()
	if len(h.Class) != len(fields) {
		return badImport("it does not say what it needs of a host")
	}
	for key, v := range fields {
		if _, there := h.Class[key]; !there || !plain(v) || key != "cpu_model" && v == "" {
			return badImport("it does not say what %s it needs of a host", key)
		}
	}
	if err := im.checkImages(); err != nil {
		return err
	}
	captured, err := time.Parse(time.RFC3339Nano, h.CapturedAt)
	if err != nil || captured.Year() < 1 || captured.Year() > 9999 {
		return badImport("it does not say when it was captured")
	}
	if _, err := core.ParseDigest(string(h.GuestImage)); err != nil || !plain(im.file.Export.ImageName) {
		return badImport("it does not say of what image it is")
	}
	record, err := recordIn(h.Record)
	if err != nil {
		return err
	}
	if im.record, err = json.Marshal(record); err != nil {
		return err
	}
	im.row = Checkpoint{
		ID: core.NewID[core.CheckpointID](), ProjectID: im.project, Kind: KindUser, Name: name, Resources: h.Resources, Class: &class,
		Image:    ImageRef{Name: im.file.Export.ImageName, Digest: im.file.Content(runnerapi.ImageRoot)},
		Imported: &Imported{CheckpointID: h.CheckpointID, Image: h.GuestImage, CapturedAt: captured},
		// No image of this cluster has its root file system: that is charged with the disk.
		DeltaBytes: im.inUse(runnerapi.ImageMemory), DiskBytes: im.inUse(runnerapi.ImageDisk) + im.inUse(runnerapi.ImageRoot),
		DeviceStateBytes: im.file.Image(runnerapi.ImageState).Size(),
		PauseMS:          record.PauseMS, Timings: record.Timings, StaleProcesses: record.Processes,
	}
	return nil
}

// inUse is how many bytes of an image are not zeros.
func (im *importing) inUse(image string) int64 {
	n := int64(0)
	for r := range im.file.Image(image).Runs() {
		n += int64(r.Count)
	}
	return n * manifest.PageSize
}

// checkImages refuses images that no runner would accept.
func (im *importing) checkImages() error {
	h := im.file.Manifest
	sizes := map[string]struct{ least, most int64 }{
		runnerapi.ImageMemory: {int64(h.Resources.MemoryMiB) << 20, int64(h.Resources.MemoryMiB) << 20},
		runnerapi.ImageDisk:   {int64(h.Resources.DiskGiB) << 30, int64(h.Resources.DiskGiB) << 30},
		runnerapi.ImageState:  {1, runnerapi.MaxDeviceState},
		runnerapi.ImageSurvey: {0, runnerapi.MaxDeviceState},
		runnerapi.ImageRoot:   {1, runnerapi.MaxRoot},
	}
	for name, size := range sizes {
		tree := im.file.Image(name)
		if tree == nil && name == runnerapi.ImageSurvey {
			continue
		}
		if tree == nil || tree.Size() < size.least || tree.Size() > size.most {
			return badImport("its image %s is missing or has another size than it must have", name)
		}
	}
	for _, image := range h.Images {
		if _, known := sizes[image.Name]; !known {
			return badImport("it has an image %q, which no checkpoint has", core.Clip(image.Name))
		}
	}
	return nil
}

// recordIn keeps the useful parts of the record. It drops the reseal of the captured workspace, which belongs to another cluster.
func recordIn(b json.RawMessage) (runnerapi.StoredRecord, error) {
	r, whole, err := runnerapi.DecodeRecord(b)
	if err != nil {
		return r, badImport("what it says of its capture cannot be read")
	}
	if !whole || r.PauseMS < 0 {
		return r, badImport("what it says of its capture cannot be")
	}
	r.ParentReseal = nil
	for i := range r.Timings {
		r.Timings[i].Stage = shown(r.Timings[i].Stage)
	}
	for i := range r.Processes {
		r.Processes[i].Command, r.Processes[i].Runtime = shown(r.Processes[i].Command), shown(r.Processes[i].Runtime)
	}
	return r, nil
}

// shown makes a text of a guest that can be stored and shown.
func shown(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	return strings.ToValidUTF8(s[:min(len(s), maxImportText)], "")
}

// plain reports whether a text of a file can be stored and shown.
func plain(s string) bool {
	if len(s) > maxImportText || !utf8.ValidString(s) {
		return false
	}
	for _, r := range s {
		if unicode.IsControl(r) {
			return false
		}
	}
	return true
}

func badImport(format string, a ...any) error {
	return core.Errorf(core.Invalid, core.CodeImportInvalid, "this file cannot be imported: %s", fmt.Sprintf(format, a...))
}
