package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// spoil changes the object at path, whose bytes are whole, or what is in its place.
type spoil struct {
	name string
	do   func(path string, whole []byte) error
}

// bucket changes what is stored of a checkpoint that the host must fetch: it is refused, nothing of it runs, and it can be forked when
// the bytes are as they were.
func (x *assault) bucket() {
	ctx := x.t.Context()
	cp, err := x.mallory.CreateCheckpoint(ctx, x.ws, coppice.CreateCheckpointRequest{Name: "stored"})
	if err != nil {
		x.t.Fatal(err)
	}
	if _, err := x.mallory.WaitSealed(ctx, cp.ID); err != nil {
		x.t.Fatal(err)
	}
	far, err := x.bring(x.export(cp.ID))
	if err != nil {
		x.t.Fatal(err)
	}
	put := func(b []byte) func(string, []byte) error {
		return func(path string, _ []byte) error { return os.WriteFile(path, b, 0o600) }
	}
	instead := func(f func(path string) error) func(string, []byte) error {
		return func(path string, _ []byte) error { return f(path) }
	}
	spoils := []spoil{
		{"is empty", put(nil)},
		{"has other bytes", func(path string, whole []byte) error {
			return os.WriteFile(path, bytes.Repeat([]byte("x"), len(whole)), 0o600)
		}},
		{"goes on", func(path string, whole []byte) error {
			return os.WriteFile(path, append(bytes.Clone(whole), whole[:min(len(whole), 4096)]...), 0o600)
		}},
		{"is gone", instead(func(string) error { return nil })},
		{"is a link to a file of the host", instead(func(path string) error { return os.Symlink("/etc/shadow", path) })},
		{"is a FIFO", instead(func(path string) error { return unix.Mkfifo(path, 0o600) })},
		{"is a directory", instead(func(path string) error { return os.Mkdir(path, 0o700) })},
		{"has 64 GiB of holes", func(path string, whole []byte) error {
			return errors.Join(os.WriteFile(path, whole, 0o600), os.Truncate(path, 64<<30))
		}},
	}
	for _, part := range []int{0, 3, 5, 10} { // tenths
		spoils = append(spoils,
			spoil{fmt.Sprintf("has a byte changed after %d tenths", part), func(path string, whole []byte) error {
				b := bytes.Clone(whole)
				b[min(len(b)-1, len(b)*part/10)] ^= 0x10
				return os.WriteFile(path, b, 0o600)
			}},
			spoil{fmt.Sprintf("is cut after %d tenths", part), func(path string, whole []byte) error {
				return os.WriteFile(path, whole[:max(0, len(whole)*part/10-1)], 0o600)
			}})
	}
	objects := x.objectsOf(far.ID)
	if len(objects) < 2 {
		x.t.Fatalf("checkpoint %s has the objects %q", far.ID, objects)
	}
	for _, path := range objects {
		whole, err := os.ReadFile(path)
		if err != nil {
			x.t.Fatal(err)
		}
		for _, s := range spoils { // the object is not whole in between: a host that retries does not get it
			if err := s.do(path, whole); err != nil {
				x.t.Fatal(err)
			}
			x.held("bucket", filepath.Base(path)+" "+s.name, x.cannotFork(far.ID))
			if err := os.RemoveAll(path); err != nil {
				x.t.Fatal(err)
			}
		}
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			x.t.Fatal(err)
		}
	}
	res, err := x.mallory.ForkCheckpoint(ctx, far.ID, coppice.ForkCheckpointRequest{})
	if err == nil && (len(res.Children) != 1 || res.Children[0].Problem != nil) {
		err = fmt.Errorf("%+v", res.Children)
	}
	x.held("bucket", "a checkpoint that is whole again is forked", err)
}

// objectsOf are the files of a checkpoint in the store.
func (x *assault) objectsOf(id coppice.CheckpointID) (list []string) {
	x.t.Helper()
	if err := filepath.WalkDir(x.store, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(path, "/"+id+"/") {
			list = append(list, path)
		}
		return err
	}); err != nil {
		x.t.Fatal(err)
	}
	return list
}

// cannotFork wants a fork to fail in time, with a cause that is not an internal error.
func (x *assault) cannotFork(id coppice.CheckpointID) error {
	ctx, cancel := context.WithTimeout(x.t.Context(), 90*time.Second)
	defer cancel()
	res, err := x.mallory.ForkCheckpoint(ctx, id, coppice.ForkCheckpointRequest{})
	if err == nil && len(res.Children) == 1 && res.Children[0].Problem != nil {
		err = res.Children[0].Problem.Err()
	}
	var e *coppice.Error
	switch {
	case err == nil:
		return errors.New("it was forked")
	case !errors.As(err, &e):
		return err
	case e.Code == "INTERNAL":
		return fmt.Errorf("it failed by a fault of ours: %w", err)
	}
	return nil
}
