package runner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/roots"
)

// flip changes one byte of a file.
func flip(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, 3); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0x40
	if _, err := f.WriteAt(b, 3); err != nil {
		t.Fatal(err)
	}
}

// TestCorruptImage changes one byte of each file of an image. What would use it is refused, and the file is named.
func TestCorruptImage(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(*Config) {})
	id := r.boot()
	r.fork(id)
	for _, path := range []string{r.image.Kernel, r.image.Initrd, r.image.RootFS, r.image.Overlay} {
		flip(t, path)
		_, err := r.Template(t.Context(), runnerapi.Template{
			CheckpointID: core.NewID[core.CheckpointID](), Image: r.image.Digest, Resources: core.Resources{VCPUs: 1, MemoryMiB: fakeMiB},
		})
		if err == nil || !strings.Contains(err.Error(), filepath.Base(path)) {
			t.Errorf("boot with a changed %s: %v", filepath.Base(path), err)
		}
		flip(t, path)
	}
	r.fork(id)
	flip(t, r.roots.Path(roots.Own(r.image.Digest)))
	out, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{r.child()}})
	if err != nil {
		t.Fatal(err)
	}
	if p := out.Children[0].Problem; p == nil || p.Code != core.CodeCheckpointCorrupt || !strings.Contains(p.Message, r.roots.Path(roots.Own(r.image.Digest))) {
		t.Errorf("a fork on a changed root file system: %+v", p)
	}
}
