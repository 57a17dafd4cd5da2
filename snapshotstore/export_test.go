package snapshotstore_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/zstd"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

var update = flag.Bool("update", false, "write the golden files again")

// export writes a checkpoint as a file.
func (x *rig) export(ref manifest.Ref) []byte {
	x.t.Helper()
	s, err := snapshotstore.Open(x.t.Context(), x.store(), ref)
	if err != nil {
		x.t.Fatal(err)
	}
	e, err := snapshotstore.NewExport(s, "dev")
	if err != nil {
		x.t.Fatal(err)
	}
	var b bytes.Buffer
	if err := e.Write(x.t.Context(), x.store(), &b); err != nil {
		x.t.Fatal(err)
	}
	if int64(b.Len()) != e.Size() {
		x.t.Errorf("the file has %d bytes instead of %d", b.Len(), e.Size())
	}
	return b.Bytes()
}

// importFile reads a file into the store as another checkpoint.
func (x *rig) importFile(r io.Reader, prefix string) (*snapshotstore.Import, *snapshotstore.Written, error) {
	im, err := snapshotstore.ReadImport(r)
	if err != nil {
		return nil, nil, err
	}
	h := im.Manifest
	h.ProjectID, h.CheckpointID = x.project, core.NewID[core.CheckpointID]()
	w, err := im.Store(x.t.Context(), x.blobs, prefix, x.key(prefix), h)
	return im, w, err
}

func (x *rig) keys(prefix string) []string {
	x.t.Helper()
	var list []string
	for info, err := range x.blobs.List(x.t.Context(), prefix) {
		if err != nil {
			x.t.Fatal(err)
		}
		list = append(list, info.Key)
	}
	return list
}

// chain writes a checkpoint whose frames come from several ancestors, and returns it with the content of its images.
func (x *rig) chain(r *rand.Rand, size int64, generations int) (*snapshotstore.Written, map[string]*image) {
	x.t.Helper()
	all := map[string]*image{"memory": newImage(size), "disk": newImage(size/2 + 99), "device_state": newImage(5000)}
	var w *snapshotstore.Written
	var ref *snapshotstore.Snapshot
	for range generations {
		var sources []snapshotstore.Source
		for _, name := range []string{"memory", "disk", "device_state"} {
			m := all[name]
			before := m.clone()
			m.write(r, int(m.size/page/3)+1)
			sources = append(sources, snapshotstore.Source{Name: name, Size: m.size, Changed: m.whole(), Read: m.clone().read, Reference: before.read})
		}
		w = x.sealAll(ref, sources...)
		ref = w.Snapshot
	}
	return w, all
}

// TestExport: a checkpoint is imported from its file into an empty store, without its ancestors, and exported again,
// several times.
func TestExport(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		size        int64
		generations int
		packs       int
	}{{"one", 1 << 20, 1, 1}, {"chain", 4 << 20, 9, 1}, {"packs", 64 << 20, 2, 2}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			x, y := newRig(t), newRig(t)
			w, images := x.chain(rand.New(rand.NewPCG(1, 2)), c.size, c.generations)
			file := x.export(w.Manifest)
			if !bytes.Equal(file, x.export(w.Manifest)) {
				t.Error("two exports differ")
			}
			im, got, err := y.importFile(iotest.HalfReader(bytes.NewReader(file)), "v1/a/b/1/")
			if err != nil {
				t.Fatal(err)
			}
			for name, m := range images {
				y.check(got.Manifest, name, m)
			}
			if im.Export.ImageName != "dev" || im.Manifest.CheckpointID != w.Snapshot.Header().CheckpointID || im.Size() != int64(len(file)) {
				t.Errorf("%+v %+v", im.Export, im.Manifest)
			}
			if len(im.Manifest.Objects) < c.packs {
				t.Errorf("%d packs", len(im.Manifest.Objects))
			}
			if n := len(y.keys("")); n != len(got.Objects) || n != len(got.Needs) || n != 1+len(im.Manifest.Objects) {
				t.Errorf("%d objects in the store, %d written, %d needed", n, len(got.Objects), len(got.Needs))
			}
			faults, err := snapshotstore.NewChecker(y.store(), snapshotstore.Whole).Check(t.Context(), got.Manifest)
			if err != nil || len(faults) > 0 {
				t.Error(faults, err)
			}
			again, _, err := x.importFile(bytes.NewReader(y.export(got.Manifest)), "v1/c/d/1/")
			if err != nil {
				t.Fatal(err)
			}
			if again.Content("memory") != im.Content("memory") || again.Content("memory") == again.Content("disk") {
				t.Error("the same image has another content")
			}
		})
	}
}

