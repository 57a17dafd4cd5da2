package manifest

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/coppice-dev/coppice/core"
)

// Format is the version of the format. A reader accepts only this version.
const Format = 1

// The bounds of a manifest.
const (
	// MaxBytes bounds the object, and also its nodes before compression.
	MaxBytes = 64 << 20
	// MaxShared bounds from how many other manifests one manifest takes nodes. A manifest that would need more contains
	// all its nodes itself.
	MaxShared = 8
	// MaxFrameBytes bounds one frame.
	MaxFrameBytes = FramePages*PageSize + 4096
	// MaxNodes bounds the nodes of one manifest, and MaxLeaves the leaves of all its maps together: 512 GiB in use.
	MaxNodes  = 1 << 20
	MaxLeaves = 1 << 20
	maxHeader = 8 << 20
	maxKey    = 512
	maxImages = 16
	maxClass  = 64 // fields
	// minListed is the minimum number of bytes that an image, a manifest or an object takes in a header. With it, the
	// number of elements of a list is bounded by the bytes of the header before the list is decoded.
	minListed = 20
	// maxRatio bounds how many bytes of nodes one compressed byte may give, beyond nodesSlack. Most of a node is
	// hashes, which do not compress: real manifests stay far below.
	maxRatio   = 64
	nodesSlack = 64 << 10
)

const magic = "COPPMAN1"

// Header is the information in a manifest besides the map. It is encoded as JSON in the order of its fields.
type Header struct {
	Format       int               `json:"format"`
	ProjectID    core.ProjectID    `json:"project_id"`
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	Parent       core.CheckpointID `json:"parent,omitempty"` // parent in the DAG
	CapturedAt   string            `json:"captured_at"`      // RFC 3339, UTC
	GuestImage   core.Digest       `json:"guest_image"`      // the image with its root file system and kernel
	Class        map[string]string `json:"class"`            // runner class: a host must be equal in every field
	Resources    core.Resources    `json:"resources"`
	Before       *Ref              `json:"before,omitempty"` // the manifest that this one was written against
	Images       []ImageRoot       `json:"images"`           // sorted by name
	Shared       []Ref             `json:"shared,omitempty"` // other manifests with nodes of this one, sorted by key
	Objects      []Object          `json:"objects"`          // objects that contain its frames, sorted by key
	Record       json.RawMessage   `json:"record,omitempty"` // the record of the runner, which only the runner reads
}

// Ref names another manifest.
type Ref struct {
	Key    string      `json:"key"`
	Digest core.Digest `json:"digest"` // digest of the object's bytes
	Bytes  int64       `json:"bytes"`
}

// ImageRoot is one image of the checkpoint.
type ImageRoot struct {
	Name  string      `json:"name"`
	Bytes int64       `json:"bytes"`
	Root  core.Digest `json:"root,omitempty"` // hash of the map's root node; empty: all zeros
}

// Object is one object with frames.
type Object struct {
	Key   string `json:"key"`
	Bytes int64  `json:"bytes"`
}

// The coders are made once. An encoder without concurrency gives the same bytes for the same input.
var (
	encoder = sync.OnceValue(func() *zstd.Encoder {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderCRC(false))
		if err != nil {
			panic(err) // the options are constants
		}
		return e
	})
	decompressor = sync.OnceValue(func() *zstd.Decoder {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(MaxBytes), zstd.WithDecodeAllCapLimit(true))
		if err != nil {
			panic(err) // the options are constants
		}
		return d
	})
)

// Encode writes a manifest:
//
//	0   8   magic "COPPMAN1"
//	8   4   length h of the header, little-endian
//	12  4   length n of the uncompressed nodes, little-endian
//	16  h   the header, JSON
//	..      the nodes as one zstd frame: each with its length before it as a uvarint, in the order of their hashes
func Encode(h Header, own Nodes) ([]byte, error) {
	h.Format = Format
	head, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	var nodes []byte
	for _, hash := range own.sorted() {
		nodes = binary.AppendUvarint(nodes, uint64(len(own[hash])))
		nodes = append(nodes, own[hash]...)
	}
	if len(head) > maxHeader || len(nodes) > MaxBytes {
		return nil, core.Errorf(core.Exhausted, core.CodeUnsupported, "the manifest of checkpoint %s would have %d bytes of nodes, more than the format allows", h.CheckpointID, len(nodes))
	}
	b := make([]byte, 0, 16+len(head)+len(nodes)/2)
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(head)))  //nolint:gosec // G115: bounded above
	b = binary.LittleEndian.AppendUint32(b, uint32(len(nodes))) //nolint:gosec // G115: bounded above
	b = append(b, head...)
	return encoder().EncodeAll(nodes, b), nil
}

