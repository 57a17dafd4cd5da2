// Package rootimage reads the root file system of an image from outside, within bounds. The file
// system may come from a tenant: with an imported checkpoint, or as a tar that became an image.
//
// The library that reads it (go-erofs) checks its input and has few bounds: a directory of 64 MiB
// becomes half a gigabyte of entries. This package reads directories in parts and stops when one
// has more than a root file system has. Anything that breaks a rule is a DamagedError; a caller
// that reads on skips that object and says so. The users of this package run in a confined helper.
package rootimage

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/erofs/go-erofs"
)

// The bounds of one directory.
const (
	MaxDirectory = 32 << 20 // bytes
	MaxEntries   = 1 << 18
	maxName      = 255
	maxNames     = 16 << 20 // bytes of all names
	part         = 1024     // entries that are read at a time
)

// MaxFile is the largest file, in bytes.
const MaxFile = 1 << 44

// DamagedError says that the image does not hold what its structures say, or more than a root file system has.
type DamagedError struct{ what string }

func (e *DamagedError) Error() string { return "the image's root file system is damaged: " + e.what }

// Short is the DamagedError of a file that has less content than its size.
func Short() error { return damaged("a file ends before its size") }

func damaged(format string, a ...any) error { return &DamagedError{fmt.Sprintf(format, a...)} }

// FS is one image. Names are as package io/fs has them.
type FS struct {
	image  lower
	source *source
}

// lower is what go-erofs's file system can do.
type lower interface {
	fs.FS
	fs.StatFS
	fs.ReadLinkFS
}

// source notes errors that are the host's: a disk that cannot be read is not a damaged image.
type source struct {
	r      io.ReaderAt
	failed atomic.Pointer[error]
}

// ReadAt implements io.ReaderAt.
func (s *source) ReadAt(b []byte, off int64) (int, error) {
	if off < 0 {
		return 0, io.ErrUnexpectedEOF
	}
	n, err := s.r.ReadAt(b, off)
	switch {
	case err == nil:
	case errors.Is(err, io.EOF): // nothing honest is beyond the end; the library would take it for the end of a file
		err = io.ErrUnexpectedEOF
	default:
		s.failed.CompareAndSwap(nil, &err)
	}
	return n, err
}

// Open reads the superblock.
func Open(r io.ReaderAt) (*FS, error) {
	f := &FS{source: &source{r: r}}
	image, err := erofs.Open(f.source)
	if err != nil {
		return nil, f.judge(err)
	}
	var ok bool
	if f.image, ok = image.(lower); !ok {
		return nil, errors.New("package erofs gave no file system with links")
	}
	return f, nil
}

// judge says whose an error is. Only the image's own absence of a file is neither the host's fault nor damage.
func (f *FS) judge(err error) error {
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if host := f.source.failed.Load(); host != nil {
		return *host
	}
	if _, ok := errors.AsType[*DamagedError](err); ok {
		return err
	}
	return damaged("%s", err)
}

// Lstat implements fs.ReadLinkFS.
func (f *FS) Lstat(name string) (fs.FileInfo, error) {
	info, err := f.image.Lstat(name)
	if err != nil {
		return nil, f.judge(err)
	}
	if info.Size() < 0 || info.Size() > MaxFile {
		return nil, damaged("a file has %d bytes", info.Size())
	}
	return info, nil
}

// ReadLink implements fs.ReadLinkFS.
func (f *FS) ReadLink(name string) (string, error) {
	target, err := f.image.ReadLink(name)
	return target, f.judge(err)
}

// Open implements fs.FS.
func (f *FS) Open(name string) (fs.File, error) {
	file, err := f.image.Open(name)
	if err != nil {
		return nil, f.judge(err)
	}
	return &opened{file, f}, nil
}

// opened is an open file.
type opened struct {
	fs.File
	f *FS
}

// Read implements io.Reader.
func (o *opened) Read(b []byte) (int, error) {
	n, err := o.File.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		err = o.f.judge(err)
	}
	return n, err
}

// ReadDir lists a directory by name, within bounds. Names are bytes of the image's choice but for "/" and NUL.
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	info, err := f.image.Stat(name)
	if err != nil {
		return nil, f.judge(err)
	}
	if !info.IsDir() || info.Size() < 0 || info.Size() > MaxDirectory {
		return nil, damaged("a directory is none, or has %d bytes, the bound is %d", info.Size(), MaxDirectory)
	}
	file, err := f.image.Open(name)
	if err != nil {
		return nil, f.judge(err)
	}
	defer file.Close()
	dir, ok := file.(fs.ReadDirFile)
	if !ok {
		return nil, damaged("a directory cannot be listed")
	}
	var out []fs.DirEntry
	names := 0
	for {
		list, err := dir.ReadDir(part)
		for _, e := range list {
			n := e.Name()
			if n == "" || len(n) > maxName || strings.ContainsAny(n, "/\x00") {
				return nil, damaged("a directory has a name that no file can have")
			}
			if names += len(n); len(out) == MaxEntries || names > maxNames {
				return nil, damaged("a directory has more than %d names, or more than %d bytes of them", MaxEntries, maxNames)
			}
			out = append(out, e)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, f.judge(err)
		}
		if len(list) == 0 {
			return nil, damaged("a directory goes on without entries")
		}
	}
	slices.SortFunc(out, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for i := 1; i < len(out); i++ {
		if out[i].Name() == out[i-1].Name() {
			return nil, damaged("a directory has a name twice")
		}
	}
	return out, nil
}
