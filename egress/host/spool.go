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
	shares      = 8        // a sandbox may fill one of these parts; the last part is for sandboxes with little in the spool
	little      = 1024     // a sandbox with at most this fraction of the spool has little
	segmentSize = 4 << 20  // a segment that reaches this size is followed by another one
	batchSize   = 96 << 10 // of encoded records in one batch, so that it fits into a message
	endReserve  = 1 << 10  // how much longer the record of a flow's end may be than that of its beginning
)

// spool keeps flows in files until they were acknowledged. It implements proxy.Journal.
//
// Records are written and not synced. The end of this process loses none of them. A power cut loses those of the last
// seconds, together with the sandboxes themselves.
type spool struct {
	dir  *os.Root
	lock *os.File
	max  int64
	log  *slog.Logger

	mu       sync.Mutex // guards the fields below
	segments []*segment // oldest first; the last one is written
	out      *os.File   // the last segment
	last     int64      // number of the last record
	bytes    int64      // size of all segments
	open     map[string]core.Flow
	reserved int64                    // bytes reserved for the ends of open flows
	room     map[string]int64         // parts of reserved, by flow id
	of       map[core.SandboxID]int64 // bytes of each sandbox's records, including its reserved bytes
	unsaid   int64                    // refused flows and lost ends
	tallies  map[string]tally         // tallies that have not ended, by the id of the first flow
	late     map[string]late          // ends that could not be written yet, by flow id
	slots    slots
	said     int64 // the second of the last log line about an end that was not recorded
	aside    aside

	at    position // position of the first record that was not acknowledged
	given int64    // last record of the last batch; 0: none
	next  position // position after that record
	news  chan struct{}
}

// segment is a file of records.
type segment struct {
	first int64 // number of its first record, if it has one
	head  int64 // bytes of the lines before its records
	size  int64
	full  int64                    // at this size the next segment begins
	of    map[core.SandboxID]int64 // bytes of each sandbox's records
}

// add counts the bytes of a record.
func (s *spool) add(seg *segment, id core.SandboxID, n int64) {
	if seg.size, s.bytes = seg.size+n, s.bytes+n; id == "" { // it belongs to no sandbox
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

// share is the number of bytes that one sandbox's flows may take. Records are removed by whole segments, so the share
// is at least two segments, if the spool is that large.
func (s *spool) share() int64 { return max(s.max/shares, min(s.max, 2*segmentSize)) }

// position is a place in the spool.
type position struct {
	first int64 // number of the segment's first record
	off   int64
}

// line is a line of a segment. The first line, together with the Parts lines after it, says what was under way when the
// segment began: each has one flow in Open or in Tally. Every other line has a record, or a tally that began. An older
// version put everything into the first line.
type line struct {
	N     int64       `json:"n,omitempty"`
	Flow  *core.Flow  `json:"flow,omitempty"`
	Open  []core.Flow `json:"open,omitempty"`
	Parts int         `json:"parts,omitempty"`
	Tally *core.Flow  `json:"tally,omitempty"` // not reported
	Slot  int         `json:"slot,omitempty"`  // slot with the count of Tally
}

const (
	nameForm = "flows-%020d.jsonl"
	lockName = "lock"
)

func (s *segment) name() string { return fmt.Sprintf(nameForm, s.first) }

// openSpool opens the spool in a directory and continues with its records. Only one process at a time can open it.
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
		return nil, core.Wrapf(err, core.Conflict, core.CodeStateConflict, "another egress process has its spool in the same directory")
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
		if err := s.scan(seg); err != nil { // the other segments can still be read
			if err := s.aside.segment(seg.name(), err); err != nil {
				return nil, err
			}
			continue
		}
		s.segments = append(s.segments, seg)
	}
	s.aside.logFound()
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
	for _, f := range open { // the process that carried them has ended
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

// maxLine bounds a line with a flow, in bytes.
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

// note keeps the list of flows that are under way.
func (s *spool) note(f core.Flow) {
	switch {
	case f.Outcome == core.FlowAllowed && f.Ended.IsZero():
		s.open[f.ID] = f
	case !f.Ended.IsZero():
		delete(s.open, f.ID)
		delete(s.tallies, f.ID)
	}
}

// heading returns the first lines of a segment.
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

// begin begins another segment. The caller holds mu, or nobody else knows the spool.
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
	seg.full = seg.size + max(segmentSize, seg.head) // repeated heads take at most half of the spool
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

// take appends the first line of a flow if there is room for the line and, if the flow will have an end, for the end.
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

// append writes a line, completely or not at all. The caller has made sure that there is room.
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
		} else { // the segment goes on: there is no room for the head of another one
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

// after acknowledges the batch that ends with a record, and waits for the next batch. A batch that was not acknowledged
// is returned again.
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

// forget removes the segments whose records were all acknowledged.
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
	// A child process between fork and exec has a copy of the lock file's descriptor. Closing alone would leave the
	// lock to that child.
	return errors.Join(s.out.Close(), s.slots.close(), unix.Flock(int(s.lock.Fd()), unix.LOCK_UN), s.lock.Close())
}
