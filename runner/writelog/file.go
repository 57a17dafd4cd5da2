package writelog

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// errDamaged says that the file cannot be read to its end. What was read before is good.
var errDamaged = errors.New("the log of writes is damaged")

// maxAside bounds the files that were set aside: only the newest stay.
const maxAside = 4

// maxNumber is far above every number of a write.
const maxNumber = 1 << 53

// load reads the file, up to the first line that is damaged. A last line that is cut was never acknowledged.
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
		return errors.Join(errDamaged, errors.New("it has no first line"), lines.Err())
	}
	if err := json.Unmarshal(lines.Bytes(), &l.head); err != nil {
		l.head = header{}
		return fmt.Errorf("%w in its first line: %w", errDamaged, err)
	}
	if l.head.Log == "" || l.head.Next < 1 || max(l.head.Next, l.head.Free) >= maxNumber {
		l.head = header{}
		return fmt.Errorf("%w: its first line has no name or number", errDamaged)
	}
	l.next, l.recorded = l.head.Next, l.head.Next-1
	if err := l.loadLines(lines); err != nil {
		l.next = max(l.next, l.head.Free) + maxLines // the numbers behind the damage were given
		return errors.Join(errDamaged, err)
	}
	l.next = max(l.next, l.head.Free)
	return nil
}