// wantRefused checks that an import is refused and leaves no manifest.
func (x *rig) wantRefused(what string, file []byte, codes ...core.Code) {
	x.t.Helper()
	_, _, err := x.importFile(bytes.NewReader(file), "v1/x/y/1/")
	ok := false
	for _, c := range codes {
		ok = ok || core.CodeOf(err) == c && core.CategoryOf(err) == core.Invalid
	}
	if !ok {
		x.t.Errorf("%s: %v", what, err)
	}
	for _, key := range x.keys("v1/x/") {
		if strings.HasSuffix(key, "/manifest") {
			x.t.Fatalf("%s: a manifest was stored", what)
		}
		if err := x.blobs.Delete(x.t.Context(), key); err != nil {
			x.t.Fatal(err)
		}
	}
}

// TestExportEveryByte changes each of the first bytes and many random ones, and cuts the file off everywhere. The
// damage is always found and reported as the client's error, and no checkpoint results.
func TestExportEveryByte(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	r := rand.New(rand.NewPCG(3, 4))
	w, _ := x.chain(r, 1<<20, 3)
	file := x.export(w.Manifest)
	y := newRig(t)
	flip := func(at int) {
		b := bytes.Clone(file)
		b[at] ^= 1 << r.IntN(8)
		y.wantRefused(fmt.Sprintf("byte %d flipped", at), b, core.CodeImportInvalid, core.CodeUnsupported)
	}
	for at := range 64 {
		flip(at)
		flip(len(file) - 1 - at)
	}
	for range 150 {
		flip(r.IntN(len(file)))
		n := r.IntN(len(file))
		y.wantRefused(fmt.Sprintf("cut off after %d", n), file[:n], core.CodeImportInvalid)
	}
	for n := range 64 {
		y.wantRefused(fmt.Sprintf("cut off after %d", n), file[:n], core.CodeImportInvalid)
		y.wantRefused(fmt.Sprintf("%d bytes short", n+1), file[:len(file)-1-n], core.CodeImportInvalid)
	}
	y.wantRefused("something behind it", append(bytes.Clone(file), 0), core.CodeImportInvalid)
	if _, _, err := y.importFile(io.MultiReader(bytes.NewReader(file[:len(file)/2]), iotest.ErrReader(errAway)), "v1/x/y/1/"); !errors.Is(err, errAway) {
		t.Errorf("a reader that fails: %v", err)
	}
}

var errAway = errors.New("away")

