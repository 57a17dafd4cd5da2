package manifest

import (
	"encoding/binary"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// highWater runs work and returns the maximum growth of the heap in bytes.
func highWater(work func()) int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	before := int64(m.HeapAlloc)
	var most atomic.Int64
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		often := time.NewTicker(time.Millisecond) // reading stops the world, so all the time would slow the work down many times
		defer often.Stop()
		for {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			most.Store(max(most.Load(), int64(m.HeapAlloc)-before))
			select {
			case <-done:
				runtime.ReadMemStats(&m)
				most.Store(max(most.Load(), int64(m.HeapAlloc)-before))
				return
			case <-often.C:
			}
		}
	}()
	work()
	close(done)
	<-ended
	return most.Load()
}

// raw builds a manifest from a header and nodes without any check.
func raw(head string, nodesLen uint32, packed []byte) []byte {
	b := binary.LittleEndian.AppendUint32([]byte(magic), uint32(len(head)))
	b = binary.LittleEndian.AppendUint32(b, nodesLen)
	return append(append(b, head...), packed...)
}

// repeated returns a manifest of few bytes whose map repeats one leaf: an image of 80 GiB from one page of a frame.
func repeated(t testing.TB) []byte {
	t.Helper()
	const size = 80 << 30
	h, _ := sample()
	nodes := make(Nodes)
	l := new(leaf)
	f := &Frame{Object: "v1/a/pack-0", Length: 100, Pages: FramePages}
	for i := range l.slots {
		l.slots[i] = Slot{f, i % FramePages}
	}
	level := map[int64]Hash{}
	first := nodes.add(l.encode())
	for n := range int64(size / PageSize / LeafPages) {
		level[n] = first
	}
	for range height(size) {
		level = nodes.raise(level)
	}
	h.Images = []ImageRoot{{Name: "root", Bytes: size, Root: level[0].Digest()}}
	b, err := Encode(h, nodes)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// overlapping returns a manifest with two frames that share bytes of an object.
func overlapping(t testing.TB) []byte {
	t.Helper()
	h, _ := sample()
	e := NewTree(1 << 20).Edit(1 << 20)
	e.Set(0, Slot{&Frame{Object: "v1/a/pack-0", Offset: 0, Length: 100, Pages: 1}, 0})
	e.Set(1, Slot{&Frame{Object: "v1/a/pack-0", Offset: 99, Length: 100, Pages: 1}, 0})
	return encode(t, h, map[string]*Tree{"disk": e.Tree()})
}

// TestBombs reads manifests of few bytes that claim much. Each is refused, within the stated memory.
func TestBombs(t *testing.T) { // not parallel: it measures the heap
	const most = 64 << 20
	h, trees := sample()
	good := encode(t, h, trees)
	headLen, _ := lengths(good)
	head := string(good[16 : 16+headLen])
	replaced := func(old, fresh string) []byte {
		if !strings.Contains(head, old) {
			t.Fatalf("the header has no %s", old)
		}
		return raw(strings.Replace(head, old, fresh, 1), 0, encoder().EncodeAll(nil, nil))
	}
	list := func(name, element string) []byte {
		n := (maxHeader - 4096) / (len(element) + 1)
		return raw(`{"format":1,"`+name+`":[`+strings.Repeat(element+",", n)+element+`]}`, 0, encoder().EncodeAll(nil, nil))
	}
	tiny := func() []byte { // nodes of three bytes, unordered: the maximum number that fits
		var b []byte
		for i := range uint32(8 << 20) {
			b = append(b, 3, byte(i), byte(i>>8), byte(i>>16))
		}
		return raw(head, uint32(len(b)), encoder().EncodeAll(b, nil))
	}
	for name, b := range map[string][]byte{
		"a size of 2^63":        replaced(`"bytes":1073741824`, `"bytes":9223372036854775808`),
		"a size of 2^62":        replaced(`"bytes":1073741824`, `"bytes":4611686018427387904`),
		"a negative size":       replaced(`"bytes":1073741824`, `"bytes":-1`),
		"an object of 2^63":     replaced(`"key":"v1/a/pack-0","bytes":1048576`, `"key":"v1/a/pack-0","bytes":9223372036854775807`),
		"images without end":    list("images", `{}`),
		"objects without end":   list("objects", `{}`),
		"shared without end":    list("shared", `{}`),
		"a class without end":   raw(`{"format":1,"class":{`+strings.Repeat(`"":"",`, 1<<20)+`"":""}}`, 0, nil),
		"nodes that inflate":    raw(head, MaxBytes, encoder().EncodeAll(make([]byte, MaxBytes), nil)),
		"nodes of three bytes":  tiny(),
		"one leaf 163840 times": repeated(t),
		"frames that overlap":   overlapping(t),
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			got := highWater(func() {
				var h Header
				var nodes Nodes
				if h, nodes, err = Decode(b); err == nil {
					_, err = h.Trees(nodes)
				}
			})
			t.Logf("%d bytes took %d KiB of heap: %v", len(b), got>>10, err)
			if core.CodeOf(err) != core.CodeManifestInvalid {
				t.Errorf("it was not refused: %v", err)
			}
			if got > most {
				t.Errorf("it took %d MiB of heap, and %d are allowed", got>>20, int64(most)>>20)
			}
		})
	}
	if b := repeated(t); len(b) > 5<<10 {
		t.Errorf("the manifest of one leaf has %d bytes: it is not the small one that it is meant to be", len(b))
	}
}
