package host

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
)

// The sizes of a spool, in bytes.
const (
	shares      = 8        // a sandbox has one of them at most; the last one is for those that have little in the spool
	little      = 1024     // what little is, as a part of the whole
	segmentSize = 4 << 20  // from here on another file is begun
	batchSize   = 96 << 10 // of encoded records that are given at once: a message takes them
	endReserve  = 1 << 10  // that the record of a flow's end may be longer than that of its beginning
)

// spool keeps flows in files until they were acknowledged. It implements proxy.Journal.
//
// Records are written and not synced: the end of this process takes nothing of them, and what a power cut takes of the last seconds it
// takes from the sandboxes as well.
type spool struct {
	dir  *os.Root
	lock *os.File
	max  int64
	log  *slog.Logger

	mu       sync.Mutex // guards what follows
	segments []*segment // oldest first; the last one is written
	out      *os.File   // the last segment
	last     int64      // number of the last record
	bytes    int64      // of all segments
	open     map[string]core.Flow
	reserved int64                    // for the ends of open flows
	room     map[string]int64         // of that, by their ids
	of       map[core.SandboxID]int64 // bytes of each one's records, with what is reserved for them
	unsaid   int64                    // flows that were refused, or ends that were lost
	tallies  map[string]tally         // that have not ended, by the ids of their first flows
	late     map[string]late          // ends that could not be written yet, by the ids of their flows
	slots    slots
	said     int64 // the second in which it was logged last that an end was not recorded
	aside    aside

	at    position // of the first record that was not acknowledged
	given int64    // the last record of the batch that was given last; 0: none
	next  position // behind it
	news  chan struct{}
}

// segment is a file of records.
type segment struct {
	first int64 // number of its first record, if it has one
	head  int64 // bytes of the lines before its records
	size  int64
	full  int64                    // the size from which on another is begun
	of    map[core.SandboxID]int64 // bytes of each one's records
}

// add counts a record.
func (s *spool) add(seg *segment, id core.SandboxID, n int64) {
	if seg.size, s.bytes = seg.size+n, s.bytes+n; id == "" { // nobody's
		return
	}
	seg.of[id] += n
	s.charge(id, n)
}

func (s *spool) charge(id core.SandboxID, n int64) {
	if s.of[id] += n; s.of[id] <= 0 {
		delete(s.of, id)
	}
}

// share is what one sandbox's flows may take, in bytes. Records go by whole segments, so it is no less than some of those.
func (s *spool) share() int64 { return max(s.max/shares, min(s.max, 2*segmentSize)) }

// position is a place in the spool.
type position struct {
	first int64 // of the segment
	off   int64
}

// line is one of a segment. The first says what was under way when the segment was begun, as Open and in Parts further lines, each with one flow
// in Open or in Tally. Every other has a record, or a tally that was begun. One of an older version has all in the first.
type line struct {
	N     int64       `json:"n,omitempty"`
	Flow  *core.Flow  `json:"flow,omitempty"`
	Open  []core.Flow `json:"open,omitempty"`
	Parts int         `json:"parts,omitempty"`
	Tally *core.Flow  `json:"tally,omitempty"` // not told to anybody
	Slot  int         `json:"slot,omitempty"`  // where it is counted
}

const (
	nameForm = "flows-%020d.jsonl"
	lockName = "lock"
)

func (s *segment) name() string { return fmt.Sprintf(nameForm, s.first) }