func (l *Log) loadLines(lines *bufio.Scanner) error {
	for n := 0; lines.Scan(); n++ {
		var w line
		if n >= maxLines {
			return fmt.Errorf("it has more than %d lines", maxLines)
		}
		if err := json.Unmarshal(lines.Bytes(), &w); err != nil {
			return fmt.Errorf("the line of write %d: %w", l.next, err)
		}
		switch {
		case w.Number >= l.next && w.Number < maxNumber: // numbers are left out where the file was damaged
			l.next = w.Number + 1
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

// setAside gives the file a second name, and removes the oldest of such files.
func setAside(path string) (string, error) {
	prefix := path + ".aside-"
	aside := prefix + time.Now().UTC().Format("20060102T150405.000000000Z")
	if err := os.Link(path, aside); err != nil {
		return "", err
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return "", err
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), filepath.Base(prefix)) {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	for _, name := range names[:max(0, len(names)-maxAside)] {
		if err := os.Remove(filepath.Join(filepath.Dir(path), name)); err != nil {
			return "", err
		}
	}
	return aside, nil
}

// put appends a batch to the file and makes it durable, with a mark of what was recorded. The caller holds fileMu.
func (l *Log) put(batch []*entry, recorded int64) error {
	if l.file == nil {
		return errors.New("the log of writes is not open")
	}
	if l.broken || l.lines+len(batch)+1 > maxLines {
		if err := l.rewrite(); err != nil {
			return err
		}
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	lines := len(batch)
	if recorded > l.marked {
		if err := e.Encode(mark{recorded}); err != nil {
			return err
		}
		lines++
	}
	for _, w := range batch {
		if err := e.Encode(w.write); err != nil {
			return err
		}
	}
	if err := l.write(b.Bytes(), lines); err != nil {
		return err
	}
	if err := unix.Fdatasync(int(l.file.Fd())); err != nil {
		l.broken = true // the kernel reports it once, and drops what it could not write
		return err
	}
	l.marked = max(l.marked, recorded)
	return nil
}

// write appends lines to the file. After an error the file is as it was, or broken. The caller holds fileMu.
func (l *Log) write(text []byte, lines int) error {
	if _, err := l.file.WriteAt(text, l.size); err != nil {
		cut := l.file.Truncate(l.size)
		l.broken = l.broken || cut != nil
		return errors.Join(err, cut)
	}
	l.size += int64(len(text))
	l.lines += lines
	return nil
}

// mark appends what was recorded, if the file does not have it. It need not be durable. The caller holds fileMu.
func (l *Log) mark() error {
	l.mu.Lock()
	recorded := l.recorded
	l.mu.Unlock()
	if recorded <= l.marked || l.broken {
		return nil
	}
	text, err := json.Marshal(mark{recorded})
	if err != nil {
		return err
	}
	if err := l.write(append(text, '\n'), 1); err != nil {
		return err
	}
	l.marked = recorded
	return nil
}

// content is what a new file has.
type content struct {
	text  bytes.Buffer
	lines int
	next  int64 // the first number that is not in it
	mark  int64
}

// waiting returns the content of a file with what waits.
func (l *Log) waiting() (*content, error) {
	l.mu.Lock()
	head, pending := l.head, slices.Clone(l.pending)
	c := &content{lines: len(pending), next: l.next, mark: l.recorded}
	l.mu.Unlock()
	head.Next, head.Free = c.next, c.next
	if len(pending) > 0 {
		head.Next = pending[0].Number
	}
	e := json.NewEncoder(&c.text)
	if err := e.Encode(head); err != nil {
		return nil, err
	}
	for _, w := range pending {
		if err := e.Encode(w); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// rewrite replaces the file by one with what waits. The caller holds fileMu.
func (l *Log) rewrite() error {
	c, err := l.waiting()
	if err != nil {
		return err
	}
	l.broken = true // until the new file is in use: the old one may have lost its name
	if err := atomicfile.Write(l.path, c.text.Bytes(), 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	l.use(f, c)
	return nil
}

// use goes on with a new file. The caller holds fileMu.
func (l *Log) use(f *os.File, c *content) {
	if l.file != nil {
		_ = l.file.Close() // it is not the log any more
	}
	l.file, l.broken, l.size, l.lines, l.marked = f, false, int64(c.text.Len()), c.lines, c.mark
}

// tidyFile marks in the file what was recorded. It replaces the file where much of it was recorded.
func (l *Log) tidyFile() error {
	l.fileMu.Lock()
	old := l.file
	if old != nil {
		l.mu.Lock()
		waste := l.lines - len(l.pending)
		l.mu.Unlock()
		if waste < maxLines/4 && !l.broken {
			defer l.fileMu.Unlock()
			return l.mark()
		}
	}
	l.fileMu.Unlock()
	if old == nil {
		return nil
	}
	return l.compact(old)
}

// compact replaces the file as rewrite does, but others may append to the old file while the new one is written.
func (l *Log) compact(old *os.File) (err error) {
	c, err := l.waiting()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(l.path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	used := false
	defer func() {
		if used {
			return
		}
		err = errors.Join(err, f.Close())
		if gone := os.Remove(f.Name()); !errors.Is(gone, fs.ErrNotExist) {
			err = errors.Join(err, gone)
		}
	}()
	if _, err := f.Write(c.text.Bytes()); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	l.fileMu.Lock()
	defer l.fileMu.Unlock()
	if l.file != old {
		return nil // replaced meanwhile
	}
	used, err = l.swap(f, c)
	return err
}

// swap appends to a new file what came since its content was taken, and goes on with it. The caller holds fileMu.
func (l *Log) swap(f *os.File, c *content) (used bool, err error) {
	l.mu.Lock()
	recorded := l.recorded
	since := slices.DeleteFunc(slices.Clone(l.pending), func(w runnerapi.DataWrite) bool { return w.Number < c.next })
	l.mu.Unlock()
	if recorded >= c.next { // all of it was recorded: nothing of it is needed, and numbers would be missing
		return false, l.rewrite()
	}
	had := c.text.Len()
	e := json.NewEncoder(&c.text)
	for _, w := range since {
		if err := e.Encode(w); err != nil {
			return false, err
		}
	}
	c.lines += len(since)
	if recorded > c.mark {
		if err := e.Encode(mark{recorded}); err != nil {
			return false, err
		}
		c.lines++
		c.mark = recorded
	}
	if c.text.Len() > had {
		if _, err := f.Write(c.text.Bytes()[had:]); err != nil {
			return false, err
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			return false, err
		}
	}
	l.broken = true // until the new file is in use: the old one may have lost its name
	if err := atomicfile.Rename(f.Name(), l.path); err != nil {
		return false, err
	}
	l.use(f, c)
	return true, nil
}
