// Package writelog keeps the writes to guests' files that a data plane has passed on, until a controller has recorded them in
// the audit log. They are in a file that is only appended to, so the end of the process, however sudden, loses none. Each write
// has a number, by which the controller records it once, however often it is told.
package writelog

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// KeyWrites bounds the writes of one API key's passes that wait, so that no tenant takes the places of the others.
const KeyWrites = 128

// maxLine bounds a line of the file, and maxLines the lines of writes in it: those that wait, and as many that were recorded.
const (
	maxLine  = 16 << 10
	maxLines = 2 * runnerapi.MaxDataWrites
)

// header is the first line of the file.
type header struct {
	Log    string        `json:"log"`    // of this file, never used again: numbers count within it
	Runner core.RunnerID `json:"runner"` // whose sandboxes were written to
	Next   int64         `json:"next"`   // the number of the first write in the file, or behind it
}

// mark is a line of the file that is not a write: a controller has recorded all writes up to this number.
type mark struct {
	Recorded int64 `json:"recorded"`
}

// line is a line of the file behind the first: a mark or a write.
type line struct {
	mark
	runnerapi.DataWrite
}

// Log is the file. It is safe for concurrent use.
type Log struct {
	path string

	// syncMu is held while the file is made durable or replaced. It is taken before mu.
	syncMu sync.Mutex
	synced int64 // the last number that is durable

	// mu guards what follows.
	mu      sync.Mutex
	head    header
	file    *os.File
	broken  bool  // nothing may be appended to the file
	size    int64 // of the good part of the file
	lines   int   // behind the first
	next    int64
	pending []runnerapi.DataWrite
	keys    map[core.KeyID]int // how many of pending each key has
}

// Open opens the log, or makes it. What it cannot read it sets aside: the log begins anew, and the file stays for people.
func Open(path string, runner core.RunnerID, log *slog.Logger) (*Log, error) {
	l := &Log{path: path, keys: map[core.KeyID]int{}}
	err := l.load()
	switch {
	case err == nil && l.head.Runner == runner:
	case errors.Is(err, fs.ErrNotExist):
		l.begin(runner)
	default:
		// Another runner's: the controllers would not take its writes from this one.
		aside := path + ".unreadable"
		if err == nil {
			aside = path + "." + string(l.head.Runner)
		}
		if moved := os.Rename(path, aside); moved != nil {
			return nil, fmt.Errorf("set the log of writes aside: %w", errors.Join(moved, err))
		}
		log.Error("the log of writes by pass was set aside: its writes do not reach the audit log; read the file", "file", aside, "writes", len(l.pending), "err", err)
		l.begin(runner)
	}
	return l, l.compact()
}

func (l *Log) begin(runner core.RunnerID) {
	l.head = header{Log: rand.Text(), Runner: runner}
	l.next, l.pending, l.keys = 1, nil, map[core.KeyID]int{}
}

// load reads the file. A last line that is cut was never acknowledged.
func (l *Log) load() error {
	f, err := os.Open(l.path)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(io.LimitReader(f, (maxLines+2)*maxLine))
	lines.Buffer(nil, maxLine)
	lines.Split(wholeLines)
	if !lines.Scan() {
		return errors.Join(errors.New("it has no first line"), lines.Err())
	}
	if err := json.Unmarshal(lines.Bytes(), &l.head); err != nil {
		return fmt.Errorf("its first line: %w", err)
	}
	l.next = l.head.Next
	for lines.Scan() {
		var w line
		if err := json.Unmarshal(lines.Bytes(), &w); err != nil {
			return fmt.Errorf("the line of write %d: %w", l.next, err)
		}
		switch {
		case w.Number == l.next:
			l.next++
			l.pending = append(l.pending, w.DataWrite)
			l.keys[w.KeyID]++
		case w.Number == 0 && w.Recorded > 0 && w.Recorded < l.next:
			l.forget(w.Recorded)
		default:
			return fmt.Errorf("write %d or mark %d stands in the place of write %d", w.Number, w.Recorded, l.next)
		}
	}
	return lines.Err()
}

// wholeLines splits at the ends of lines, and leaves out what has none.
func wholeLines(data []byte, _ bool) (advance int, token []byte, err error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i], nil
	}
	return 0, nil, nil
}

func (l *Log) compact() error {
	l.syncMu.Lock()
	defer l.syncMu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rewrite()
}

// rewrite replaces the file by one with what waits. The caller holds both locks.
func (l *Log) rewrite() error {
	l.head.Next = l.next - int64(len(l.pending))
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	if err := e.Encode(l.head); err != nil {
		return err
	}
	for _, w := range l.pending {
		if err := e.Encode(w); err != nil {
			return err
		}
	}
	if err := atomicfile.Write(l.path, b.Bytes(), 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if l.file != nil {
		_ = l.file.Close() // it is not the log any more
	}
	l.file, l.broken, l.size, l.lines, l.synced = f, false, int64(b.Len()), len(l.pending), l.next-1
	return nil
}

// errFile has what to do when the file cannot be written.
func errFile(err error) error {
	code, do := core.CodeWriteNotLogged, "read the log of the runner, or write through the API"
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		do = "give the runner's data directory more room, or write through the API"
	}
	return core.Wrapf(err, core.Unavailable, code, "the write was refused, because its record for the audit log could not be kept on the runner; %s", do)
}