// openSpool goes on with what is in a directory. There is one spool of it at a time.
func openSpool(dir *os.Root, limit int64, log *slog.Logger) (_ *spool, err error) {
	s := &spool{
		dir: dir, max: limit, log: log, open: map[string]core.Flow{}, room: map[string]int64{}, of: map[core.SandboxID]int64{}, tallies: map[string]tally{}, late: map[string]late{}, news: make(chan struct{}),
		aside: aside{dir: dir, log: log, found: map[string]int64{}},
	}
	if s.lock, err = dir.OpenFile(lockName, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open the spool of flows: %w", err), s.lock.Close())
		}
	}()
	if err := unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, core.Wrapf(err, core.Conflict, core.CodeStateConflict, "another egress process keeps its flows in the same directory")
	}
	list, err := fs.ReadDir(dir.FS(), ".")
	if err != nil {
		return nil, err
	}
	var found []*segment
	for _, e := range list {
		seg := &segment{of: map[core.SandboxID]int64{}}
		if n, err := fmt.Sscanf(e.Name(), nameForm, &seg.first); n != 1 || err != nil || seg.name() != e.Name() {
			continue
		}
		found = append(found, seg)
	}
	slices.SortFunc(found, func(a, b *segment) int { return cmp.Compare(a.first, b.first) })
	for _, seg := range found {
		if err := s.scan(seg); err != nil { // the others are as good as ever
			if err := s.aside.segment(seg.name(), err); err != nil {
				return nil, err
			}
			continue
		}
		s.segments = append(s.segments, seg)
	}
	s.aside.tell()
	if s.slots, err = openSlots(dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.slots.close())
		}
	}()
	open, tallies := s.open, s.tallies
	if err := s.begin(); err != nil {
		return nil, err
	}
	s.at = position{first: s.segments[0].first}
	for _, f := range open { // what carried them is gone
		f.Outcome, f.Reason, f.Ended = core.FlowFailed, "the egress proxy of its host ended", time.Now()
		s.End(f)
	}
	for _, t := range tallies {
		s.slots.used[t.slot] = true
	}
	for _, t := range tallies {
		t.flow.Count, t.flow.Last = s.slots.read(t.slot)
		s.endTally(t)
	}
	return s, nil
}

// maxLine bounds a line that has a flow, in bytes.
const maxLine = core.MaxFlowEncoded + 128

func (s *spool) encode(l line) ([]byte, error) {
	for _, f := range []**core.Flow{&l.Flow, &l.Tally} {
		if *f != nil {
			clipped := (*f).Clipped()
			*f = &clipped
		}
	}
	b, err := json.Marshal(l)
	if err == nil && len(b) >= maxLine {
		err = core.Errorf(core.Internal, core.CodeInternal, "the record of a flow has %d bytes, and none may have more than %d", len(b), maxLine)
	}
	return append(b, '\n'), err
}

// note keeps count of what is under way.
func (s *spool) note(f core.Flow) {
	switch {
	case f.Outcome == core.FlowAllowed && f.Ended.IsZero():
		s.open[f.ID] = f
	case !f.Ended.IsZero():
		delete(s.open, f.ID)
		delete(s.tallies, f.ID)
	}
}

