package host

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	shares      = 8        // of which a sandbox has one at most
	segmentSize = 4 << 20  // from here on another file is begun
	batchSize   = 96 << 10 // of records that are given at once: a message takes them
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

	at    position // of the first record that was not acknowledged
	given int64    // the last record of the batch that was given last; 0: none
	next  position // behind it
	news  chan struct{}
}

// segment is a file of records.
type segment struct {
	first int64 // number of its first record, if it has one
	head  int64 // bytes of its first line
	size  int64
	of    map[core.SandboxID]int64 // bytes of each one's records
}

// add counts a record.
func (s *spool) add(seg *segment, id core.SandboxID, n int64) {
	seg.size, s.bytes = seg.size+n, s.bytes+n
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

// line is one of a segment. The first has Open, every other a record.
type line struct {
	N    int64       `json:"n,omitempty"`
	Flow *core.Flow  `json:"flow,omitempty"`
	Open []core.Flow `json:"open,omitempty"` // what was under way when the segment was begun
}

const (
	nameForm = "flows-%020d.jsonl"
	lockName = "lock"
)

func (s *segment) name() string { return fmt.Sprintf(nameForm, s.first) }

// openSpool goes on with what is in a directory. There is one spool of it at a time.
func openSpool(dir *os.Root, limit int64, log *slog.Logger) (_ *spool, err error) {
	s := &spool{dir: dir, max: limit, log: log, open: map[string]core.Flow{}, room: map[string]int64{}, of: map[core.SandboxID]int64{}, news: make(chan struct{})}
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
	for _, e := range list {
		seg := &segment{of: map[core.SandboxID]int64{}}
		if n, err := fmt.Sscanf(e.Name(), nameForm, &seg.first); n != 1 || err != nil || seg.name() != e.Name() {
			continue
		}
		s.segments = append(s.segments, seg)
	}
	slices.SortFunc(s.segments, func(a, b *segment) int { return int(a.first - b.first) })
	for _, seg := range s.segments {
		if err := s.scan(seg); err != nil {
			return nil, err
		}
	}
	left := s.open
	if err := s.begin(); err != nil {
		return nil, err
	}
	s.at = position{first: s.segments[0].first}
	for _, f := range left { // what carried them is gone
		f.Outcome, f.Reason, f.Ended = core.FlowFailed, "the egress proxy of its host ended", time.Now()
		s.End(f)
	}
	return s, nil
}

// scan reads a segment that an earlier process has left, and cuts off a record that it did not finish.
func (s *spool) scan(seg *segment) error {
	f, err := s.dir.OpenFile(seg.name(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	damaged := 0
	r := bufio.NewReader(f)
	for {
		b, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			if len(b) > 0 {
				s.log.Warn("a record that was not finished is dropped", "segment", seg.name())
			}
			break
		}
		if err != nil {
			return err
		}
		var l line
		switch {
		case json.Unmarshal(b, &l) != nil:
			damaged++
		case seg.size == 0:
			seg.head = int64(len(b))
			s.open = map[string]core.Flow{}
			for _, f := range l.Open {
				s.open[f.ID] = f
			}
		case l.Flow != nil:
			s.last = max(s.last, l.N)
			s.note(*l.Flow)
			s.add(seg, l.Flow.SandboxID, int64(len(b)))
			continue
		}
		seg.size, s.bytes = seg.size+int64(len(b)), s.bytes+int64(len(b))
	}
	s.last = max(s.last, seg.first-1)
	if damaged > 0 {
		s.log.Error("records of flows cannot be read", "segment", seg.name(), "count", damaged)
	}
	return f.Truncate(seg.size)
}

// note keeps count of what is under way.
func (s *spool) note(f core.Flow) {
	switch {
	case f.Outcome == core.FlowAllowed && f.Ended.IsZero():
		s.open[f.ID] = f
	case !f.Ended.IsZero():
		delete(s.open, f.ID)
	}
}

// begin begins another segment. mu is held, or nobody else knows the spool.
func (s *spool) begin() error {
	seg := &segment{first: s.last + 1, of: map[core.SandboxID]int64{}}
	l := line{}
	for _, f := range s.open {
		l.Open = append(l.Open, f)
	}
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	if n := len(s.segments); n > 0 && s.segments[n-1].first == seg.first { // it has no record
		s.bytes -= s.segments[n-1].size
		s.segments = s.segments[:n-1]
	}
	out, err := s.dir.OpenFile(seg.name(), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	b = append(b, '\n')
	if _, err := out.Write(b); err != nil {
		return errors.Join(err, out.Close(), s.dir.Remove(seg.name()))
	}
	if s.out != nil {
		if err := s.out.Close(); err != nil {
			s.log.Warn("a segment of the spool was not closed", "err", err)
		}
	}
	seg.head, seg.size = int64(len(b)), int64(len(b))
	s.out, s.segments, s.bytes = out, append(s.segments, seg), s.bytes+seg.size
	return nil
}

// Begin implements proxy.Journal.
func (s *spool) Begin(f core.Flow) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, err := s.encode(f)
	if err != nil {
		return err
	}
	need, reserve := int64(len(b)), int64(0)
	if f.Outcome == core.FlowAllowed {
		reserve = need + endReserve
	}
	if s.bytes+s.reserved+need+reserve > s.max {
		s.unsaid++
		return core.Errorf(core.Exhausted, core.CodeDiskFull, "the spool of flows is full (%d bytes): its runner has not been able to tell the controller of them", s.max)
	}
	if s.of[f.SandboxID]+need+reserve > s.share() {
		s.unsaid++
		return core.Errorf(core.Exhausted, core.CodeDiskFull, "the flows of %s take its whole share of the spool (%d bytes): its runner has not been able to tell the controller of them", f.SandboxID, s.share())
	}
	if err := s.append(f.SandboxID, b); err != nil {
		s.unsaid++
		return err
	}
	if reserve > 0 {
		s.reserved, s.room[f.ID] = s.reserved+reserve, reserve
		s.charge(f.SandboxID, reserve)
	}
	s.note(f)
	return nil
}

// End implements proxy.Journal.
func (s *spool) End(f core.Flow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, err := s.encode(f)
	if err == nil {
		err = s.append(f.SandboxID, b)
	}
	if err != nil { // the next process ends it
		s.unsaid++
		s.log.Error("the end of a flow was not recorded", "sandbox_id", f.SandboxID, "flow", f.ID, "err", err)
		return
	}
	s.reserved -= s.room[f.ID]
	s.charge(f.SandboxID, -s.room[f.ID])
	delete(s.room, f.ID)
	s.note(f)
}

func (s *spool) encode(f core.Flow) ([]byte, error) {
	b, err := json.Marshal(line{N: s.last + 1, Flow: &f})
	return append(b, '\n'), err
}

// append writes a record, whole or not at all.
func (s *spool) append(id core.SandboxID, b []byte) error {
	seg := s.segments[len(s.segments)-1]
	if seg.size-seg.head >= segmentSize {
		if err := s.begin(); err != nil {
			return err
		}
		seg = s.segments[len(s.segments)-1]
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

// read gives the records from at on, as many as a message takes.
func (s *spool) read() (out egressapi.Batch, err error) {
	i := slices.IndexFunc(s.segments, func(seg *segment) bool { return seg.first == s.at.first })
	pos, size := s.at, 0
	for ; i < len(s.segments); i++ {
		seg := s.segments[i]
		if seg.first != pos.first {
			pos = position{first: seg.first}
		}
		if size, err = s.readSegment(seg, &pos, &out, size); err != nil || size >= batchSize {
			break
		}
	}
	if len(out.Flows) > 0 {
		s.given, s.next = out.Last, pos
	} else if err == nil {
		s.at = pos // damaged records, or none
		s.forget()
	}
	return out, err
}

func (s *spool) readSegment(seg *segment, pos *position, out *egressapi.Batch, size int) (int, error) {
	if pos.off >= seg.size {
		return size, nil
	}
	f, err := s.dir.Open(seg.name())
	if err != nil {
		return size, err
	}
	defer f.Close()
	r := bufio.NewReader(io.NewSectionReader(f, pos.off, seg.size-pos.off))
	for size < batchSize {
		b, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return size, err
		}
		pos.off += int64(len(b))
		var l line
		if json.Unmarshal(b, &l) != nil || l.Flow == nil {
			continue // the head of a segment, or what scan has told of
		}
		size += len(bytes.TrimSpace(b))
		out.Last, out.Flows = l.N, append(out.Flows, *l.Flow)
	}
	return size, nil
}

func (s *spool) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.out.Close(), s.lock.Close())
}