// exported builds a file with correct sums.
func exported(header string, body []byte, frames ...[]byte) []byte {
	b := []byte("COPPEXP1")
	b = binary.LittleEndian.AppendUint32(b, uint32(len(header)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
	b = append(append(b, header...), body...)
	sum := sha256.Sum256(b)
	b = append(b, sum[:]...)
	for _, f := range frames {
		b = append(b, f...)
	}
	sum = sha256.Sum256(b)
	return append(b, sum[:]...)
}

// TestExportHostile: forged files with correct sums.
func TestExportHostile(t *testing.T) {
	t.Parallel()
	const header = `{"format":1,"image_name":"dev"}`
	x := newRig(t)
	encoder, err := zstd.NewWriter(nil, zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false))
	if err != nil {
		t.Fatal(err)
	}
	stored := encoder.EncodeAll(bytes.Repeat([]byte{7}, 4*page), nil)
	bomb := encoder.EncodeAll(make([]byte, 64<<20), nil)
	frame := func(b []byte, object string, off int64, pages int) *manifest.Frame {
		return &manifest.Frame{Object: object, Offset: off, Length: int64(len(b)), Pages: pages, Hash: sha256.Sum256(b)}
	}
	h := manifest.Header{
		ProjectID: x.project, CheckpointID: core.NewID[core.CheckpointID](), CapturedAt: "2026-11-22T12:00:00Z", GuestImage: core.DigestOf([]byte("image")),
		Class: map[string]string{"arch": "amd64"}, Resources: core.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1},
	}
	make1 := func(f *manifest.Frame, change func(*manifest.Header)) []byte {
		e := manifest.NewTree(1 << 20).Edit(1 << 20)
		e.Set(3, manifest.Slot{Frame: f, Index: 1})
		all := make(manifest.Nodes)
		h := h
		h.Images = []manifest.ImageRoot{{Name: "memory", Bytes: 1 << 20, Root: e.Tree().Encode(all).Digest()}}
		h.Objects = []manifest.Object{{Key: f.Object, Bytes: f.Offset + f.Length}}
		if change != nil {
			change(&h)
		}
		b, err := manifest.Encode(h, all)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	good := frame(stored, "pack-0", 0, 4)
	if _, _, err := x.importFile(bytes.NewReader(exported(header, make1(good, nil), stored)), "v1/good/y/1/"); err != nil {
		t.Fatal(err)
	}
	// A map of 512 GiB in three nodes: every inner node has one child 32 times.
	wide := make(manifest.Nodes)
	e := manifest.NewTree(manifest.LeafPages * page).Edit(manifest.LeafPages * page)
	e.Set(0, manifest.Slot{Frame: good})
	root := e.Tree().Encode(wide)
	for range 4 {
		b := append([]byte("I\xff\xff\xff\xff"), bytes.Repeat(root[:], manifest.Fanout)...)
		root = sha256.Sum256(b)
		wide[root] = b
	}
	huge := h
	huge.Images = []manifest.ImageRoot{{Name: "memory", Bytes: manifest.MaxImageBytes, Root: root.Digest()}}
	huge.Objects = []manifest.Object{{Key: "pack-0", Bytes: good.Length}}
	hugeBody, err := manifest.Encode(huge, wide)
	if err != nil {
		t.Fatal(err)
	}
	lengths := exported(header, make1(good, nil), stored)
	binary.LittleEndian.PutUint32(lengths[12:], 1<<32-1)
	for _, c := range []struct {
		name string
		file []byte
		code core.Code
	}{
		{"nothing", nil, core.CodeImportInvalid},
		{"another file", bytes.Repeat([]byte("x"), 100), core.CodeImportInvalid},
		{"format 2", append([]byte("COPPEXP2"), lengths[8:]...), core.CodeUnsupported},
		{"format 2 in the header", exported(`{"format":2,"image_name":""}`, make1(good, nil), stored), core.CodeUnsupported},
		{"an unknown field", exported(`{"format":1,"image_name":"","vmm_config":{}}`, make1(good, nil), stored), core.CodeImportInvalid},
		{"a header in another form", exported(`{"format":1, "image_name":"dev"}`, make1(good, nil), stored), core.CodeImportInvalid},
		{"a header without end", exported("", make1(good, nil), stored), core.CodeImportInvalid},
		{"lengths", lengths, core.CodeImportInvalid},
		{"a manifest that is none", exported(header, []byte("x"), stored), core.CodeImportInvalid},
		{"a key that is a path", exported(header, make1(frame(stored, "../../v1/other/manifest", 0, 4), nil), stored), core.CodeImportInvalid},
		{"a key of another", exported(header, make1(frame(stored, "v1/other/pack-0", 0, 4), nil), stored), core.CodeImportInvalid},
		{"a gap", exported(header, make1(frame(stored, "pack-0", 1, 4), nil), []byte{0}, stored), core.CodeImportInvalid},
		{"a second pack", exported(header, make1(frame(stored, "pack-1", 0, 4), nil), stored), core.CodeImportInvalid},
		{"an object more", exported(header, make1(good, func(h *manifest.Header) { h.Objects = append(h.Objects, manifest.Object{Key: "pack-1", Bytes: 1}) }), stored), core.CodeImportInvalid},
		{"an object that is too long", exported(header, make1(good, func(h *manifest.Header) { h.Objects[0].Bytes++ }), stored), core.CodeImportInvalid},
		{"nodes of another manifest", exported(header, make1(good, func(h *manifest.Header) {
			h.Shared = []manifest.Ref{{Key: "v1/other/manifest", Digest: core.DigestOf(nil), Bytes: 1}}
		}), stored), core.CodeImportInvalid},
		{"a parent", exported(header, make1(good, func(h *manifest.Header) { h.Parent = h.CheckpointID }), stored), core.CodeImportInvalid},
		{"a map of everything in three nodes", exported(header, hugeBody, stored), core.CodeImportInvalid},
		{"a frame that unpacks to more", exported(header, make1(frame(bomb, "pack-0", 0, 4), nil), bomb), core.CodeImportInvalid},
		{"a frame that unpacks to less", exported(header, make1(frame(stored, "pack-0", 0, 5), nil), stored), core.CodeImportInvalid},
		{"a frame that does not unpack", exported(header, make1(frame([]byte("xyz"), "pack-0", 0, 4), nil), []byte("xyz")), core.CodeImportInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			newRig(t).wantRefused(c.name, c.file, c.code)
		})
	}
}

