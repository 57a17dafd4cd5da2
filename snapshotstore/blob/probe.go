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

// ProbePrefix begins the keys of probes. No other keys begin with it.
const ProbePrefix = "probe/"

// A later probe removes probes of this age that were left behind.
const probeAge = 24 * time.Hour

const probeTimeout = 10 * time.Second

// Probe puts a small object, reads it and removes it again, so that a new user of a store learns at once what the store
// cannot do. A store that lets one object overwrite another is CodeUnsupported.
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
	if err := put(data); err != nil { // a second time, as after a lost answer
		return err
	}
	switch err := put(append([]byte("other "), data...)); {
	case err == nil:
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported,
			"the store lets an object overwrite another: it ignores the condition of a request (If-None-Match: *); use a server that does")
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
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the store returned other bytes than were stored a moment before")
	}
	return sweepProbes(ctx, b, key)
}

// sweepProbes checks that a probe is listed, and removes old probes that were left behind.
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
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the store does not list an object that was stored a moment before")
	}
	return b.Delete(ctx, old...)
}
