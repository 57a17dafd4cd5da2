package controller_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/uploads"
	"github.com/coppice-dev/coppice/core"
)

// random has the same bytes each time.
func random(n int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{1}), n) }

// TestUpload: what was sent can be read at once by another controller, in parts; a repeat replaces it whole, and a broken one changes nothing.
func TestUpload(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other, _ := w.start(controller.Config{})
	const size = 5<<20 + 17
	put, err := w.Uploads.Put(t.Context(), w.project, "ctx", random(size))
	if err != nil || put.Size != size || put.Parts != 6 {
		t.Fatalf("%+v, %v", put, err)
	}
	sum := sha256.New()
	got, err := other.Uploads.Get(t.Context(), w.project, "ctx")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(sum, other.Uploads.Open(t.Context(), w.project, got)); err != nil || n != size || hex.EncodeToString(sum.Sum(nil)) != put.SHA256 {
		t.Errorf("%d bytes, %v", n, err)
	}
	stranger, _ := w.other()
	if _, err := w.Uploads.Get(t.Context(), stranger, "ctx"); core.CodeOf(err) != core.CodeUploadNotFound {
		t.Errorf("of another project: %v", err)
	}
	broken := errors.New("broken")
	if _, err := w.Uploads.Put(t.Context(), w.project, "ctx", io.MultiReader(random(2<<20), failing{broken})); !errors.Is(err, broken) {
		t.Errorf("a body that breaks off: %v", err)
	}
	if now, err := w.Uploads.Get(t.Context(), w.project, "ctx"); err != nil || now != got || w.number(`SELECT count(*) FROM uploads`) != 1 {
		t.Errorf("after a body that broke off: %+v, %v", now, err)
	}
	reading := w.Uploads.Open(t.Context(), w.project, got)
	if _, err := io.CopyN(io.Discard, reading, 1<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Uploads.Put(t.Context(), w.project, "ctx", strings.NewReader("new")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, reading); core.CodeOf(err) != core.CodeUploadNotFound {
		t.Errorf("a reader of what was replaced: %v", err)
	}
	if n := w.number(`SELECT count(*) FROM upload_parts`); n != 1 {
		t.Errorf("%d parts are left", n)
	}
	w.sql(`UPDATE uploads SET expires_at = now() - interval '1 second'`)
	if err := w.Uploads.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Uploads.Get(t.Context(), w.project, "ctx"); core.CodeOf(err) != core.CodeUploadNotFound || w.number(`SELECT count(*) FROM upload_parts`) != 0 {
		t.Errorf("after its time: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// TestUploadBounds: an upload has 256 MiB at most; a project has 100 uploads and 1 GiB, also when requests race.
func TestUploadBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	w.sql(`INSERT INTO uploads (data_id, project_id, id, bytes, parts, sha256, expires_at) SELECT 'd' || n, $1, 'u' || n, 0, 0, 'x', now() + interval '1 hour' FROM generate_series(1, 98) n`, w.project)
	var group sync.WaitGroup
	var codes [8]core.Code
	for i := range codes {
		group.Go(func() {
			_, err := w.Uploads.Put(ctx, w.project, "race-"+string(rune('a'+i)), strings.NewReader("x"))
			codes[i] = core.CodeOf(err)
		})
	}
	group.Wait()
	good := 0
	for _, c := range codes {
		switch c {
		case "":
			good++
		case core.CodeQuotaExceeded:
		default:
			t.Errorf("%s", c)
		}
	}
	if n := w.number(`SELECT count(*) FROM uploads`); good != 2 || n != 100 {
		t.Errorf("%d of 8 were taken, and there are %d", good, n)
	}
	w.sql(`DELETE FROM uploads WHERE id <> 'u1'`)
	w.sql(`UPDATE uploads SET bytes = 1 << 30`)
	if _, err := w.Uploads.Put(ctx, w.project, "more", bytes.NewReader([]byte("x"))); core.CodeOf(err) != core.CodeQuotaExceeded {
		t.Errorf("more than 1 GiB: %v", err)
	}
	w.sql(`UPDATE uploads SET bytes = 0`)
	if _, err := w.Uploads.Put(ctx, w.project, "large", random(uploads.MaxBytes+1)); core.CodeOf(err) != core.CodeBodyTooLarge {
		t.Errorf("more than 256 MiB: %v", err)
	}
	if n := w.number(`SELECT count(*) FROM upload_parts`); n != 0 {
		t.Errorf("%d parts are left", n)
	}
	for _, id := range []string{"", "A", "a/b", "..", strings.Repeat("x", 129)} {
		if _, err := w.Uploads.Put(ctx, w.project, id, strings.NewReader("x")); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("id %q: %v", id, err)
		}
	}
}
