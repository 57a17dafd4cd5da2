package snapshotstore

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// Checker looks whether checkpoints can be read: every manifest, and of the frames a share. What several checkpoints have in common is
// read once. It is not safe for concurrent use.
type Checker struct {
	blobs blob.Blobs
	part  Part
	seen  map[manifest.Frame]bool

	Manifests int64
	Frames    int64 // that were read
	Bytes     int64 // of them
}

// Part is a share of the frames: the Which-th of Of, from 1. The parts of one Of have every frame once. The zero Part is none.
type Part struct{ Which, Of uint64 }

// Whole is every frame.
var Whole = Part{1, 1}

func (p Part) has(h manifest.Hash) bool {
	return p.Of > 0 && binary.BigEndian.Uint64(h[:])%p.Of == p.Which-1
}

// NewChecker begins with nothing seen.
func NewChecker(blobs blob.Blobs, part Part) *Checker {
	return &Checker{blobs: blobs, part: part, seen: make(map[manifest.Frame]bool)}
}

// Check looks at one checkpoint. faults are what is wrong with its objects: CHECKPOINT_CORRUPT, CHECKPOINT_INCOMPLETE, MANIFEST_INVALID.
// err says that it could not be looked at.
func (c *Checker) Check(ctx context.Context, ref manifest.Ref) (faults []error, err error) {
	s, err := Open(ctx, c.blobs, ref)
	if core.CategoryOf(err) == core.DataLoss {
		return []error{err}, nil
	}
	if err != nil {
		return nil, err
	}
	c.Manifests++
	wanted := make(map[*manifest.Frame][]manifest.Run)
	for _, image := range s.header.Images {
		for r := range s.trees[image.Name].Runs() {
			if c.part.has(r.Frame.Hash) && !c.seen[*r.Frame] {
				c.seen[*r.Frame] = true
				wanted[r.Frame] = nil
			}
		}
	}
	requests := plan(wanted)
	found := make([]error, len(requests))
	var frames, read atomic.Int64
	group, run := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for i, req := range requests {
		group.Go(func() error {
			var buf []byte
			err := req.read(run, c.blobs, &buf, func(*manifest.Frame, []byte) error { return nil })
			if err == nil {
				frames.Add(int64(len(req.frames)))
				read.Add(req.length)
			}
			if core.CategoryOf(err) != core.DataLoss {
				return err
			}
			found[i] = fmt.Errorf("checkpoint %s: %w", s.header.CheckpointID, err)
			return nil
		})
	}
	err = group.Wait()
	c.Frames, c.Bytes = c.Frames+frames.Load(), c.Bytes+read.Load()
	for _, f := range found {
		if f != nil {
			faults = append(faults, f)
		}
	}
	if ctx.Err() != nil {
		err = errors.Join(err, context.Cause(ctx))
	}
	return faults, err
}
