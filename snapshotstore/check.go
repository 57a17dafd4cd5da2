package snapshotstore

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// Checker checks whether checkpoints can be read: all their manifests, and a share of their frames. Data that several
// checkpoints share is read once. It is not safe for concurrent use.
type Checker struct {
	blobs blob.Blobs
	part  Part
	seen  map[manifest.Frame]bool
	most  int // maximum length of seen

	Manifests int64
	Frames    int64 // frames that were read
	Bytes     int64 // bytes of those frames
}

// Part is a share of the frames: number Which of Of parts, counted from 1. All parts of one Of together have every
// frame once. The zero Part has none.
type Part struct{ Which, Of uint64 }

// Whole is the part with every frame.
var Whole = Part{1, 1}

func (p Part) has(h manifest.Hash) bool {
	return p.Of > 0 && binary.BigEndian.Uint64(h[:])%p.Of == p.Which-1
}

// NewChecker returns a checker that remembers no frames yet.
func NewChecker(blobs blob.Blobs, part Part) *Checker {
	return &Checker{blobs: blobs, part: part, seen: make(map[manifest.Frame]bool), most: maxSeen}
}

// Fault is a defect of an object: CHECKPOINT_CORRUPT, CHECKPOINT_INCOMPLETE or MANIFEST_INVALID.
type Fault struct {
	Object string
	Err    error
}

// Position is the frame of a checkpoint that was checked last; the zero Position is before the first frame. Frames are
// checked in this order.
type Position struct {
	Object string `json:"o,omitempty"`
	Offset int64  `json:"f,omitempty"`
}

func (p Position) before(f *manifest.Frame) bool {
	return p == Position{} || cmp.Or(strings.Compare(p.Object, f.Object), cmp.Compare(p.Offset, f.Offset)) < 0
}

// Check checks one checkpoint. err says that the check was not possible.
func (c *Checker) Check(ctx context.Context, ref manifest.Ref) ([]Fault, error) {
	faults, _, err := c.CheckFrom(ctx, ref, Position{}, time.Time{})
	return faults, err
}

// maxSeen bounds how many frames are remembered. A forgotten frame is read again with the next checkpoint that has it.
const maxSeen = 1 << 20

// CheckFrom checks a checkpoint after a position. It stops at the time until, unless that is zero, but it always checks
// something. next is the position for the next call; nil at the end.
func (c *Checker) CheckFrom(ctx context.Context, ref manifest.Ref, from Position, until time.Time) (faults []Fault, next *Position, err error) {
	s, err := Open(ctx, c.blobs, ref)
	if core.CategoryOf(err) == core.DataLoss {
		return []Fault{faultOf(err, ref.Key)}, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if from == (Position{}) {
		c.Manifests++
	}
	wanted := make(map[*manifest.Frame][]manifest.Run)
	once := make(map[manifest.Frame]bool)
	for _, image := range s.header.Images {
		for r := range s.trees[image.Name].Runs() {
			if f := *r.Frame; c.part.has(f.Hash) && !c.seen[f] && !once[f] && from.before(r.Frame) {
				once[f] = true
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
		if i > 0 && !until.IsZero() && time.Now().After(until) {
			last := requests[i-1].frames[len(requests[i-1].frames)-1]
			next = &Position{last.Object, last.Offset}
			break
		}
		for _, f := range req.frames {
			if len(c.seen) >= c.most {
				clear(c.seen)
			}
			c.seen[*f] = true
		}
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
	for i, f := range found {
		if f != nil {
			faults = append(faults, faultOf(f, requests[i].object))
		}
	}
	if ctx.Err() != nil {
		err = errors.Join(err, context.Cause(ctx))
	}
	return faults, next, err
}

func faultOf(err error, object string) Fault {
	if of, ok := errors.AsType[*objectError](err); ok {
		object = of.object
	}
	return Fault{object, err}
}
