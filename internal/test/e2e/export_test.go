package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestExportToAnotherCluster moves a checkpoint, with ancestors that have most of its bytes, as a file to a cluster that has nothing in common with the
// first: neither database nor store nor authority. It is forked there, on a host that has never seen it: its processes go on, every byte of memory
// and disk is as it was, and the tree grows on.
func TestExportToAnotherCluster(t *testing.T) {
	if !*long {
		return // two clusters, each with a template of its own, take minutes: make test-long
	}
	patient := []string{"--runner-lease", "30s", "--runner-fence", "30s"} // no host dies here, and a busy one must not count as dead
	p := newPool(t, patient...)
	home := p.join()
	s := home.stack
	ws, was := p.parent(s, writeContent)
	p.sealed(t, checkpoint(t, s, ws.ID).ID)
	step(t, s, ws.ID, "one")
	cp := p.sealed(t, checkpoint(t, s, ws.ID).ID)
	path := filepath.Join(t.TempDir(), "a.ckpt")
	began := time.Now()
	file := exportTo(t, p.Client, cp.ID, path)
	t.Logf("exported %d bytes in %.1f s; %d were stored for this checkpoint alone", file, time.Since(began).Seconds(), cp.StoredBytes)

	q := newPool(t, patient...)
	host := q.join()
	in, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	began = time.Now()
	imported, err := q.Client.ImportCheckpoint(t.Context(), in, coppice.ImportOptions{Name: "from-afar", Size: file})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("imported in %.1f s: %+v", time.Since(began).Seconds(), imported.Imported)
	if imported.State != coppice.CheckpointSealed || imported.ID == cp.ID || imported.Imported.CheckpointID != cp.ID || imported.Imported.ImageDigest != cp.Image.Digest {
		t.Errorf("%+v", imported)
	}
	children := fork(t, host.stack, imported.ID, coppiceFork{count: 2})
	sameCheckpoints(t, home, cp.ID, host, imported.ID)
	for i, c := range children {
		label := []string{"a", "b"}[i]
		compare(t, "a child there", after(was, "one"), look(t, host.stack, c.Workspace.ID))
		compare(t, "a step on", after(was, "one", label), step(t, host.stack, c.Workspace.ID, label))
		if got := execute(t, host.stack, c.Workspace.ID, "sha256sum", "-c", "/root/sum"); got != sameContent {
			t.Errorf("what nobody wrote: %q", got)
		}
	}
	compare(t, "the parent", after(was, "one"), look(t, s, ws.ID)) // which goes on here
	next := checkpoint(t, host.stack, children[0].Workspace.ID)
	if next.ParentID != imported.ID {
		t.Errorf("its parent is %s", next.ParentID)
	}
	q.sealed(t, next.ID)
	compare(t, "a grandchild", after(was, "one", "a"), look(t, host.stack, forkOne(t, host.stack, next.ID)))
}

// exportTo writes a checkpoint to a file and returns its size.
func exportTo(t *testing.T, c *coppice.Client, id coppice.CheckpointID, path string) int64 {
	t.Helper()
	body, size, err := c.ExportCheckpoint(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n, err := f.ReadFrom(body)
	if err != nil || n != size {
		t.Fatalf("%d of %d bytes, %v", n, size, err)
	}
	return n
}
