package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	coppice "github.com/coppice-dev/coppice/sdk/go"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// exportParts are those of an exported file: a fixed head, a header, a manifest, their sum, frames, and the sum of all.
type exportParts struct {
	header   []byte
	manifest []byte
	frames   []byte
}

func splitExport(b []byte) (exportParts, error) {
	const fixed = 16
	if len(b) < fixed+2*sha256.Size {
		return exportParts{}, errors.New("the file is too short")
	}
	h, m := int(binary.LittleEndian.Uint32(b[8:])), int(binary.LittleEndian.Uint32(b[12:]))
	body := b[fixed:]
	return exportParts{body[:h], body[h : h+m], body[h+m+sha256.Size : len(body)-sha256.Size]}, nil
}

// join puts the parts together with sums that are right.
func (p exportParts) join() []byte {
	b := []byte("COPPEXP1")
	b = binary.LittleEndian.AppendUint32(b, uint32(len(p.header)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(p.manifest)))
	b = append(append(b, p.header...), p.manifest...)
	sum := sha256.Sum256(b)
	b = append(append(b, sum[:]...), p.frames...)
	sum = sha256.Sum256(b)
	return append(b, sum[:]...)
}

// imports brings files that were changed: at single bytes, cut, and in their manifest with every sum made right again. A file that is
// taken all the same is forked, which must do no harm.
func (x *assault) imports() {
	whole := x.export(x.capture("export").ID)
	parts, err := splitExport(whole)
	if err != nil {
		x.t.Fatal(err)
	}
	if !bytes.Equal(parts.join(), whole) {
		x.t.Fatal("the file is not what the test takes it for")
	}
	rng := rand.New(rand.NewPCG(1, 2))
	const flips, cuts = 40, 16
	head := len(parts.header) + len(parts.manifest) + 48
	for i := range flips {
		at := rng.IntN(len(whole))
		if i%2 == 0 { // half of them before the frames
			at = rng.IntN(head)
		}
		b := bytes.Clone(whole)
		b[at] ^= 1 << rng.IntN(8)
		x.refuseImport(fmt.Sprintf("a file with byte %d changed", at), b)
	}
	for range cuts {
		n := rng.IntN(len(whole))
		x.refuseImport(fmt.Sprintf("a file that is cut at byte %d", n), whole[:n])
	}
	x.refuseImport("a file that goes on", append(bytes.Clone(whole), 0))
	for name, change := range x.manifestChanges() {
		h, nodes, err := manifest.Decode(parts.manifest)
		if err != nil {
			x.t.Fatal(err)
		}
		change(&h)
		p := parts
		if p.manifest, err = manifest.Encode(h, nodes); err != nil {
			x.held("import", name, nil) // even the format has no room for it
			continue
		}
		x.tryImport("a file whose manifest has "+name, p.join())
	}
	x.tryImport("a map that repeats one page", x.repeating(parts))
	x.importLoop(whole, whole[:head])
}

// importLoop imports a good file and deletes the checkpoint, again and again. What was deleted waits in the store until the grace is over, so
// that must have a bound. begin is enough of the file for the server to decide; a whole one may be answered when the client still sends.
func (x *assault) importLoop(whole, begin []byte) {
	const most = 10
	ctx := x.t.Context()
	token, project := x.tenantKey("looper")
	looper := x.clientOf(token)
	cp, err := looper.ImportCheckpoint(ctx, bytes.NewReader(whole), coppice.ImportOptions{Size: int64(len(whole))})
	if err != nil {
		x.t.Fatal(err)
	}
	x.give(cp)
	if err := looper.DeleteCheckpoint(ctx, cp.ID); err != nil {
		x.t.Fatal(err)
	}
	quota := (cp.DeltaBytes + cp.DeviceStateBytes + cp.DiskBytes) * 3 / 2 // for one, and not for two
	if _, err := x.s.client.PatchProject(ctx, project, coppice.PatchProjectRequest{Quotas: coppice.QuotasPatch{CheckpointBytes: &quota}}); err != nil {
		x.t.Fatal(err)
	}
	for n := range most {
		_, err := looper.ImportCheckpoint(ctx, bytes.NewReader(begin), coppice.ImportOptions{Size: int64(len(begin))})
		if e := (*coppice.Error)(nil); errors.As(err, &e) && e.Code == coppice.CodeQuotaExceeded && n > 0 {
			x.t.Logf("import and deletion number %d was refused: %v", n+1, err)
			x.held("import", "imports and deletions in a loop", nil)
			return
		}
		cp, err2 := looper.ImportCheckpoint(ctx, bytes.NewReader(whole), coppice.ImportOptions{Size: int64(len(whole))})
		if err2 == nil {
			x.give(cp)
			err2 = looper.DeleteCheckpoint(ctx, cp.ID)
		}
		if err2 != nil {
			x.held("import", "imports and deletions in a loop", fmt.Errorf("number %d: %w; its beginning: %w", n+1, err2, err))
			return
		}
	}
	x.held("import", "imports and deletions in a loop", fmt.Errorf("%d were taken, with a quota of %d MiB", most, quota>>20))
}