// heading is the beginning of a segment.
func (s *spool) heading() ([]byte, error) {
	var out bytes.Buffer
	put := func(l line) error {
		b, err := s.encode(l)
		out.Write(b)
		return err
	}
	if err := put(line{Parts: len(s.open) + len(s.tallies)}); err != nil {
		return nil, err
	}
	for _, f := range s.open {
		if err := put(line{Open: []core.Flow{f.Clipped()}}); err != nil {
			return nil, err
		}
	}
	for _, t := range s.tallies {
		if err := put(line{Tally: &t.flow, Slot: t.slot}); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

// begin begins another segment. mu is held, or nobody else knows the spool.
func (s *spool) begin() error {
	head, err := s.heading()
	if err != nil {
		return err
	}
	return s.beginWith(head)
}

func (s *spool) beginWith(head []byte) error {
	seg := &segment{first: s.last + 1, of: map[core.SandboxID]int64{}}
	if n := len(s.segments); n > 0 && s.segments[n-1].first == seg.first { // it has no record
		s.bytes -= s.segments[n-1].size
		s.segments = s.segments[:n-1]
	}
	out, err := s.dir.OpenFile(seg.name(), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err := out.Write(head); err != nil {
		return errors.Join(err, out.Close(), s.dir.Remove(seg.name()))
	}
	if s.out != nil {
		if err := s.out.Close(); err != nil {
			s.log.Warn("a segment of the spool was not closed", "err", err)
		}
	}
	seg.head, seg.size = int64(len(head)), int64(len(head))
	seg.full = seg.size + max(segmentSize, seg.head) // what is repeated is no more than half of all
	s.out, s.segments, s.bytes = out, append(s.segments, seg), s.bytes+seg.size
	return nil
}

// Begin implements proxy.Journal.
func (s *spool) Begin(f core.Flow) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.take(f.ID, f.SandboxID, line{Flow: &f}, f.Outcome == core.FlowAllowed)
	if err == nil {
		s.note(f)
	}
	return err
}

// take appends the first line of a flow if there is room for it and, where it has an end, for that.
func (s *spool) take(flow string, id core.SandboxID, l line, ends bool) error {
	s.retry()
	if l.N = s.last + 1; len(s.late) > 0 {
		s.unsaid++
		return core.Errorf(core.Exhausted, core.CodeDiskFull, "the ends of %d flows could not be written to the spool of flows; the disk of this host is full or fails", len(s.late))
	}
	b, err := s.encode(l)
	if err != nil {
		s.unsaid++
		return err
	}
	need, reserve := int64(len(b)), int64(0)
	if ends {
		reserve = need + endReserve
	}
	limit := s.max
	if s.of[id]+need+reserve > s.max/little {
		limit -= s.max / shares
	}
	if s.bytes+s.reserved+need+reserve > limit {
		s.unsaid++
		return core.Errorf(core.Exhausted, core.CodeDiskFull, "the spool of flows is full (%d bytes): the runner could not report its flows to a controller", limit)
	}
	if s.of[id]+need+reserve > s.share() {
		s.unsaid++
		return core.Errorf(core.Exhausted, core.CodeDiskFull, "the flows of %s fill its share of the spool (%d bytes): the runner could not report them to a controller", id, s.share())
	}
	if err := s.append(id, b); err != nil {
		s.unsaid++
		return err
	}
	if reserve > 0 {
		s.reserved, s.room[flow] = s.reserved+reserve, reserve
		s.charge(id, reserve)
	}
	return nil
}

// End implements proxy.Journal.
func (s *spool) End(f core.Flow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finish(late{flow: f})
}

// append writes a line, whole or not at all. The caller has made sure that there is room.
func (s *spool) append(id core.SandboxID, b []byte) error {
	seg := s.segments[len(s.segments)-1]
	if seg.size >= seg.full {
		head, err := s.heading()
		if err != nil {
			return err
		}
		if s.bytes+s.reserved+int64(len(head)+len(b)) <= s.max {
			if err := s.beginWith(head); err != nil {
				return err
			}
			seg = s.segments[len(s.segments)-1]
		} else { // this one goes on: what is under way would have no room in another
			seg.full = seg.size + segmentSize/4
		}
	}
	if _, err := s.out.WriteAt(b, seg.size); err != nil {
		return errors.Join(err, s.out.Truncate(seg.size))
	}
	s.add(seg, id, int64(len(b)))
	s.last++
	close(s.news)
	s.news = make(chan struct{})
	return nil
}

// after acknowledges the batch that ends with a record, and waits for the next one. What was given and not acknowledged is given again.
func (s *spool) after(ctx context.Context, acknowledged int64) (egressapi.Batch, error) {
	for {
		s.mu.Lock()
		if s.given != 0 && acknowledged == s.given {
			s.at, s.given = s.next, 0
			s.forget()
		}
		batch, err := s.read()
		news := s.news
		s.mu.Unlock()
		if err != nil || len(batch.Flows) > 0 {
			return batch, err
		}
		select {
		case <-news:
		case <-ctx.Done():
			return batch, context.Cause(ctx)
		}
	}
}

// forget removes the segments of which everything was acknowledged.
func (s *spool) forget() {
	for len(s.segments) > 1 && s.segments[0].first < s.at.first {
		seg := s.segments[0]
		if err := s.dir.Remove(seg.name()); err != nil {
			s.log.Warn("a segment of the spool was not removed", "segment", seg.name(), "err", err)
			return
		}
		s.bytes -= seg.size
		for id, n := range seg.of {
			s.charge(id, -n)
		}
		s.segments = s.segments[1:]
	}
}

func (s *spool) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retry()
	// A child process that is between fork and exec has a copy of the lock's file: closing alone would leave it the lock.
	return errors.Join(s.out.Close(), s.slots.close(), unix.Flock(int(s.lock.Fd()), unix.LOCK_UN), s.lock.Close())
}
