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

// Format is the version of the format. A reader takes this one and no other.
const Format = 1

// What a manifest may have at most.
const (
	// MaxBytes of the object, and of its nodes when they are not compressed.
	MaxBytes = 64 << 20
	// MaxShared is how many other manifests one may take nodes from. What would need more has all its nodes itself.
	MaxShared = 8
	// MaxFrameBytes of one frame.
	MaxFrameBytes = FramePages*PageSize + 4096
	// MaxNodes is how many nodes one manifest may have, and MaxLeaves how many leaves its maps may have together: 512 GiB in use.
	MaxNodes  = 1 << 20
	MaxLeaves = 1 << 20
	maxHeader = 8 << 20
	maxKey    = 512
	maxImages = 16
	maxClass  = 64 // fields
	// minListed is the least number of bytes that an image, a manifest or an object takes in a header. It bounds the elements of a
	// list by the bytes of the header before the list is decoded.
	minListed = 20
	// maxRatio is how many bytes of nodes may come out of one compressed byte, beyond nodesSlack. Most of a node is hashes, which
	// do not compress: what a writer makes stays far below.
	maxRatio   = 64
	nodesSlack = 64 << 10
)

const magic = "COPPMAN1"

// Header is what a manifest says besides the map. It is encoded as JSON in the order of its fields.
type Header struct {
	Format       int               `json:"format"`
	ProjectID    core.ProjectID    `json:"project_id"`
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	Parent       core.CheckpointID `json:"parent,omitempty"` // in the DAG
	CapturedAt   string            `json:"captured_at"`      // RFC 3339, UTC
	GuestImage   core.Digest       `json:"guest_image"`      // whose root file system and kernel it needs
	Class        map[string]string `json:"class"`            // what it needs of a host: equal in every field
	Resources    core.Resources    `json:"resources"`
	Before       *Ref              `json:"before,omitempty"` // the manifest that this one was written against
	Images       []ImageRoot       `json:"images"`           // sorted by name
	Shared       []Ref             `json:"shared,omitempty"` // manifests that nodes are taken from, sorted by key
	Objects      []Object          `json:"objects"`          // that frames are in, sorted by key
	Record       json.RawMessage   `json:"record,omitempty"` // what the runner wants to know again
}

// Ref names another manifest.
type Ref struct {
	Key    string      `json:"key"`
	Digest core.Digest `json:"digest"` // of the object's bytes
	Bytes  int64       `json:"bytes"`
}

// ImageRoot is one image of the checkpoint.
type ImageRoot struct {
	Name  string      `json:"name"`
	Bytes int64       `json:"bytes"`
	Root  core.Digest `json:"root,omitempty"` // of the map's root node; empty: zeros
}

// Object is one object with frames.
type Object struct {
	Key   string `json:"key"`
	Bytes int64  `json:"bytes"`
}

// coders that are made once: an encoder without concurrency gives the same bytes for the same input.
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
//	12  4   length n of the nodes when they are not compressed, little-endian
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

// Decode takes a manifest apart. What it returns is well-formed: every field is within its bounds, and every node has the hash under
// which it is found. That the nodes are those of a map DecodeTree finds out.
func Decode(b []byte) (Header, Nodes, error) {
	h, err := DecodeHeader(b)
	if err != nil {
		return h, nil, err
	}
	headLen, nodesLen := lengths(b)
	packed := b[16+headLen:]
	if nodesLen > nodesSlack+maxRatio*int64(len(packed)) {
		return h, nil, invalid("its nodes are compressed more than nodes can be")
	}
	raw, err := decompressor().DecodeAll(packed, make([]byte, 0, nodesLen))
	if err != nil || int64(len(raw)) != nodesLen {
		return h, nil, invalid("its nodes cannot be decompressed")
	}
	nodes, err := decodeNodes(raw)
	return h, nodes, err
}

// lengths are those of the header and of the nodes. The caller has made sure that b has 16 bytes.
func lengths(b []byte) (head, nodes int64) {
	return int64(binary.LittleEndian.Uint32(b[8:])), int64(binary.LittleEndian.Uint32(b[12:]))
}