func (x *assault) manifestChanges() map[string]func(h *manifest.Header) {
	return map[string]func(h *manifest.Header){
		"64 processors":             func(h *manifest.Header) { h.Resources.VCPUs = 64 },
		"a terabyte of memory":      func(h *manifest.Header) { h.Resources.MemoryMiB = 1 << 20 },
		"less memory than it has":   func(h *manifest.Header) { h.Resources.MemoryMiB = 128 },
		"a disk of a petabyte":      func(h *manifest.Header) { h.Resources.DiskGiB = 1 << 20 },
		"no memory":                 func(h *manifest.Header) { h.Resources.MemoryMiB = 0 },
		"negative memory":           func(h *manifest.Header) { h.Resources.MemoryMiB = -1 },
		"another project":           func(h *manifest.Header) { h.ProjectID = core.ProjectID(x.alice.ids["prj"]) },
		"another checkpoint":        func(h *manifest.Header) { h.CheckpointID = core.CheckpointID(x.alice.ids["ckpt"]) },
		"another image":             func(h *manifest.Header) { h.GuestImage = core.DigestOf([]byte("another")) },
		"an image that is a path":   func(h *manifest.Header) { h.GuestImage = "sha256:../../../../etc/passwd" },
		"a parent":                  func(h *manifest.Header) { h.Parent = core.CheckpointID(x.alice.ids["ckpt"]) },
		"images that are paths":     func(h *manifest.Header) { h.Images[0].Name = "../../etc/cron.d/x" },
		"an image twice":            func(h *manifest.Header) { h.Images = append(h.Images, h.Images[0]) },
		"no image":                  func(h *manifest.Header) { h.Images = nil },
		"an image too many":         func(h *manifest.Header) { h.Images = append(h.Images, manifest.ImageRoot{Name: "zzz", Bytes: 1 << 40}) },
		"an enormous image":         func(h *manifest.Header) { h.Images[0].Bytes = 1 << 38 },
		"a class of escapes":        func(h *manifest.Header) { h.Class["vmm"] = "qemu\x1b[2J" },
		"a class with more fields":  func(h *manifest.Header) { h.Class["kernel"] = "/boot/vmlinuz" },
		"a machine of another kind": func(h *manifest.Header) { h.Class["machine"] = "pc,accel=kvm,-drive file=/etc/shadow" },
		"a time that is none":       func(h *manifest.Header) { h.CapturedAt = "yesterday" },
		"a record that is none":     func(h *manifest.Header) { h.Record = json.RawMessage(`{"a":1}`) },
		"a record without end":      func(h *manifest.Header) { h.Record = json.RawMessage(`"` + strings.Repeat("x", 3<<20) + `"`) },
	}
}

// repeating makes every image of the largest size that its map's height allows, of one page.
func (x *assault) repeating(parts exportParts) []byte {
	h, nodes, err := manifest.Decode(parts.manifest)
	if err != nil {
		x.t.Fatal(err)
	}
	trees, err := h.Trees(nodes)
	if err != nil {
		x.t.Fatal(err)
	}
	all := make(manifest.Nodes)
	for i, image := range h.Images {
		var first manifest.Slot
		for r := range trees[image.Name].Runs() {
			first = manifest.Slot{Frame: r.Frame, Index: r.Slot}
			break
		}
		size := image.Bytes
		if strings.Contains(image.Name, "root") {
			size = 64 << 30
		}
		e := manifest.NewTree(size).Edit(size)
		if first.Frame != nil {
			for page := int64(0); page < min(size/manifest.PageSize, 1<<22); page++ {
				e.Set(page, first)
			}
		}
		h.Images[i].Bytes, h.Images[i].Root = size, e.Tree().Encode(all).Digest()
	}
	p := parts
	if p.manifest, err = manifest.Encode(h, all); err != nil {
		x.t.Fatal(err)
	}
	return p.join()
}

func (x *assault) export(id coppice.CheckpointID) []byte {
	x.t.Helper()
	body, _, err := x.mallory.ExportCheckpoint(x.t.Context(), id)
	if err != nil {
		x.t.Fatal(err)
	}
	defer body.Close()
	b, err := io.ReadAll(body)
	if err != nil {
		x.t.Fatal(err)
	}
	return b
}

func (x *assault) bring(b []byte) (coppice.Checkpoint, error) {
	ctx, cancel := context.WithTimeout(x.t.Context(), 2*time.Minute)
	defer cancel()
	cp, err := x.mallory.ImportCheckpoint(ctx, bytes.NewReader(b), coppice.ImportOptions{Size: int64(len(b))})
	if err == nil {
		x.give(cp)
	}
	return cp, err
}

// hungUp reports whether the server ended the connection: it has refused a file before all of it was sent.
func hungUp(err error) bool { return errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) }

// refuseImport wants a file to be refused.
func (x *assault) refuseImport(name string, b []byte) {
	cp, err := x.bring(b)
	var e *coppice.Error
	switch {
	case err == nil:
		err = fmt.Errorf("it was taken as %s", cp.ID)
	case errors.As(err, &e) && e.Status/100 == 4, hungUp(err):
		err = nil
	}
	x.held("import", name, err)
}

// tryImport forks what a file became, if it was taken: the fork may fail, nothing else may.
func (x *assault) tryImport(name string, b []byte) {
	cp, err := x.bring(b)
	var e *coppice.Error
	if errors.As(err, &e) && e.Status/100 == 4 || hungUp(err) {
		x.held("import", name, nil)
		return
	}
	if err != nil {
		x.held("import", name, err)
		return
	}
	ctx, cancel := context.WithTimeout(x.t.Context(), 2*time.Minute)
	defer cancel()
	_, _, err = x.tryFork(ctx, cp.ID) // it may fail
	if ctx.Err() == nil {
		err = x.alice.watch.disk()
	}
	x.held("import", name+", forked", err)
	if err := x.mallory.DeleteCheckpoint(x.t.Context(), cp.ID); err != nil {
		x.t.Errorf("%s: %v", name, err)
	}
}
