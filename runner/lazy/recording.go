package lazy

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"os"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/pager"
)

// Recording is a base that is complete on this host and that the pager serves anyway, to record the pages that a machine asks for.
type Recording struct {
	images *Images
	client *pager.Client
	id     string
}

// Record asks the pager to serve a base and to record the pages that are read. It starts a pager if none runs. The caller closes the recording.
func (l *Images) Record(ctx context.Context, base core.BaseID) (_ *Recording, err error) {
	l.mu.Lock()
	running := l.client != nil
	l.mu.Unlock()
	if !running {
		if err := l.start(ctx); err != nil {
			return nil, err
		}
	}
	random := make([]byte, 8)
	_, _ = rand.Read(random) // never fails
	id := "rehearsal-" + hex.EncodeToString(random)
	l.mu.Lock()
	client, foreign := l.client, l.foreign
	l.recorded[id] = true
	l.mu.Unlock()
	rec := &Recording{images: l, client: client, id: id}
	defer func() {
		if err != nil {
			rec.forget()
		}
	}()
	if client == nil {
		return nil, pager.ErrGone
	}
	if foreign {
		return nil, errForeign
	}
	file, err := l.cfg.Host.OpenBase(base)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if _, err := client.Put(ctx, pager.Image{ID: id, Memory: true, Record: true}, file); err != nil {
		return nil, err
	}
	return rec, nil
}

func (r *Recording) forget() {
	r.images.mu.Lock()
	defer r.images.mu.Unlock()
	delete(r.images.recorded, r.id)
}

// OpenFile opens the base as the pager serves it.
func (r *Recording) OpenFile(ctx context.Context) (*os.File, error) { return r.client.Open(ctx, r.id) }

// Touched returns the pages that were read.
func (r *Recording) Touched(ctx context.Context) ([]pager.Range, error) {
	return r.client.Touched(ctx, r.id)
}

// Close ends the recording. Nothing may have its file open.
func (r *Recording) Close(ctx context.Context) error {
	defer r.forget()
	return r.client.Drop(ctx, r.id)
}
