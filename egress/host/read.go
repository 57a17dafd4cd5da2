package host

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
)

// The longest lines, in bytes, that are read from a segment of another process. An older version had no bound: lines up
// to this one are clipped and reported, longer lines are set aside.
const (
	maxOldLine = 1 << 20
	maxOldHead = 8 << 20
)

// nextLine reads a line and returns at most limit bytes of it; n is its full length. The error is io.EOF if the line
// has no end.
func nextLine(r *bufio.Reader, limit int) (text []byte, n int64, err error) {
	for {
		part, err := r.ReadSlice('\n')
		n += int64(len(part))
		text = append(text, part[:min(len(part), limit+1-len(text))]...)
		if err == nil || !errors.Is(err, bufio.ErrBufferFull) {
			return text, n, err
		}
	}
}

// parse decodes a line. If it cannot, why gives the reason in one word.
func parse(text []byte, limit int) (l line, why string) {
	switch {
	case len(text) > limit:
		return line{}, tooLong
	case json.Unmarshal(text, &l) != nil:
		return line{}, unreadable
	}
	return l, ""
}

// scan reads a segment that an earlier process left, and cuts off a record that this process did not finish. A line
// that cannot be used is set aside. An error means that the whole segment cannot be read.
func (s *spool) scan(seg *segment) error {
	f, err := s.dir.OpenFile(seg.name(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	before := s.bytes
	var head heading
	r := bufio.NewReader(f)
	for {
		limit := maxOldLine
		if seg.size == 0 {
			limit = maxOldHead
		}
		text, n, err := nextLine(r, limit)
		if errors.Is(err, io.EOF) {
			if n > 0 {
				s.log.Warn("an unfinished record at the end of a segment was dropped", "segment", seg.name())
			}
			break
		}
		if err != nil {
			for id, n := range seg.of {
				s.charge(id, -n)
			}
			s.bytes = before
			return err
		}
		l, why := parse(text, limit)
		if why != "" {
			s.aside.line(seg, seg.size, text, why)
		}
		switch id := core.SandboxID(""); {
		case seg.size == 0 && why == "":
			head.begin(l, s)
			seg.head = n
			s.add(seg, id, n)
		case head.parts > 0:
			head.more(l, s)
			seg.head += n
			s.add(seg, id, n)
		default:
			if l.Flow != nil || l.Tally != nil {
				id = s.recall(l, n)
			}
			s.add(seg, id, n)
		}
	}
	if s.last = max(s.last, seg.first-1); seg.size > seg.head {
		s.last = max(s.last, seg.first) // the segment keeps its number even if it has no readable record
	}
	return f.Truncate(seg.size)
}

// recall takes over a record, or a tally that had begun.
func (s *spool) recall(l line, n int64) core.SandboxID {
	s.last = max(s.last, l.N)
	if l.Tally != nil {
		t := tally{l.Tally.Clipped(), l.Slot}
		s.tallies[t.flow.ID] = t
		return t.flow.SandboxID
	}
	if n > maxLine {
		s.aside.found[wasClipped]++
	}
	f := l.Flow.Clipped()
	s.note(f)
	return f.SandboxID
}

// heading collects the flows that were under way when a segment began. It counts only when all its lines were read.
type heading struct {
	parts   int // lines that are still missing
	open    []core.Flow
	tallies []tally
}

// begin takes the first line of a segment.
func (h *heading) begin(l line, s *spool) {
	h.parts = l.Parts + 1
	h.more(l, s)
}

// more takes the next line of a heading.
func (h *heading) more(l line, s *spool) {
	h.open = append(h.open, l.Open...)
	if l.Tally != nil {
		h.tallies = append(h.tallies, tally{*l.Tally, l.Slot})
	}
	if h.parts--; h.parts > 0 {
		return
	}
	s.open, s.tallies = map[string]core.Flow{}, map[string]tally{}
	for _, f := range h.open {
		f = f.Clipped()
		s.open[f.ID] = f
	}
	for _, t := range h.tallies {
		t.flow = t.flow.Clipped()
		s.tallies[t.flow.ID] = t
	}
}

// read returns the records from position at on, as many as fit into a message.
func (s *spool) read() (out egressapi.Batch, err error) {
	i := slices.IndexFunc(s.segments, func(seg *segment) bool { return seg.first == s.at.first })
	pos, size := s.at, 0
	for ; i < len(s.segments) && size < batchSize; i++ {
		seg := s.segments[i]
		if seg.first != pos.first {
			pos = position{first: seg.first}
		}
		size, err = s.readSegment(seg, &pos, &out, size)
		if errors.Is(err, unix.EIO) || errors.Is(err, fs.ErrNotExist) { // this segment is lost, but the later ones can be read
			s.aside.found[unreadable]++
			s.log.Error("a segment of the spool cannot be read; its remaining records are lost", "segment", seg.name(), "offset", pos.off, "err", err)
			pos.off, err = seg.size, nil
		}
		if err != nil {
			break
		}
	}
	if len(out.Flows) > 0 {
		s.given, s.next = out.Last, pos
	} else if err == nil {
		s.at = pos // lines that are not reported, or nothing
		s.forget()
	}
	return out, err
}

// readSegment adds records to a batch until the batch is full, in bytes of its encoding. Then it returns batchSize as
// the size.
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
		limit := maxOldLine
		if pos.off == 0 {
			limit = maxOldHead
		}
		text, n, err := nextLine(r, limit)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return size, err
		}
		l, why := parse(bytes.TrimSpace(text), limit)
		if why != "" || l.Flow == nil {
			pos.off += n // the head of a segment, a tally, or a line that scan has set aside
			continue
		}
		flow := l.Flow.Clipped()
		encoded, err := json.Marshal(flow)
		if err != nil { // a time that JSON cannot express
			pos.off += n
			s.aside.found[unreadable]++
			continue
		}
		if size += len(encoded) + 1; size > batchSize { // it will be the first record of the next batch
			return batchSize, nil
		}
		pos.off += n
		out.Last, out.Flows = l.N, append(out.Flows, flow)
	}
	return size, nil
}
