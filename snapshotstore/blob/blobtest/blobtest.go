// Package blobtest is the suite that every backend of the snapshot store passes.
package blobtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// Store is an empty store, with functions for what the suite cannot do through the contract.
type Store struct {
	blob.Blobs
	// Abandon leaves behind what a writer of key leaves when it dies in the middle.
	Abandon func(tb testing.TB, key string)
	// Leftovers counts what uploads have left behind and List does not show.
	Leftovers func(tb testing.TB) int
}

const (
	small = 10_000
	// large exceeds what any backend sends in one piece, and is no multiple of such a size.
	large = 37<<20 + 4321
	// listed exceeds one page of S3.
	listed = 1_100
)

// Run runs the suite. open makes a new store for each test.
func Run(t *testing.T, open func(tb testing.TB) Store) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(t *testing.T, s Store)
	}{
		{"put and get", testPutGet},
		{"ranges", testRanges},
		{"absent", testAbsent},
		{"no bytes", testEmpty},
		{"large", testLarge},
		{"stat", testStat},
		{"list", testList},
		{"list many", testListMany},
		{"delete", testDelete},
		{"put again", testPutAgain},
		{"racing writers", testRacingWriters},
		{"racing large writers", testRacingLargeWriters},
		{"racing deletes", testRacingDeletes},
		{"wrong digest", testWrongDigest},
		{"short body", testShortBody},
		{"cancelled", testCancelled},
		{"invalid", testInvalid},
		{"sweep", testSweep},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.test(t, open(t))
		})
	}
}

// Bytes returns n bytes that depend only on the seed.
func Bytes(seed uint64, n int) []byte {
	b := make([]byte, n)
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(b) // never fails
	return b
}

// Put puts bytes under a key.
func Put(ctx context.Context, b blob.Blobs, key string, data []byte) error {
	return b.Put(ctx, key, bytes.NewReader(data), int64(len(data)), core.DigestOf(data))
}

// Get returns n bytes of an object from off on.
func Get(ctx context.Context, b blob.Blobs, key string, off, n int64) ([]byte, error) {
	r, err := b.Get(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(r)
	return data, errors.Join(err, r.Close())
}

func mustPut(t *testing.T, b blob.Blobs, key string, data []byte) {
	t.Helper()
	if err := Put(t.Context(), b, key, data); err != nil {
		t.Fatal(err)
	}
}

// holds checks that an object has exactly these bytes.
func holds(t *testing.T, b blob.Blobs, key string, want []byte) {
	t.Helper()
	got, err := Get(t.Context(), b, key, 0, int64(len(want))+1)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s holds %d bytes, %v; want those %d that were put", key, len(got), err, len(want))
	}
}

// lacks checks that an object does not exist.
func lacks(t *testing.T, b blob.Blobs, key string) {
	t.Helper()
	if _, err := b.Stat(t.Context(), key); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("stat of %s: got %v, want ErrNotFound", key, err)
	}
	if _, err := Get(t.Context(), b, key, 0, 1); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("get of %s: got %v, want ErrNotFound", key, err)
	}
	if slices.Contains(Keys(t, b, ""), key) {
		t.Errorf("%s is listed", key)
	}
}

// Keys returns the keys of a store.
func Keys(t *testing.T, b blob.Blobs, prefix string) []string {
	t.Helper()
	keys := []string{}
	for info, err := range b.List(t.Context(), prefix) {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, info.Key)
	}
	return keys
}

// clean checks that uploads left nothing behind.
func clean(t *testing.T, s Store) {
	t.Helper()
	if n := s.Leftovers(t); n != 0 {
		t.Errorf("uploads left %d things behind", n)
	}
}

func testPutGet(t *testing.T, s Store) {
	t.Helper()
	data := Bytes(1, small)
	for _, key := range []string{"a", "packs/ab/abcdef", "m_1-2.3/x..y/z", "p/" + strings.Repeat("k", 200) + "/" + strings.Repeat("l", 255)} {
		mustPut(t, s, key, data)
		holds(t, s, key, data)
	}
	clean(t, s)
}

func testRanges(t *testing.T, s Store) {
	t.Helper()
	const key = "packs/r"
	data := Bytes(2, small)
	mustPut(t, s, key, data)
	for _, c := range []struct{ off, n int64 }{
		{0, small},
		{0, 1},
		{0, 0},
		{17, 4000},
		{small - 1, 1},
		{small - 1, 2}, // short
		{0, small + 1},
		{0, 1 << 40},
		{5000, 1 << 40},
		{small, 0},
		{small, 1}, // at the end
		{small + 1, 10},
		{1 << 40, 1},
	} {
		want := data[min(c.off, small):min(c.off+c.n, small)]
		got, err := Get(t.Context(), s, key, c.off, c.n)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes from %d on: got %d, %v; want %d", c.n, c.off, len(got), err, len(want))
		}
	}
	r, err := s.Get(t.Context(), key, 0, small) // closed before its end
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(r, make([]byte, 10)); err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func testAbsent(t *testing.T, s Store) {
	t.Helper()
	lacks(t, s, "nothing")
	lacks(t, s, "nothing/here")
	if _, err := Get(t.Context(), s, "nothing", 0, 0); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("no bytes of nothing: %v", err)
	}
	mustPut(t, s, "something", []byte("x"))
	if _, err := s.Stat(t.Context(), "something/below"); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("below an object: got %v, want ErrNotFound", err)
	}
	mustPut(t, s, "dir/object", []byte("x"))
	lacks(t, s, "dir")
}