// Decode decodes a manifest. The result is well-formed: every field is within its bounds, and every node has the hash
// under which it is found. Whether the nodes form a map is checked by DecodeTree.
func Decode(b []byte) (Header, Nodes, error) {
	h, err := DecodeHeader(b)
	if err != nil {
		return h, nil, err
	}
	headLen, nodesLen := lengths(b)
	packed := b[16+headLen:]
	if nodesLen > nodesSlack+maxRatio*int64(len(packed)) {
		return h, nil, invalid("its nodes have an impossible compression ratio")
	}
	raw, err := decompressor().DecodeAll(packed, make([]byte, 0, nodesLen))
	if err != nil || int64(len(raw)) != nodesLen {
		return h, nil, invalid("its nodes cannot be decompressed")
	}
	nodes, err := decodeNodes(raw)
	return h, nodes, err
}

// lengths returns the lengths of the header and of the uncompressed nodes. The caller has checked that b has 16 bytes.
func lengths(b []byte) (head, nodes int64) {
	return int64(binary.LittleEndian.Uint32(b[8:])), int64(binary.LittleEndian.Uint32(b[12:]))
}

// DecodeHeader decodes and checks only the header. It takes memory for the header and none for the nodes.
func DecodeHeader(b []byte) (Header, error) {
	var h Header
	if len(b) < 16 || len(b) > MaxBytes || string(b[:8]) != magic {
		return h, invalid("it does not begin like a manifest")
	}
	headLen, nodesLen := lengths(b)
	if headLen > maxHeader || headLen > int64(len(b))-16 || nodesLen > MaxBytes {
		return h, invalid("its lengths are not possible")
	}
	head := b[16 : 16+headLen]
	if err := checkLists(head); err != nil {
		return h, err
	}
	dec := json.NewDecoder(bytes.NewReader(head))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&h); err != nil {
		return h, invalid("its header cannot be read")
	}
	if h.Format != Format {
		return h, core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the manifest has format %d and this program reads format %d; use a version that reads it", h.Format, Format)
	}
	if again, err := json.Marshal(h); err != nil || !bytes.Equal(again, head) {
		return h, invalid("its header is not in canonical form")
	}
	return h, h.check()
}

// checkLists refuses a header whose lists have more elements than their bytes allow, before they are decoded. An empty
// element takes two bytes as JSON and a hundred bytes in memory.
func checkLists(head []byte) error {
	var lists struct {
		Class   json.RawMessage `json:"class"`
		Images  json.RawMessage `json:"images"`
		Shared  json.RawMessage `json:"shared"`
		Objects json.RawMessage `json:"objects"`
	}
	if err := json.Unmarshal(head, &lists); err != nil {
		return invalid("its header cannot be read")
	}
	switch open := []byte("{"); {
	case bytes.Count(lists.Class, []byte(":")) > 4*maxClass,
		bytes.Count(lists.Images, open) > maxImages || len(lists.Images) > 64<<10,
		bytes.Count(lists.Shared, open) > MaxShared,
		bytes.Count(lists.Objects, open) > 1+len(lists.Objects)/minListed:
		return invalid("its header has more elements than a header can have")
	}
	return nil
}

func decodeNodes(raw []byte) (Nodes, error) {
	nodes := make(Nodes)
	var last Hash
	for len(raw) > 0 {
		n, used := binary.Uvarint(raw)
		if used <= 0 || n < minNode || n > maxNode || int64(n) > int64(len(raw)-used) {
			return nil, invalid("the length of a node is not possible")
		}
		node := raw[used : used+int(n)]
		h := Hash(sha256.Sum256(node))
		if len(nodes) > 0 && bytes.Compare(last[:], h[:]) >= 0 {
			return nil, invalid("its nodes are not in order")
		}
		if len(nodes) >= MaxNodes {
			return nil, invalid("it has more than %d nodes", MaxNodes)
		}
		nodes[h], last = node, h
		raw = raw[used+int(n):]
	}
	return nodes, nil
}

