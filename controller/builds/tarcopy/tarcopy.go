// Package tarcopy carries out COPY on a tar: it selects entries by patterns and gives them their
// places below the destination. It reads a stream and keeps nothing of it. No name leads out of the
// context, and no link is followed: the guest unpacks what is selected below the destination only.
package tarcopy

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/moby/patternmatcher"

	"github.com/coppice-dev/coppice/controller/builds/plan"
	"github.com/coppice-dev/coppice/core"
)

// Bounds of a context.
const (
	maxEntries  = 100_000
	maxUnpacked = 2 << 30 // bytes, without compression
	maxName     = 4096
)

// Selection is what a copy selects.
type Selection struct {
	Digest string // of names, types, modes and contents; not of times
	Dir    bool   // the destination is a directory
	Files  int
}

// Open is a function that begins to read the upload.
type Open func() io.Reader

// Select reads an upload and says what a copy selects of it.
func Select(c plan.Copy, open Open) (Selection, error) {
	sum, out := sha256.New(), Selection{Dir: c.Dir}
	matched := make([]bool, len(c.Sources))
	err := walk(c, open, func(m match, h *tar.Header, body io.Reader) error {
		matched[m.source] = true
		if m.dir {
			out.Dir = true
		}
		out.Files++
		return digest(sum, m, h, body)
	})
	if err != nil {
		return Selection{}, err
	}
	for i, ok := range matched {
		if !ok {
			return Selection{}, core.Errorf(core.NotFound, core.CodeFileNotFound, "the context has nothing that matches %q; .dockerignore may leave it out", core.Clip(c.Sources[i]))
		}
	}
	for _, f := range c.Inline {
		_, _ = fmt.Fprintf(sum, "inline %q %q\n", f.Name, f.Data)
		out.Files++
	}
	out.Digest = hex.EncodeToString(sum.Sum(nil))
	return out, nil
}

func digest(sum hash.Hash, m match, h *tar.Header, body io.Reader) error {
	_, _ = fmt.Fprintf(sum, "%d %q %c %o %q %d\n", m.source, m.rel, h.Typeflag, h.Mode, h.Linkname, h.Size)
	if _, err := io.Copy(sum, body); err != nil {
		return broken(err)
	}
	return nil
}

// Owner are the ids of what is copied.
type Owner struct{ UID, GID int }

// Write writes the selected entries as a tar for the directory that Place names.
func Write(c plan.Copy, dir bool, owner Owner, open Open, to io.Writer) error {
	out := tar.NewWriter(to)
	mode := int64(-1)
	if c.Mode != "" {
		n, err := strconv.ParseInt(c.Mode, 8, 32)
		if err != nil {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "mode %q is not octal", core.Clip(c.Mode))
		}
		mode = n
	}
	put := func(rel string, h tar.Header, body io.Reader) error {
		if rel == "" { // a file that gets the name of the destination, or the copied directory itself
			if h.Typeflag == tar.TypeDir {
				return nil
			}
			rel = path.Base(c.Dest)
		}
		head := &tar.Header{
			Typeflag: h.Typeflag, Name: rel, Linkname: h.Linkname, Size: h.Size, Mode: h.Mode & 0o7777, Uid: owner.UID, Gid: owner.GID, ModTime: h.ModTime, Format: tar.FormatPAX,
		}
		if mode >= 0 && h.Typeflag != tar.TypeSymlink {
			head.Mode = mode
		}
		if err := out.WriteHeader(head); err != nil {
			return fmt.Errorf("write tar: %w", err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := io.Copy(out, body); err != nil {
				return broken(err)
			}
		}
		return nil
	}
	err := walk(c, open, func(m match, h *tar.Header, body io.Reader) error {
		rel := m.rel
		if !dir {
			rel = ""
		}
		return put(rel, *h, body)
	})
	if err != nil {
		return err
	}
	for _, f := range c.Inline {
		rel := f.Name
		if !dir {
			rel = ""
		}
		if err := put(rel, tar.Header{Typeflag: tar.TypeReg, Size: int64(len(f.Data)), Mode: 0o644, ModTime: time.Unix(0, 0)}, strings.NewReader(f.Data)); err != nil {
			return err
		}
	}
	if err := out.Close(); err != nil {
		return fmt.Errorf("write tar: %w", err)
	}
	return nil
}

// Place is the directory into which the tar of Write belongs.
func Place(c plan.Copy, dir bool) string {
	if dir {
		return c.Dest
	}
	return path.Dir(c.Dest)
}