func testEmpty(t *testing.T, s Store) {
	t.Helper()
	mustPut(t, s, "empty", nil)
	mustPut(t, s, "empty", nil)
	holds(t, s, "empty", []byte{})
	if got, err := Get(t.Context(), s, "empty", 3, 5); err != nil || len(got) != 0 {
		t.Errorf("past the end of no bytes: %q, %v", got, err)
	}
	if info, err := s.Stat(t.Context(), "empty"); err != nil || info.Size != 0 {
		t.Errorf("%+v, %v", info, err)
	}
}

func testLarge(t *testing.T, s Store) {
	t.Helper()
	const key = "packs/large"
	data := Bytes(3, large)
	mustPut(t, s, key, data)
	holds(t, s, key, data)
	mustPut(t, s, key, data)
	got, err := Get(t.Context(), s, key, 16<<20-5, 10) // across the border of an upload's parts
	if err != nil || !bytes.Equal(got, data[16<<20-5:16<<20+5]) {
		t.Errorf("in the middle: %x, %v", got, err)
	}
	if info, err := s.Stat(t.Context(), key); err != nil || info.Size != large {
		t.Errorf("%+v, %v", info, err)
	}
	data[large-1] ^= 1
	if err := Put(t.Context(), s, key, data); !errors.Is(err, blob.ErrExists) {
		t.Errorf("other bytes: got %v, want ErrExists", err)
	}
	clean(t, s)
}

func testStat(t *testing.T, s Store) {
	t.Helper()
	mustPut(t, s, "a/b", Bytes(4, 77))
	info, err := s.Stat(t.Context(), "a/b")
	if err != nil || info.Key != "a/b" || info.Size != 77 {
		t.Fatalf("%+v, %v", info, err)
	}
	if age := time.Since(info.Modified); age > time.Hour || age < -time.Hour {
		t.Errorf("modified at %v", info.Modified)
	}
	for listed, err := range s.List(t.Context(), "a") {
		if err != nil || listed.Key != info.Key || listed.Size != info.Size || listed.Modified.Sub(info.Modified).Abs() > time.Second {
			t.Errorf("listed as %+v, %v; stat says %+v", listed, err, info)
		}
	}
}