func (h Header) check() error {
	if _, err := core.ParseID[core.ProjectID](string(h.ProjectID)); err != nil {
		return invalid("its project is not a valid id")
	}
	if _, err := core.ParseID[core.CheckpointID](string(h.CheckpointID)); err != nil {
		return invalid("its checkpoint is not a valid id")
	}
	if h.Parent != "" {
		if _, err := core.ParseID[core.CheckpointID](string(h.Parent)); err != nil {
			return invalid("its parent is not a valid id")
		}
	}
	if len(h.Class) > maxClass {
		return invalid("its class has %d fields", len(h.Class))
	}
	if len(h.Images) > maxImages || !slices.IsSortedFunc(h.Images, func(a, b ImageRoot) int { return strings.Compare(a.Name, b.Name) }) {
		return invalid("its images are not in order")
	}
	for i, image := range h.Images {
		if image.Name == "" || i > 0 && h.Images[i-1].Name == image.Name {
			return invalid("it has an image twice")
		}
		if err := checkSize(image.Bytes); err != nil {
			return err
		}
		if _, err := hashOf(image.Root); err != nil {
			return err
		}
	}
	if len(h.Shared) > MaxShared {
		return invalid("it takes nodes from %d other manifests", len(h.Shared))
	}
	for i, ref := range h.Shared {
		if err := ref.check(); err != nil {
			return err
		}
		if i > 0 && h.Shared[i-1].Key >= ref.Key {
			return invalid("the manifests from which it takes nodes are not in order")
		}
	}
	if h.Before != nil {
		if err := h.Before.check(); err != nil {
			return err
		}
	}
	for i, o := range h.Objects {
		if o.Key == "" || len(o.Key) > maxKey || o.Bytes < 1 || o.Bytes > math.MaxInt64/2 || i > 0 && h.Objects[i-1].Key >= o.Key {
			return invalid("its objects are not in order")
		}
	}
	return nil
}

func (r Ref) check() error {
	if _, err := core.ParseDigest(string(r.Digest)); err != nil || r.Key == "" || len(r.Key) > maxKey || r.Bytes < 1 || r.Bytes > MaxBytes {
		return invalid("its reference to another manifest is not valid")
	}
	return nil
}

// hashOf converts the digest of a root to a hash.
func hashOf(d core.Digest) (Hash, error) {
	var h Hash
	if d == "" {
		return h, nil
	}
	if _, err := core.ParseDigest(string(d)); err != nil {
		return h, invalid("the root of an image is not a digest")
	}
	if _, err := hex.Decode(h[:], []byte(d.Hex())); err != nil {
		return h, invalid("the root of an image is not a digest")
	}
	return h, nil
}

// Digest returns a hash in the form of a header.
func (h Hash) Digest() core.Digest {
	if h == (Hash{}) {
		return ""
	}
	return core.Digest("sha256:" + hex.EncodeToString(h[:]))
}

// Trees builds the maps of all images. nodes are the nodes of the manifest itself and of those that it shares with. A
// manifest that maps a page of a frame twice, or has overlapping frames, is refused: no writer makes one, and a few
// bytes could stand for a whole disk.
func (h Header) Trees(nodes Nodes) (map[string]*Tree, error) {
	return h.TreesWithin(nodes, MaxLeaves)
}

// TreesWithin is Trees with a smaller bound on the leaves of all maps together. A leaf takes about 2 KiB of memory.
func (h Header) TreesWithin(nodes Nodes, leaves int) (map[string]*Tree, error) {
	objects := make(map[string]int64, len(h.Objects))
	for _, o := range h.Objects {
		objects[o.Key] = o.Bytes
	}
	stock := &frameStock{frames: make(map[Frame]*Frame), used: make(map[*Frame]uint16)}
	out := make(map[string]*Tree, len(h.Images))
	for _, image := range h.Images {
		root, err := hashOf(image.Root)
		if err != nil {
			return nil, err
		}
		t, err := decodeTree(image.Bytes, root, nodes, leaves, stock)
		if err != nil {
			return nil, err
		}
		leaves -= t.Leaves()
		out[image.Name] = t
	}
	return out, stock.check(objects)
}

// frameStock has one copy of each frame of all maps of a manifest.
type frameStock struct {
	frames map[Frame]*Frame
	used   map[*Frame]uint16 // one bit for each mapped page of a frame; nil: not recorded
}

// use records that the pages of a leaf are mapped, and refuses a page that was mapped before.
func (s *frameStock) use(l *leaf) error {
	if s.used == nil {
		return nil
	}
	empty := true
	for i := range l.slots {
		f := l.slots[i].Frame
		if f == nil {
			continue
		}
		bit := uint16(1) << l.slots[i].Index
		if s.used[f]&bit != 0 {
			return invalid("it maps page %d of the frame at offset %d of an object twice", l.slots[i].Index, f.Offset)
		}
		s.used[f] |= bit
		empty = false
	}
	if empty {
		return invalid("it has a leaf of zeros")
	}
	return nil
}

// check makes sure that every frame is in an object that the header names, and that no frames overlap.
func (s *frameStock) check(objects map[string]int64) error {
	list := slices.SortedFunc(maps.Values(s.frames), func(a, b *Frame) int {
		return cmp.Or(strings.Compare(a.Object, b.Object), cmp.Compare(a.Offset, b.Offset))
	})
	for i, f := range list {
		if size, there := objects[f.Object]; !there || f.Offset > size-f.Length {
			return invalid("it has a frame outside of the objects that it names")
		}
		if i > 0 && list[i-1].Object == f.Object && f.Offset-list[i-1].Offset < list[i-1].Length {
			return invalid("it has overlapping frames at offset %d of an object", f.Offset)
		}
	}
	return nil
}
