// Package writelog keeps the writes to guests' files that a data plane has passed on, until a
// controller has recorded them in the audit log. A write is appended to a file and synced before it
// is acknowledged, so a killed process loses none. A file that has become long, or whose sync
// failed, is replaced by a new one. Each write has a number, so the controller records it once.
package writelog

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
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
	Free   int64         `json:"free"`   // no write had this number, or a higher one, when the file was begun
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

	// fileMu guards the file. It is held while the disk works, and taken before mu.
	fileMu sync.Mutex
	file   *os.File
	broken bool  // the file must be replaced before a write in it may be acknowledged
	size   int64 // of the good part of the file
	lines  int   // behind the first
	marked int64 // the last mark in the file

	// mu guards what follows. Nobody waits for the disk while holding it.
	mu       sync.Mutex
	head     header
	next     int64
	recorded int64                 // by a controller, up to this number
	pending  []runnerapi.DataWrite // all are durable
	queue    []*entry              // to be appended
	coming   int                   // how many are in queue, or are being appended
	keys     map[core.KeyID]int    // how many of those that wait or come each key has
	tidying  bool                  // a goroutine tidies the file
	failed   error                 // of the last tidying
	closed   bool
	tidiers  sync.WaitGroup
}

// entry is a write on its way to the file. fileMu guards done and err.
type entry struct {
	write runnerapi.DataWrite
	done  bool
	err   error
}

// Open opens the log, or makes it. A copy of a file with a damaged line is set aside for people. The log goes on with the lines
// before the damage.
func Open(path string, runner core.RunnerID, log *slog.Logger) (*Log, error) {
	l := &Log{path: path, keys: map[core.KeyID]int{}}
	err := l.load()
	switch {
	case err == nil && l.head.Runner == runner:
	case errors.Is(err, fs.ErrNotExist):
		l.begin(runner)
	case errors.Is(err, errDamaged) || err == nil:
		other, kept := l.head.Runner != runner, len(l.pending)
		if other { // the controllers would not take its writes from this runner
			l.begin(runner)
			kept = 0
		}
		aside, moved := setAside(path)
		if moved != nil {
			return nil, fmt.Errorf("set the log of writes aside: %w", errors.Join(moved, err))
		}
		log.Error("the log of writes by pass was damaged, or of another runner, and was set aside: some writes may not reach the audit log; read the file",
			"file", aside, "kept", kept, "err", err)
	default:
		return nil, fmt.Errorf("read the log of writes: %w", err)
	}
	l.fileMu.Lock()
	defer l.fileMu.Unlock()
	return l, l.rewrite()
}

func (l *Log) begin(runner core.RunnerID) {
	l.head = header{Log: rand.Text(), Runner: runner}
	l.next, l.recorded, l.pending, l.keys = 1, 0, nil, map[core.KeyID]int{}
}

// errFile has what to do when the file cannot be written.
func errFile(err error) error {
	code, do := core.CodeWriteNotLogged, "read the log of the runner, or write through the API"
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		do = "give the runner's data directory more room, or write through the API"
	}
	return core.Wrapf(err, core.Unavailable, code, "the write was refused, because its record for the audit log could not be kept on the runner; %s", do)
}

// Append keeps a write. After an error the write must not happen; after nil it is reported to a controller, also when this process
// is killed. It returns the number of waiting writes, of the same key and of all keys.
func (l *Log) Append(w runnerapi.DataWrite) (own, all int, err error) {
	e := &entry{write: w}
	if own, all, err = l.enqueue(e); err != nil {
		return own, all, err
	}
	l.fileMu.Lock()
	defer l.fileMu.Unlock()
	if !e.done { // else another has appended it with its own
		l.flush()
	}
	return own, all, e.err
}

func (l *Log) enqueue(e *entry) (own, all int, err error) {
	e.write.Number = math.MaxInt64 // the longest
	text, err := json.Marshal(e.write)
	if err != nil {
		return 0, 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	own, all = l.keys[e.write.KeyID], len(l.pending)+l.coming
	switch {
	case all >= runnerapi.MaxDataWrites:
		return own, all, core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "%d writes wait for a controller to record them; try again, or write through the API", all)
	case own >= KeyWrites:
		return own, all, core.Errorf(core.Exhausted, core.CodeRateLimited,
			"%d writes with passes of this API key wait for a controller to record them, and no more may; try again in a second, write many files as one archive (untar), or write through the API", own)
	case len(text) >= maxLine:
		return own, all, core.Errorf(core.Invalid, core.CodeInvalidField, "path: the record of this write takes %d bytes, and may take %d", len(text), maxLine)
	}
	l.queue = append(l.queue, e)
	l.coming++
	l.keys[e.write.KeyID]++
	return own + 1, all + 1, nil
}

// flush appends the queue and makes it durable. Only then do its writes wait for a controller. The caller holds fileMu.
func (l *Log) flush() {
	l.mu.Lock()
	batch, next, recorded := l.queue, l.next, l.recorded
	l.queue = nil
	l.mu.Unlock()
	for i, e := range batch {
		e.write.Number = next + int64(i)
	}
	err := l.put(batch, recorded)
	if err != nil {
		err = errFile(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.coming -= len(batch)
	for _, e := range batch {
		e.done, e.err = true, err
		if err != nil {
			l.release(e.write.KeyID)
			continue
		}
		l.pending = append(l.pending, e.write)
		l.next++
	}
}

func (l *Log) release(key core.KeyID) {
	if l.keys[key]--; l.keys[key] <= 0 {
		delete(l.keys, key)
	}
}

// Pending returns the writes that no controller is known to have recorded, oldest first, and the log that their numbers count in.
// It returns no more than one heartbeat may carry.
func (l *Log) Pending() (log string, list []runnerapi.DataWrite) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.head.Log, append([]runnerapi.DataWrite(nil), l.pending[:min(len(l.pending), runnerapi.MaxDataWrites)]...)
}

// Recorded forgets the writes up to a number. It does not wait for the disk: the file learns the number later, and after a crash
// some of these writes may be reported again. It returns the error of the last attempt to tidy the file.
func (l *Log) Recorded(number int64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.failed
	l.failed = nil
	if l.forget(number) && !l.tidying && !l.closed {
		l.tidying = true
		l.tidiers.Go(l.tidy)
	}
	return err
}

// forget drops the writes up to a number from those that wait. It reports whether there were any.
func (l *Log) forget(number int64) bool {
	n := 0
	for n < len(l.pending) && l.pending[n].Number <= number {
		l.release(l.pending[n].KeyID)
		l.recorded = l.pending[n].Number
		n++
	}
	clear(l.pending[:n])
	l.pending = l.pending[n:]
	return n > 0
}

// tidy brings the file up to date with what was recorded, until nothing more was.
func (l *Log) tidy() {
	for {
		l.mu.Lock()
		seen := l.recorded
		l.mu.Unlock()
		err := l.tidyFile()
		l.mu.Lock()
		if err != nil || l.recorded == seen || l.closed {
			l.tidying, l.failed = false, err
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
	}
}

// Close closes the file. What waits stays in it. It returns what the last tidying failed with, too.
func (l *Log) Close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.tidiers.Wait()
	l.mu.Lock()
	failed := l.failed
	l.failed = nil
	l.mu.Unlock()
	l.fileMu.Lock()
	defer l.fileMu.Unlock()
	if l.file == nil {
		return failed
	}
	err := errors.Join(failed, l.mark(), l.file.Close())
	l.file = nil
	return err
}
