// Package uploads keeps files that clients send for later requests of their project, such as the
// context of a build. An upload is in the database in parts, so that every controller has it. No
// upload is ever whole in memory. It is removed a day after it was sent.
//
// A transfer writes its parts under an id of its own. The upload has them when the transfer is
// complete, so a reader never sees a half, and a repeat replaces the upload at once. What a broken
// transfer leaves is removed when nothing has come for a while.
package uploads

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"regexp"
	"time"

	"github.com/coppice-dev/coppice/controller/sweep"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// Bounds of uploads.
const (
	MaxBytes = 256 << 20 // of an upload

	maxProject = 1 << 30 // bytes of a project
	maxCount   = 100     // uploads of a project, with those that are being received
	maxPart    = 1 << 20 // bytes of a part
)

const (
	kept       = 24 * time.Hour
	receiving  = 15 * time.Minute // without a part
	sweepBatch = 16

	// Every is the time between two sweeps.
	Every = time.Minute
)

// afterPart is where a controller may be killed while it receives an upload.
var afterPart = failpoint.New("controller.after_upload_part")

// Upload is a complete upload.
type Upload struct {
	ID        string
	Size      int64
	SHA256    string // hex
	CreatedAt time.Time
	ExpiresAt time.Time

	Data  string // the transfer that has its parts
	Parts int
}

// Tx keeps uploads.
type Tx interface {
	// BeginUpload inserts a transfer. It fails with QUOTA_EXCEEDED if the project has count of them.
	BeginUpload(ctx context.Context, project core.ProjectID, id, data string, count int, life time.Duration) error
	// AppendUpload adds a part. It fails with QUOTA_EXCEEDED if the project has more than most bytes then, and with UPLOAD_NOT_FOUND if the
	// transfer was removed meanwhile.
	AppendUpload(ctx context.Context, project core.ProjectID, data string, index int, part []byte, most int64, life time.Duration) error
	// FinishUpload makes a transfer the upload, in the place of an earlier one.
	FinishUpload(ctx context.Context, project core.ProjectID, data, sum string, life time.Duration) (Upload, error)
	Upload(ctx context.Context, project core.ProjectID, id string) (Upload, error)
	UploadPart(ctx context.Context, data string, index int) ([]byte, error)
	// DeleteUpload removes an upload; UPLOAD_NOT_FOUND.
	DeleteUpload(ctx context.Context, project core.ProjectID, id string) error
	// DropTransfer removes a transfer that is not complete.
	DropTransfer(ctx context.Context, data string) error
	// SweepUploads removes at most limit uploads and transfers whose time is up.
	SweepUploads(ctx context.Context, limit int) (int, error)
}

// Store runs transactions.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Keeper keeps uploads. It is safe for concurrent use.
type Keeper struct{ store Store }

// New makes a keeper. It starts nothing.
func New(store Store) *Keeper { return &Keeper{store} }

var wellFormed = regexp.MustCompile(`^[a-z0-9-]{1,128}$`)

// CheckID refuses an id that no upload can have.
func CheckID(id string) error {
	if !wellFormed.MatchString(id) {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "upload %q: an id is 1 to 128 lower-case letters, digits and hyphens", core.Clip(id))
	}
	return nil
}

// ErrTooLarge refuses an upload with too many bytes.
var ErrTooLarge error = core.Errorf(core.Invalid, core.CodeBodyTooLarge, "an upload has at most %d MiB; leave files out, for example with .dockerignore", MaxBytes>>20)

