// Package atomicfile writes files that are either complete or absent, whatever dies in the middle,
// and that are on the disk once the call has returned.
//
// A file is written beside its final place, synced and renamed, and then the directory is synced:
// without the last step, a power cut may bring back the old name. A crash in between leaves a
// temporary file, which RemoveTemporary removes.
package atomicfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// infix marks temporary files: ".<name>.tmp-<random>".
const infix = ".tmp-"

// Write puts data at path with the given permissions (not narrowed by the umask), replacing what was there.
func Write(path string, data []byte, perm os.FileMode) error {
	return WriteFunc(path, perm, func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	})
}

// WriteFunc is Write for data that fill produces. If fill fails, path is as it was.
func WriteFunc(path string, perm os.FileMode, fill func(io.Writer) error) (err error) {
	dir, name := filepath.Split(path)
	f, err := os.CreateTemp(filepath.Clean(dir), "."+name+infix+"*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	err = errors.Join(fill(f), f.Chmod(perm), f.Sync(), f.Close())
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return Rename(f.Name(), path)
}

// WriteJSON is Write for the indented JSON of v, which ends with a line feed.
func WriteJSON(path string, v any, perm os.FileMode) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return Write(path, append(data, '\n'), perm)
}

// ReadJSON decodes the file into v. Nothing but one JSON value may be in it. An absent file is os.ErrNotExist.
func ReadJSON(path string, v any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// Rename renames a synced file or directory and makes the rename durable.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	if err := SyncDir(filepath.Dir(to)); err != nil {
		return err
	}
	if filepath.Dir(from) == filepath.Dir(to) {
		return nil
	}
	return SyncDir(filepath.Dir(from))
}

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// RemoveTemporary removes what interrupted writes left in a directory. Nobody may be writing there.
func RemoveTemporary(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if e.Type().IsRegular() && strings.HasPrefix(e.Name(), ".") && strings.Contains(e.Name(), infix) {
			errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// ReplaceJSON replaces a file completely or not at all, even if this process dies meanwhile. It does not sync: a power
// cut may lose the file.
func ReplaceJSON(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