// match is an entry that a source selects.
type match struct {
	source int
	rel    string // its place below the destination; empty: the selected directory itself
	dir    bool   // the source selects a directory
}

// find says how the sources select a name. A pattern that matches a directory selects what is in it.
func find(sources []string, name string, isDir bool) (match, bool) {
	parts := strings.Split(name, "/")
	for i, s := range sources {
		s = strings.TrimPrefix(path.Clean("/"+s), "/")
		if s == "" {
			return match{source: i, rel: name, dir: true}, true
		}
		n := strings.Count(s, "/") + 1
		if n > len(parts) {
			continue
		}
		if ok, err := path.Match(s, strings.Join(parts[:n], "/")); err != nil || !ok {
			continue
		}
		switch {
		case n < len(parts):
			return match{source: i, rel: strings.Join(parts[n:], "/"), dir: true}, true
		case isDir:
			return match{source: i, dir: true}, true
		}
		return match{source: i, rel: parts[n-1]}, true
	}
	return match{}, false
}

// walk reads the entries that a copy selects.
func walk(c plan.Copy, open Open, fn func(m match, h *tar.Header, body io.Reader) error) error {
	for _, s := range c.Sources {
		if _, err := path.Match(s, ""); err != nil || strings.ContainsRune(s, 0) {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "the source %q is no pattern", core.Clip(s))
		}
	}
	if len(c.Sources) == 0 {
		return nil
	}
	exclude, err := patternmatcher.New(c.Exclude)
	if err != nil {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the names to leave out: %s", core.Clip(err.Error()))
	}
	plain, err := decompress(open())
	if err != nil {
		return err
	}
	limited := &bounded{from: plain, left: maxUnpacked}
	selected := int64(0) // a sparse file has bytes that are not in the stream
	tr := tar.NewReader(limited)
	for entries := 0; ; entries++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return broken(err)
		}
		if entries == maxEntries {
			return core.Errorf(core.Invalid, core.CodeMalformedBody, "the context has more than %d entries", maxEntries)
		}
		name, err := clean(h)
		if err != nil {
			return err
		}
		if name == "" {
			continue
		}
		m, ok := find(c.Sources, name, h.Typeflag == tar.TypeDir)
		if !ok {
			continue
		}
		if len(c.Exclude) > 0 {
			if out, err := exclude.MatchesOrParentMatches(name); err != nil || out {
				continue
			}
		}
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeDir, tar.TypeSymlink:
		default:
			return core.Errorf(core.Invalid, core.CodeMalformedBody, "the context has %q, which is no file, directory or symbolic link", core.Clip(name))
		}
		if h.Size < 0 || h.Size > maxUnpacked-selected {
			return errLarge
		}
		selected += h.Size
		if err := fn(m, h, tr); err != nil {
			return err
		}
	}
}

// clean is the name of an entry without what only says that it is below the context. A name that leads out of the context is an error.
func clean(h *tar.Header) (string, error) {
	if len(h.Name) > maxName || len(h.Linkname) > maxName {
		return "", core.Errorf(core.Invalid, core.CodeMalformedBody, "the context has a name of more than %d bytes", maxName)
	}
	name := strings.TrimLeft(h.Name, "/")
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", core.Errorf(core.Invalid, core.CodeMalformedBody, "the context has the name %q, which leads out of it", core.Clip(h.Name))
		}
	}
	if name = path.Clean(name); name == "." {
		return "", nil
	}
	return name, nil
}

func decompress(from io.Reader) (io.Reader, error) {
	b := bufio.NewReader(from)
	if magic, err := b.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, broken(err)
		}
		return z, nil
	}
	return b, nil
}

// bounded fails when more comes than it lets through.
type bounded struct {
	from io.Reader
	left int64
}

var errLarge = core.Errorf(core.Invalid, core.CodeBodyTooLarge, "the context has more than %d MiB without compression", maxUnpacked>>20)

// Read implements io.Reader.
func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errLarge
	}
	n, err := b.from.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err //nolint:wrapcheck // a reader's own error
}

// broken says that a context cannot be read, unless the error is one of ours.
func broken(err error) error {
	if _, ours := errors.AsType[*core.Error](err); ours {
		return err
	}
	return core.Errorf(core.Invalid, core.CodeMalformedBody, "the context is no complete tar, plain or with gzip: %s", core.Clip(err.Error()))
}
