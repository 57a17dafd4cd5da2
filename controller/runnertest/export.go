package runnertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	format "github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// WriteMachine stores a checkpoint as a real runner writes it, with little in it: memory, disk and devices that are made up.
func WriteMachine(ctx context.Context, blobs blob.Blobs, prefix string, h format.Header, seed byte) (*snapshotstore.Written, error) {
	var images []snapshotstore.Source
	for i, size := range []int64{int64(h.Resources.MemoryMiB) << 20, int64(h.Resources.DiskGiB) << 30, 9000, 3 << 20} {
		name := []string{runnerapi.ImageMemory, runnerapi.ImageDisk, runnerapi.ImageState, runnerapi.ImageRoot}[i]
		images = append(images, snapshotstore.Source{
			Name: name, Size: size, Changed: []snapshotstore.Range{{Offset: 0, Length: min(size, 40*format.PageSize)}},
			Read: func(p []byte, off int64) error {
				r := rand.New(rand.NewPCG(uint64(off), uint64(seed)+uint64(i)<<8)) //nolint:gosec // G115, G404: made up
				for at := range p {
					p[at] = byte(r.Uint32()) //nolint:gosec // G115: the low bits
				}
				return nil
			},
		})
	}
	h.CapturedAt = "2026-11-22T12:00:00Z"
	if h.Record == nil {
		h.Record = json.RawMessage(`{"delta_bytes":1,"disk_bytes":2,"device_state_bytes":3,"pause_ms":4.5,"stale_prng_processes":[{"pid":7,"command":"a\u0000b","runtime":"go"}]}`)
	}
	return snapshotstore.Write(ctx, blobs, prefix, h, nil, images, snapshotstore.Options{})
}

// export sends a checkpoint that the fake holds as one file, with content that is made up. It passes PointExport before the answer and its
// Done in the middle of the file.
func (r *Runner) export(w http.ResponseWriter, q *http.Request) {
	id := core.CheckpointID(q.PathValue("id"))
	var in runnerapi.ExportCheckpoint
	err := json.NewDecoder(q.Body).Decode(&in)
	if err == nil {
		err = r.pass(q.Context(), PointExport, string(id))
	}
	var file []byte
	if err == nil {
		file, err = r.exported(q.Context(), id, in)
	}
	if err != nil {
		reply(w, nil, err)
		return
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(file)))
	_, err = w.Write(file[:len(file)/2]) //nolint:gosec // G705: not a page, in a fake
	if err = errors.Join(err, http.NewResponseController(w).Flush(), r.pass(q.Context(), PointExport+Done, string(id))); err != nil {
		panic(http.ErrAbortHandler)
	}
	_, _ = w.Write(file[len(file)/2:]) //nolint:gosec // G705: as above
}

func (r *Runner) exported(ctx context.Context, id core.CheckpointID, in runnerapi.ExportCheckpoint) (_ []byte, err error) {
	cp, ok := r.held(id)
	if !ok {
		return nil, core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "the checkpoint is not on this runner")
	}
	at, err := os.MkdirTemp("", "exported-*")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(at)) }()
	blobs, err := dir.Open(at)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, blobs.Close()) }()
	made, err := WriteMachine(ctx, blobs, "v1/x/", format.Header{
		ProjectID: in.ProjectID, CheckpointID: cp.ID, Parent: cp.Parent, GuestImage: cp.Image, Class: cp.Class.Fields(), Resources: cp.Resources,
	}, 1)
	if err != nil {
		return nil, err
	}
	e, err := snapshotstore.NewExport(made.Snapshot, in.ImageName)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = e.Write(ctx, blobs, &b)
	return b.Bytes(), err
}
