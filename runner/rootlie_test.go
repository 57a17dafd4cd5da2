package runner

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/runner/sealing"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// forge stores what a runner that was taken over would: a checkpoint of another project that says it is of the same image as one that is
// stored, with a root file system of its own.
func (p *pool) forge(from *fakeRig, id core.CheckpointID, root []byte) runnerapi.Stored {
	p.t.Helper()
	return p.forgeAs(from, id, root, func(h *manifest.Header) {
		h.ProjectID, h.CheckpointID, h.Parent = core.NewID[core.ProjectID](), core.NewID[core.CheckpointID](), ""
	})
}

// forgeAs stores a manifest with the content of a checkpoint, another root file system and a changed header.
func (p *pool) forgeAs(from *fakeRig, id core.CheckpointID, root []byte, change func(*manifest.Header)) runnerapi.Stored {
	p.t.Helper()
	honest, err := snapshotstore.Open(p.t.Context(), p.blobs, sealing.RefOf(p.sources(id)[0]))
	if err != nil {
		p.t.Fatal(err)
	}
	mem, disk, state := content(p.t, from, id)
	h := honest.Header()
	h.Before = nil
	change(&h)
	prefix := fmt.Sprintf("v1/%s/%s/%d/", h.ProjectID, h.CheckpointID, 1000+rand.IntN(1_000_000))
	out, err := snapshotstore.Write(p.t.Context(), p.blobs, prefix, h, nil, []snapshotstore.Source{
		bytesSource(runnerapi.ImageMemory, mem), bytesSource(runnerapi.ImageDisk, disk), bytesSource(runnerapi.ImageState, state), bytesSource(runnerapi.ImageRoot, root),
	}, snapshotstore.Options{Dir: p.t.TempDir()})
	if err != nil {
		p.t.Fatal(err)
	}
	return runnerapi.Stored{CheckpointID: h.CheckpointID, Manifest: out.Manifest.Key, Digest: out.Manifest.Digest, Bytes: out.Manifest.Bytes}
}

func bytesSource(name string, b []byte) snapshotstore.Source {
	return snapshotstore.Source{
		Name: name, Size: int64(len(b)), Changed: []snapshotstore.Range{{Offset: 0, Length: int64(len(b))}},
		Read: func(p []byte, off int64) error {
			clear(p[copy(p, b[min(off, int64(len(b))):]):])
			return nil
		},
	}
}

// TestLyingRoot: a manifest that lies about the root file system of an image gives it to nobody but the checkpoint that it describes.
func TestLyingRoot(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a := p.runner(nil)
	template := a.boot()
	c := a.capture(a.fork(template))
	p.sealed(t, template, c)
	evil := bytes.Repeat([]byte("evil"), 1024)
	lie := p.forge(a, c, evil)
	large := p.forge(a, c, append(bytes.Clone(evil), evil...))
	for name, b := range map[string]*fakeRig{
		"a host with the image": p.runner(nil),
		"a host without it": p.runner(func(c *Config) {
			empty, err := images.Open(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			c.Images = empty
		}),
	} {
		forkFrom := func(at runnerapi.Stored) error {
			out, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: at.CheckpointID, Children: []runnerapi.Child{b.child()}, Sources: []runnerapi.Stored{at}})
			if err == nil && out.Children[0].Problem != nil {
				err = out.Children[0].Problem.Err()
			}
			return err
		}
		root := func(id core.CheckpointID) []byte {
			t.Helper()
			rec, err := b.checkpoints.Get(id)
			if err != nil {
				t.Fatal(err)
			}
			f, err := b.roots.Open(rec.RootKey())
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			got, err := os.ReadFile(f.Name())
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		if err := forkFrom(lie); err != nil {
			t.Fatalf("%s: the lie: %v", name, err)
		}
		if err := forkFrom(p.sources(c)[0]); err != nil {
			t.Fatalf("%s: the checkpoint of the other project: %v", name, err)
		}
		if got := root(c); bytes.Contains(got, []byte("evil")) {
			t.Errorf("%s: the checkpoint of another project has the root file system of the lie", name)
		}
		err := forkFrom(large)
		if name == "a host with the image" && core.CodeOf(err) != core.CodeManifestInvalid {
			t.Errorf("%s: a root of another size than the image's: %v", name, err)
		}
	}
}

// TestManifestIsNotBelieved: what the controller's rows say of a checkpoint decides, whatever its manifest says.
func TestManifestIsNotBelieved(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a, b := p.runner(nil), p.runner(nil)
	template := a.boot()
	c := a.capture(a.fork(template))
	p.sealed(t, template, c)
	rec, err := a.checkpoints.Get(c)
	if err != nil {
		t.Fatal(err)
	}
	truth := runnerapi.Expected{ProjectID: p.project, Parent: template, Image: rec.Image, Class: rec.Class, Resources: rec.Resources}
	forkFrom := func(at []runnerapi.Stored, want runnerapi.Expected) error {
		_, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: c, Children: []runnerapi.Child{b.child()}, Sources: at, Expected: &want})
		return err
	}
	for name, change := range map[string]func(*runnerapi.Expected){
		"project":   func(e *runnerapi.Expected) { e.ProjectID = core.NewID[core.ProjectID]() },
		"parent":    func(e *runnerapi.Expected) { e.Parent = "" },
		"image":     func(e *runnerapi.Expected) { e.Image = core.DigestOf(nil) },
		"class":     func(e *runnerapi.Expected) { e.Class.CPUModel = "another" },
		"resources": func(e *runnerapi.Expected) { e.Resources.MemoryMiB *= 2 },
	} {
		want := truth
		change(&want)
		if err := forkFrom(p.sources(c), want); core.CodeOf(err) != core.CodeManifestInvalid {
			t.Errorf("another %s: %v", name, err)
		}
	}
	// Two manifests are swapped in the bucket, or an older one is served again.
	for name, swap := range map[string]func(*runnerapi.Stored){
		"the manifest of its parent": func(s *runnerapi.Stored) {
			s.Manifest, s.Bytes = p.sources(template)[0].Manifest, p.sources(template)[0].Bytes
		},
		"and the digest of that":        func(s *runnerapi.Stored) { *s = p.sources(template)[0]; s.CheckpointID = c },
		"its own with another's digest": func(s *runnerapi.Stored) { s.Digest = p.sources(template)[0].Digest },
	} {
		at := p.sources(c)
		swap(&at[0])
		if err := forkFrom(at, truth); core.CodeOf(err) != core.CodeCheckpointCorrupt && core.CodeOf(err) != core.CodeManifestInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if list := b.Checkpoints(); len(list) != 0 || len(b.Sandboxes()) != 0 {
		t.Errorf("there are %d checkpoints and %d sandboxes", len(list), len(b.Sandboxes()))
	}
	if err := forkFrom(p.sources(c), truth); err != nil {
		t.Error(err)
	}
}