func testList(t *testing.T, s Store) {
	t.Helper()
	if got := Keys(t, s, ""); len(got) != 0 {
		t.Errorf("an empty store lists %q", got)
	}
	all := []string{"a-b/c", "a.b", "a/0", "a/b-c", "a/b.c/d", "a/b/c", "a/b0", "a0", "a_b", "ab/c", "b/a"} // in order
	for _, i := range rand.Perm(len(all)) {                                                                 //nolint:gosec // G404: any order will do
		mustPut(t, s, all[i], []byte(all[i]))
	}
	for _, prefix := range []string{"", "a", "a/", "a/b", "a/b/", "a/b/c", "a/b.", "a-", "b", "c", "a/b/c/d", "b/a/"} {
		want := slices.DeleteFunc(slices.Clone(all), func(k string) bool { return !strings.HasPrefix(k, prefix) })
		if diff := cmp.Diff(want, Keys(t, s, prefix)); diff != "" {
			t.Errorf("prefix %q (-want +got):\n%s", prefix, diff)
		}
	}
	n := 0
	for _, err := range s.List(t.Context(), "") { // the listing is not finished
		if err != nil {
			t.Error(err)
		}
		if n++; n == 2 {
			break
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, err := range s.List(ctx, "") {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	}
}

func testListMany(t *testing.T, s Store) {
	t.Helper()
	var want []string
	var g errgroup.Group
	g.SetLimit(16)
	for i := range listed {
		key := fmt.Sprintf("packs/%02x/%04d", i%7, i)
		want = append(want, key)
		g.Go(func() error { return Put(t.Context(), s, key, []byte(key)) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, Keys(t, s, "packs/")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := s.Delete(t.Context(), want...); err != nil {
		t.Fatal(err)
	}
	if got := Keys(t, s, ""); len(got) != 0 {
		t.Errorf("%d are left", len(got))
	}
}

func testDelete(t *testing.T, s Store) {
	t.Helper()
	for _, key := range []string{"a/1", "a/2", "a/3"} {
		mustPut(t, s, key, []byte(key))
	}
	for range 2 {
		if err := s.Delete(t.Context(), "a/1", "a/3", "never", "a/1"); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff([]string{"a/2"}, Keys(t, s, "")); diff != "" {
		t.Error(diff)
	}
	if err := s.Delete(t.Context()); err != nil {
		t.Error(err)
	}
	mustPut(t, s, "a/1", []byte("again, and others"))
	holds(t, s, "a/1", []byte("again, and others"))
	if err := s.Delete(t.Context(), "a"); err != nil { // must not delete the objects below it
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"a/1", "a/2"}, Keys(t, s, "")); diff != "" {
		t.Error(diff)
	}
}

func testPutAgain(t *testing.T, s Store) {
	t.Helper()
	first, same, longer := Bytes(5, small), Bytes(6, small), Bytes(5, small+1)
	mustPut(t, s, "k", first)
	mustPut(t, s, "k", first)
	for name, other := range map[string][]byte{"as many bytes": same, "more bytes": longer, "none": nil} {
		if err := Put(t.Context(), s, "k", other); !errors.Is(err, blob.ErrExists) {
			t.Errorf("%s: got %v, want ErrExists", name, err)
		}
	}
	holds(t, s, "k", first)
	clean(t, s)
}

func testWrongDigest(t *testing.T, s Store) {
	t.Helper()
	for name, data := range map[string][]byte{"small": Bytes(7, small), "none": nil, "large": Bytes(8, large)} {
		key := "wrong/" + name
		err := s.Put(t.Context(), key, bytes.NewReader(data), int64(len(data)), core.DigestOf([]byte("others")))
		if !errors.Is(err, blob.ErrDigest) || core.CategoryOf(err) != core.DataLoss {
			t.Errorf("%s: got %v, want ErrDigest", name, err)
		}
		lacks(t, s, key)
	}
	clean(t, s)
}

func testShortBody(t *testing.T, s Store) {
	t.Helper()
	for name, n := range map[string]int{"small": small, "large": large} {
		data := Bytes(9, n)
		err := s.Put(t.Context(), "short", bytes.NewReader(data[:n-1]), int64(n), core.DigestOf(data))
		if err == nil || core.CodeOf(err) == core.CodeStoreUnavailable {
			t.Errorf("%s: got %v, want an error that does not blame the store", name, err)
		}
	}
	lacks(t, s, "short")
	clean(t, s)
}

func testInvalid(t *testing.T, s Store) {
	t.Helper()
	ctx := t.Context()
	digest := core.DigestOf([]byte("x"))
	refused := func(what string, err error) {
		t.Helper()
		if core.CategoryOf(err) != core.Invalid {
			t.Errorf("%s: got %v, want a refusal", what, err)
		}
	}
	for _, key := range []string{
		"", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", ".tmp/x", "a/.b", "A", "a b", "a\x00b", "ä", "a\\b", "a?b",
		strings.Repeat("a/", 256) + "a", strings.Repeat("a", 256),
	} {
		refused("put "+key, s.Put(ctx, key, strings.NewReader("x"), 1, digest))
		_, err := s.Get(ctx, key, 0, 1)
		refused("get "+key, err)
		_, err = s.Stat(ctx, key)
		refused("stat "+key, err)
		refused("delete "+key, s.Delete(ctx, "kept", key))
	}
	for _, prefix := range []string{"/", "..", "../", "a//", "A", ".t", "a/."} {
		for _, err := range s.List(ctx, prefix) {
			refused("list "+prefix, err)
		}
	}
	refused("no digest", s.Put(ctx, "k", strings.NewReader("x"), 1, ""))
	refused("a negative size", s.Put(ctx, "k", strings.NewReader("x"), -1, digest))
	for _, c := range [][2]int64{{-1, 1}, {0, -1}, {1, 1<<63 - 1}} {
		_, err := s.Get(ctx, "k", c[0], c[1])
		refused(fmt.Sprint(c), err)
	}
	if got := Keys(t, s, ""); len(got) != 0 {
		t.Errorf("the store has %q", got)
	}
}

func testSweep(t *testing.T, s Store) {
	t.Helper()
	mustPut(t, s, "kept", Bytes(10, small))
	s.Abandon(t, "abandoned/1")
	s.Abandon(t, "abandoned/2")
	lacks(t, s, "abandoned/1")
	before := s.Leftovers(t)
	if before < 2 {
		t.Fatalf("%d leftovers of two writers", before)
	}
	if err := s.Sweep(t.Context(), time.Now().Add(-time.Hour)); err != nil {
		t.Error(err)
	}
	if n := s.Leftovers(t); n != before {
		t.Errorf("uploads of now were swept: %d are left of %d", n, before)
	}
	for range 2 {
		if err := s.Sweep(t.Context(), time.Now().Add(time.Hour)); err != nil {
			t.Error(err)
		}
		clean(t, s)
	}
	if diff := cmp.Diff([]string{"kept"}, Keys(t, s, "")); diff != "" {
		t.Error(diff)
	}
	holds(t, s, "kept", Bytes(10, small))
	mustPut(t, s, "abandoned/1", Bytes(11, small))
}