// Append keeps a write. After an error the write must not happen; after nil it is told to a controller, also when this process
// is killed. It returns how many writes wait, of the same key and of all.
func (l *Log) Append(w runnerapi.DataWrite) (own, all int, err error) {
	number, own, all, err := l.add(w)
	if errors.Is(err, errRewrite) {
		if err := l.compact(); err != nil {
			return own, all, errFile(err)
		}
		number, own, all, err = l.add(w)
	}
	if err != nil {
		return own, all, err
	}
	if err := l.sync(number); err != nil {
		return own, all, errFile(err)
	}
	return own, all, nil
}

// errRewrite says that the file must be rewritten before anything can be appended.
var errRewrite = core.Errorf(core.Unavailable, core.CodeWriteNotLogged, "the log of writes by pass is being rewritten; try again")

func (l *Log) add(w runnerapi.DataWrite) (number int64, own, all int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	own, all = l.keys[w.KeyID], len(l.pending)
	switch {
	case all >= runnerapi.MaxDataWrites:
		return 0, own, all, core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "%d writes wait for a controller to record them; try again, or write through the API", all)
	case own >= KeyWrites:
		return 0, own, all, core.Errorf(core.Exhausted, core.CodeRateLimited,
			"%d writes with passes of this API key wait for a controller to record them, and no more may; try again in a second, write many files as one archive (untar), or write through the API", own)
	}
	if l.lines >= maxLines || l.broken || l.file == nil {
		return 0, own, all, errRewrite
	}
	w.Number = l.next
	text, err := json.Marshal(w)
	if err != nil {
		return 0, own, all, err
	}
	if len(text) >= maxLine {
		return 0, own, all, core.Errorf(core.Invalid, core.CodeInvalidField, "path: the record of this write takes %d bytes, and may take %d", len(text), maxLine)
	}
	if err := l.write(text); err != nil {
		return 0, own, all, errFile(err)
	}
	l.next++
	l.pending = append(l.pending, w)
	l.keys[w.KeyID]++
	return w.Number, own + 1, all + 1, nil
}

// write appends a line to the file. After an error the file is as it was, or broken. The caller holds mu.
func (l *Log) write(text []byte) error {
	text = append(text, '\n')
	if _, err := l.file.WriteAt(text, l.size); err != nil {
		cut := l.file.Truncate(l.size)
		l.broken = cut != nil
		return errors.Join(err, cut)
	}
	l.size += int64(len(text))
	l.lines++
	return nil
}

// sync makes a write durable, with all that were added before it.
func (l *Log) sync(number int64) error {
	l.syncMu.Lock()
	defer l.syncMu.Unlock()
	if l.synced >= number {
		return nil
	}
	l.mu.Lock()
	f, last := l.file, l.next-1
	l.mu.Unlock()
	if f == nil {
		return errors.New("the log of writes is not open")
	}
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return err
	}
	l.synced = last
	return nil
}

// Pending returns the writes that no controller is known to have recorded, oldest first, and the log that their numbers count in.
// It returns no more than one heartbeat may carry.
func (l *Log) Pending() (log string, list []runnerapi.DataWrite) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.head.Log, append([]runnerapi.DataWrite(nil), l.pending[:min(len(l.pending), runnerapi.MaxDataWrites)]...)
}

// Recorded forgets the writes up to a number. The file keeps the number. After a power cut, writes that were recorded may be told
// again.
func (l *Log) Recorded(number int64) error {
	l.syncMu.Lock()
	defer l.syncMu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.forget(number) {
		return nil
	}
	if len(l.pending) == 0 || l.lines >= maxLines/2 || l.broken || l.file == nil {
		return l.rewrite()
	}
	text, err := json.Marshal(mark{l.pending[0].Number - 1})
	if err != nil {
		return err
	}
	return l.write(text)
}

// forget drops the writes up to a number from those that wait. It reports whether there were any.
func (l *Log) forget(number int64) bool {
	n := 0
	for n < len(l.pending) && l.pending[n].Number <= number {
		key := l.pending[n].KeyID
		if l.keys[key]--; l.keys[key] <= 0 {
			delete(l.keys, key)
		}
		n++
	}
	clear(l.pending[:n])
	l.pending = l.pending[n:]
	return n > 0
}

// Close closes the file. What waits stays in it.
func (l *Log) Close() error {
	l.syncMu.Lock()
	defer l.syncMu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	err := l.file.Close()
	l.file = nil
	return err
}
