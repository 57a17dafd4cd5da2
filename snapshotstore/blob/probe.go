package blob

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// ProbePrefix is what the keys of probes begin with. Nothing else has such keys.
const ProbePrefix = "probe/"

// A probe that its maker left behind is removed by a later one.
const probeAge = 24 * time.Hour

const probeTimeout = 10 * time.Second

// Probe puts a small object, reads it, and removes it again: whoever begins to use a store learns at once what it cannot do. A store
// that lets one object overwrite another is CodeUnsupported.
func Probe(ctx context.Context, b Blobs) (err error) {
	key := ProbePrefix + strings.ToLower(rand.Text())
	data := []byte("coppice probe " + rand.Text())
	put := func(data []byte) error {
		return b.Put(ctx, key, bytes.NewReader(data), int64(len(data)), core.DigestOf(data))
	}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTimeout)
		defer cancel()
		if removed := b.Delete(clean, key); err == nil {
			err = removed
		}
	}()
	if err := put(data); err != nil {
		return err
	}
	if err := put(data); err != nil { // as after an answer that was lost
		return err
	}
	switch err := put(append([]byte("other "), data...)); {
	case err == nil:
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported,
			"the store lets an object overwrite another: it does not heed the condition of a request (If-None-Match: *); use a server that does")
	case !errors.Is(err, ErrExists):
		return err
	}
	r, err := b.Get(ctx, key, 1, int64(len(data)))
	if err != nil {
		return err
	}
	got, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil {
		return err
	}
	if !bytes.Equal(got, data[1:]) {
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the store gave back other bytes than were put a moment before")
	}
	return sweepProbes(ctx, b, key)
}

// sweepProbes checks that a probe is listed, and removes those of others that did not come to do it.
func sweepProbes(ctx context.Context, b Blobs, own string) error {
	var old []string
	found := false
	for info, err := range b.List(ctx, ProbePrefix) {
		if err != nil {
			return err
		}
		found = found || info.Key == own
		if time.Since(info.Modified) > probeAge {
			old = append(old, info.Key)
		}
	}
	if !found {
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the store does not list what was put a moment before")
	}
	return b.Delete(ctx, old...)
}
