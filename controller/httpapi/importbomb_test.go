package httpapi_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// bomb is an exported file, with right sums, whose root file system says what it likes. root is its map, in places of the one pack.
func bomb(t *testing.T, pack []byte, root *manifest.Tree) []byte {
	t.Helper()
	all := make(manifest.Nodes)
	trees := map[string]*manifest.Tree{
		runnerapi.ImageMemory: manifest.NewTree(128 << 20), runnerapi.ImageDisk: manifest.NewTree(1 << 30),
		runnerapi.ImageState: manifest.NewTree(9000), runnerapi.ImageRoot: root,
	}
	class := runnerapi.RunnerClass{Arch: "amd64", Accelerator: "tcg", VMM: "qemu", VMMVersion: "7.2", MachineType: "pc-q35-7.2"}
	h := manifest.Header{
		ProjectID: "prj_00000000000000000000000004", CheckpointID: "ckpt_00000000000000000000000008", CapturedAt: "2026-11-22T12:00:00Z",
		GuestImage: core.DigestOf([]byte("x")), Class: class.Fields(), Resources: core.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1}, Record: []byte(`{}`),
		Objects: []manifest.Object{{Key: "pack-0", Bytes: int64(len(pack))}},
	}
	if len(pack) == 0 {
		h.Objects = nil
	}
	for _, name := range slices.Sorted(maps.Keys(trees)) {
		h.Images = append(h.Images, manifest.ImageRoot{Name: name, Bytes: trees[name].Size(), Root: trees[name].Encode(all).Digest()})
	}
	body, err := manifest.Encode(h, all)
	if err != nil {
		t.Fatal(err)
	}
	head := `{"format":1,"image_name":"debian"}`
	b := binary.LittleEndian.AppendUint32([]byte("COPPEXP1"), uint32(len(head)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
	b = append(append(b, head...), body...)
	for _, part := range [][]byte{nil, pack} {
		b = append(b, part...)
		sum := sha256.Sum256(b)
		b = append(b, sum[:]...)
	}
	return b
}

// filled is a map of an image in which every frame has pages of one byte, and the pack with the frames. As many as there are pages come in turn.
func filled(t *testing.T, size int64, frames int) ([]byte, *manifest.Tree) {
	t.Helper()
	encoder, err := zstd.NewWriter(nil, zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false))
	if err != nil {
		t.Fatal(err)
	}
	var pack []byte
	list := make([]*manifest.Frame, frames)
	for i := range list {
		raw := bytes.Repeat([]byte{byte(1 + i%250)}, manifest.FramePages*manifest.PageSize)
		binary.LittleEndian.PutUint32(raw, uint32(i))
		packed := encoder.EncodeAll(raw, nil)
		list[i] = &manifest.Frame{Object: "pack-0", Offset: int64(len(pack)), Length: int64(len(packed)), Pages: manifest.FramePages, Hash: sha256.Sum256(packed)}
		pack = append(pack, packed...)
	}
	edit := manifest.NewTree(size).Edit(size)
	for page := range size / manifest.PageSize {
		edit.Set(page, manifest.Slot{Frame: list[int(page/manifest.FramePages)%frames], Index: int(page % manifest.FramePages)})
	}
	return pack, edit.Tree()
}

// TestImportBomb imports files that claim a root file system of many times their bytes. None gets more than its project may have.
func TestImportBomb(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pack, tree := filled(t, 8<<30, 1)
	small := bomb(t, pack, tree)
	if len(small) > 5<<10 {
		t.Errorf("the file has %d bytes, so it is not the attack", len(small))
	}
	for _, c := range []struct {
		what, says string
		file       []byte
		status     int
		code       core.Code
	}{
		{fmt.Sprintf("a root of 8 GiB in %d bytes", len(small)), "twice", small, 400, core.CodeImportInvalid},
		{"a root of 33 GiB of zeros", "its image root", bomb(t, nil, manifest.NewTree(33<<30)), 400, core.CodeImportInvalid},
	} {
		if got := w.importFile("", c.file); got.status != c.status || got.problem(t).Code != string(c.code) || !strings.Contains(string(got.body), c.says) {
			t.Errorf("%s: %d %s", c.what, got.status, got.body)
		}
	}
	// What is well-formed is charged by what it takes on a host, not by the bytes of the file.
	pack, tree = filled(t, 256<<20, 4096)
	honest := bomb(t, pack, tree)
	w.sql(fmt.Sprintf(`UPDATE quotas SET max_checkpoint_bytes = %d`, 256<<20))
	if got := w.importFile("", honest); got.status != 429 || got.problem(t).Code != string(core.CodeQuotaExceeded) {
		t.Errorf("a root of 256 MiB in %d bytes, with a quota of as much: %d %s", len(honest), got.status, got.body)
	}
	w.nothingLeft(0)
	w.sql(fmt.Sprintf(`UPDATE quotas SET max_checkpoint_bytes = %d`, 257<<20))
	if got := w.importFile("", honest); got.status != 201 {
		t.Errorf("with a quota of more: %d %s", got.status, got.body)
	}
}
