// Package connections owns the connection file: the servers that a user's client commands know, by
// name, and which of them they use.
//
// The server and the key of the current context are also at the top level of the file, where
// programs find them that know of no contexts.
package connections

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// Entry has the address of a server and the API key for it.
type Entry struct {
	Server string `json:"server"`
	Token  string `json:"token"`
	// DataDir is the data directory of the `coppice dev` that entered this and takes it away when it ends; "" for what a user added.
	DataDir string `json:"data_dir,omitempty"`
}

// File is the content of the connection file.
type File struct {
	Server   string           `json:"server"` // of the current context
	Token    string           `json:"token"`
	Current  string           `json:"current,omitempty"`
	Contexts map[string]Entry `json:"contexts,omitempty"`
}

// DevName is the name of the context of `coppice dev`, unless it is taken.
const DevName = "dev"

// Read reads the file. A file that is not there is empty.
func Read(path string) (File, error) {
	var f File
	err := atomicfile.ReadJSON(path, &f)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return File{}, fmt.Errorf("%w; mend the file or remove it", err)
	}
	if len(f.Contexts) == 0 && f.Server != "" { // an older version wrote it
		f.Contexts, f.Current = map[string]Entry{DevName: {Server: f.Server, Token: f.Token, DataDir: "unknown"}}, DevName
	}
	if f.Contexts == nil {
		f.Contexts = map[string]Entry{}
	}
	return f, nil
}

// Change changes the file while no other process does. The file is readable by the user only, and goes when nothing is in it.
func Change(path string, change func(*File) error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }() // this unlocks
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", path, err)
	}
	f, err := Read(path)
	if err != nil {
		return err
	}
	if err := change(&f); err != nil {
		return err
	}
	if len(f.Contexts) == 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}
	f.Server, f.Token = f.Contexts[f.Current].Server, f.Contexts[f.Current].Token
	return atomicfile.WriteJSON(path, f, 0o600)
}

// Names lists the contexts.
func (f *File) Names() []string { return slices.Sorted(maps.Keys(f.Contexts)) }

// Enter adds the entry of a `coppice dev` and returns its name. It takes the place of an entry of another `coppice dev` with
// the same server or data directory, never of one that the user has added. It becomes the current one unless there is one whose server lives.
func (f *File) Enter(e Entry, lives func(Entry) bool) string {
	name := ""
	for _, n := range f.Names() {
		if old := f.Contexts[n]; old.DataDir != "" && (old.Server == e.Server || old.DataDir == e.DataDir) {
			if name == "" {
				name = n
				continue
			}
			f.drop(n)
		}
	}
	for i := 1; name == ""; i++ {
		candidate := DevName
		if i > 1 {
			candidate += "-" + strconv.Itoa(i)
		}
		if _, taken := f.Contexts[candidate]; !taken {
			name = candidate
		}
	}
	current, ok := f.Contexts[f.Current]
	if !ok || f.Current == name || current.DataDir != "" && !lives(current) {
		f.Current = name
	}
	f.Contexts[name] = e
	return name
}

// Leave takes the entry of a `coppice dev` away, if it is still its own. Nothing else becomes current: a command must not go to a server that
// nobody chose.
func (f *File) Leave(name string, e Entry) {
	if f.Contexts[name] == e {
		f.drop(name)
	}
}

// Drop takes an entry away, and reports whether there was one.
func (f *File) Drop(name string) bool {
	_, ok := f.Contexts[name]
	f.drop(name)
	return ok
}

func (f *File) drop(name string) {
	delete(f.Contexts, name)
	if f.Current == name {
		f.Current = ""
	}
}

// TokenFor returns the key of a server that is in the file, that of the current context first.
func (f *File) TokenFor(server string) string {
	if e := f.Contexts[f.Current]; e.Server == server {
		return e.Token
	}
	for _, name := range f.Names() {
		if e := f.Contexts[name]; e.Server == server {
			return e.Token
		}
	}
	return ""
}