// TestExportGolden protects the format: data that was written once must stay readable for ever, and is still written in
// the same way.
func TestExportGolden(t *testing.T) {
	t.Parallel()
	path := filepath.Join("testdata", "export-v1.bin")
	x := newRig(t)
	if *update {
		w, _ := x.chain(rand.New(rand.NewPCG(5, 6)), 128<<10, 3)
		if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(path, x.export(w.Manifest), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	im, err := snapshotstore.ReadImport(bytes.NewReader(golden))
	if err != nil {
		t.Fatal(err)
	}
	w, err := im.Store(t.Context(), x.blobs, "v1/golden/c/1/", nil, im.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(golden, x.export(w.Manifest)) {
		t.Error("the format has changed: if it must, it gets another version, and this file stays")
	}
	if got, want := im.Content("memory"), core.Digest("sha256:72359bcd3ec92f0863a0b8bc53476dfe3172cfe7549bdd16c454e2443acb025b"); got != want {
		t.Errorf("the content of its memory is %s instead of %s", got, want)
	}
}

// FuzzReadImport: any input is either refused as the client's fault, or complete.
func FuzzReadImport(f *testing.F) {
	golden, err := os.ReadFile(filepath.Join("testdata", "export-v1.bin"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(golden)
	f.Add(golden[:200])
	f.Add(exported(`{"format":1,"image_name":""}`, []byte("COPPMAN1")))
	f.Fuzz(func(t *testing.T, b []byte) {
		// The sums are corrected, so that the code after them is reached.
		if len(b) >= 16 {
			headerLen, bodyLen := int64(binary.LittleEndian.Uint32(b[8:])), int64(binary.LittleEndian.Uint32(b[12:]))
			if end := 16 + headerLen + bodyLen; end+32 <= int64(len(b)) {
				sum := sha256.Sum256(b[:end])
				copy(b[end:], sum[:])
			}
		}
		im, err := snapshotstore.ReadImport(bytes.NewReader(b))
		if err != nil {
			if core.CategoryOf(err) != core.Invalid {
				t.Fatal(err)
			}
			return
		}
		for _, image := range im.Manifest.Images {
			im.Content(image.Name)
		}
	})
}