// Put receives an upload, in the place of an earlier one with the same id.
func (k *Keeper) Put(ctx context.Context, project core.ProjectID, id string, body io.Reader) (Upload, error) {
	if err := CheckID(id); err != nil {
		return Upload{}, err
	}
	data := string(core.NewID[core.OperationID]())
	if err := k.store.InProject(ctx, project, func(tx Tx) error { return tx.BeginUpload(ctx, project, id, data, maxCount, receiving) }); err != nil {
		return Upload{}, err
	}
	sum, err := k.receive(ctx, project, data, body)
	var done Upload
	if err == nil {
		err = k.store.InProject(ctx, project, func(tx Tx) (err error) {
			done, err = tx.FinishUpload(ctx, project, data, sum, kept)
			return err
		})
	}
	if err != nil {
		after := context.WithoutCancel(ctx)
		_ = k.store.InProject(after, project, func(tx Tx) error { return tx.DropTransfer(after, data) }) // the sweep does it otherwise
	}
	return done, err
}

// receive writes the parts of a transfer, and returns the digest of all.
func (k *Keeper) receive(ctx context.Context, project core.ProjectID, data string, body io.Reader) (string, error) {
	hash, size := sha256.New(), int64(0)
	part := make([]byte, maxPart)
	for index := 0; ; index++ {
		n, err := io.ReadFull(body, part)
		last := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return "", err //nolint:wrapcheck // the caller knows its reader
		}
		if size += int64(n); size > MaxBytes {
			return "", ErrTooLarge
		}
		if n > 0 {
			_, _ = hash.Write(part[:n])
			if err := k.store.InProject(ctx, project, func(tx Tx) error {
				return tx.AppendUpload(ctx, project, data, index, part[:n], maxProject, receiving)
			}); err != nil {
				return "", err
			}
			if err := afterPart.Hit(ctx); err != nil {
				return "", err
			}
		}
		if last {
			return hex.EncodeToString(hash.Sum(nil)), nil
		}
	}
}

// Get returns what is known of an upload.
func (k *Keeper) Get(ctx context.Context, project core.ProjectID, id string) (u Upload, err error) {
	if err := CheckID(id); err != nil {
		return u, err
	}
	err = k.store.InProject(ctx, project, func(tx Tx) error {
		u, err = tx.Upload(ctx, project, id)
		return err
	})
	return u, err
}

// Delete removes an upload.
func (k *Keeper) Delete(ctx context.Context, project core.ProjectID, id string) error {
	if err := CheckID(id); err != nil {
		return err
	}
	return k.store.InProject(ctx, project, func(tx Tx) error { return tx.DeleteUpload(ctx, project, id) })
}

// Open reads an upload as it is now. If it is replaced or removed meanwhile, the reader fails with UPLOAD_NOT_FOUND.
func (k *Keeper) Open(ctx context.Context, project core.ProjectID, u Upload) io.Reader {
	return &reader{ctx: ctx, keeper: k, project: project, upload: u}
}

type reader struct {
	ctx     context.Context //nolint:containedctx // of the one read that it is for
	keeper  *Keeper
	project core.ProjectID
	upload  Upload
	next    int
	rest    []byte
}

// Read gets one part at a time.
func (r *reader) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.next == r.upload.Parts {
			return 0, io.EOF
		}
		err := r.keeper.store.InProject(r.ctx, r.project, func(tx Tx) (err error) {
			r.rest, err = tx.UploadPart(r.ctx, r.upload.Data, r.next)
			return err
		})
		if core.CategoryOf(err) == core.NotFound {
			return 0, core.Errorf(core.NotFound, core.CodeUploadNotFound, "upload %s was replaced or removed while it was read; send it again and repeat the request", r.upload.ID)
		}
		if err != nil {
			return 0, fmt.Errorf("read upload %s: %w", r.upload.ID, err)
		}
		r.next++
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Sweep removes uploads whose time is up, and what broken transfers have left.
func (k *Keeper) Sweep(ctx context.Context) error {
	return sweep.Batches(ctx, sweepBatch, func(ctx context.Context) (n int, err error) {
		err = k.store.InSystem(ctx, func(tx Tx) (err error) {
			n, err = tx.SweepUploads(ctx, sweepBatch)
			return err
		})
		return n, err
	})
}