// DecodeHeader reads and checks the header alone. It takes memory for what the header says, and for none of the nodes.
func DecodeHeader(b []byte) (Header, error) {
	var h Header
	if len(b) < 16 || len(b) > MaxBytes || string(b[:8]) != magic {
		return h, invalid("it does not begin as one")
	}
	headLen, nodesLen := lengths(b)
	if headLen > maxHeader || headLen > int64(len(b))-16 || nodesLen > MaxBytes {
		return h, invalid("its lengths cannot be")
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
		return h, invalid("its header is not written as it must be")
	}
	return h, h.check()
}

// checkLists refuses a header whose lists have more elements than their bytes allow, before they are decoded: an empty element takes
// two bytes as JSON and a hundred in memory.
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
		return invalid("its header has more in it than one has")
	}
	return nil
}

func decodeNodes(raw []byte) (Nodes, error) {
	nodes := make(Nodes)
	var last Hash
	for len(raw) > 0 {
		n, used := binary.Uvarint(raw)
		if used <= 0 || n < minNode || n > maxNode || int64(n) > int64(len(raw)-used) {
			return nil, invalid("the length of a node cannot be")
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
		return invalid("its project is not one")
	}
	if _, err := core.ParseID[core.CheckpointID](string(h.CheckpointID)); err != nil {
		return invalid("its checkpoint is not one")
	}
	if h.Parent != "" {
		if _, err := core.ParseID[core.CheckpointID](string(h.Parent)); err != nil {
			return invalid("its parent is not one")
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
			return invalid("an image is there twice")
		}
		if err := checkSize(image.Bytes); err != nil {
			return err
		}
		if _, err := hashOf(image.Root); err != nil {
			return err
		}
	}
	if len(h.Shared) > MaxShared {
		return invalid("it takes nodes from %d others", len(h.Shared))
	}
	for i, ref := range h.Shared {
		if err := ref.check(); err != nil {
			return err
		}
		if i > 0 && h.Shared[i-1].Key >= ref.Key {
			return invalid("those that it takes nodes from are not in order")
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
		return invalid("it names another manifest that cannot be")
	}
	return nil
}

// hashOf is the hash that a root has as a digest.
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

// Digest is a hash as it is written in a header.
func (h Hash) Digest() core.Digest {
	if h == (Hash{}) {
		return ""
	}
	return core.Digest("sha256:" + hex.EncodeToString(h[:]))
}

// Trees builds the maps of all images. nodes are those of the manifest itself and of those that it shares with. A manifest that maps a
// page of a frame twice, or has frames that overlap, is refused: no writer makes one, and a few bytes would stand for a whole disk.
func (h Header) Trees(nodes Nodes) (map[string]*Tree, error) {
	return h.TreesWithin(nodes, MaxLeaves)
}

// TreesWithin is Trees with a smaller bound of the leaves that all maps have together. A leaf takes about 2 KiB of memory.
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

// frameStock is the frames of all maps of a manifest, one of each.
type frameStock struct {
	frames map[Frame]*Frame
	used   map[*Frame]uint16 // a bit for each page of a frame that is mapped; nil: it is not noted
}

// use notes that the pages of a leaf are mapped, each for the first time.
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
			return invalid("it maps page %d of the frame at %d of an object twice", l.slots[i].Index, f.Offset)
		}
		s.used[f] |= bit
		empty = false
	}
	if empty {
		return invalid("it has a leaf of zeros")
	}
	return nil
}

// check makes sure that every frame is in an object that the header names, and that none overlaps another.
func (s *frameStock) check(objects map[string]int64) error {
	list := slices.SortedFunc(maps.Values(s.frames), func(a, b *Frame) int {
		return cmp.Or(strings.Compare(a.Object, b.Object), cmp.Compare(a.Offset, b.Offset))
	})
	for i, f := range list {
		if size, there := objects[f.Object]; !there || f.Offset > size-f.Length {
			return invalid("it has a frame that is in no object that it names")
		}
		if i > 0 && list[i-1].Object == f.Object && f.Offset-list[i-1].Offset < list[i-1].Length {
			return invalid("it has frames that overlap, at %d of an object", f.Offset)
		}
	}
	return nil
}
