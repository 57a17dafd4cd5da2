package envelope_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
)

// fixed is a key that is the same in every run.
func fixed(b byte) core.DataKey { return core.DataKey(bytes.Repeat([]byte{b}, 32)) }

// goldenBox returns a box with "a frame" in it, encrypted with fixed(1) and the context "context".
func goldenBox(tb testing.TB) []byte {
	tb.Helper()
	box, err := hex.DecodeString("000102030405060708090a0b0c0d0e0f101112131415161719f0bdf7fcfcb292548634c86b25ef0a0786c50778bc20")
	if err != nil {
		tb.Fatal(err)
	}
	return box
}

// TestGolden protects the format: data that was written once must stay readable for ever. Both values come from another
// implementation, of RFC 5869 and of draft-irtf-cfrg-xchacha-03.
func TestGolden(t *testing.T) {
	t.Parallel()
	secret := envelope.Derive(fixed(1), "v1/prj/ckpt/1/")
	if got, want := hex.EncodeToString(secret[:]), "d6cff8341a6fb488b840ed1205eecee16cafb926d139bbab488f747c5c4a9671"; got != want {
		t.Errorf("the key of an attempt is %s instead of %s", got, want)
	}
	box := goldenBox(t)
	got, err := envelope.NewKey(fixed(1), 1).Decrypt(nil, box, []byte("context"))
	if err != nil || string(got) != "a frame" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestEncrypt(t *testing.T) {
	t.Parallel()
	k := envelope.NewKey(core.NewDataKey(), 7)
	for _, n := range []int{0, 1, 4096, 64 << 10} {
		plain := bytes.Repeat([]byte("plain text"), n/10+1)[:n]
		box := k.Encrypt([]byte("before"), plain, []byte("c"))
		if string(box[:6]) != "before" || len(box) != 6+n+envelope.Overhead {
			t.Fatalf("a box of %d bytes for %d", len(box)-6, n)
		}
		box = box[6:]
		if n > 16 && bytes.Contains(box, plain[:16]) {
			t.Error("it is not encrypted")
		}
		if got, err := k.Decrypt([]byte("x"), box, []byte("c")); err != nil || string(got) != "x"+string(plain) {
			t.Errorf("%d bytes: %v", n, err)
		}
		if _, err := k.Decrypt(nil, box, []byte("d")); !errors.Is(err, envelope.ErrOpen) {
			t.Errorf("in another context: %v", err)
		}
		if _, err := envelope.NewKey(core.NewDataKey(), 7).Decrypt(nil, box, []byte("c")); !errors.Is(err, envelope.ErrOpen) {
			t.Errorf("with another key: %v", err)
		}
	}
}

// TestEveryByte flips every bit of a box and cuts it off at every byte.
func TestEveryByte(t *testing.T) {
	t.Parallel()
	k := envelope.NewKey(core.NewDataKey(), 1)
	box := k.Encrypt(nil, []byte("some bytes of a frame"), []byte("c"))
	for i := range len(box) * 8 {
		b := bytes.Clone(box)
		b[i/8] ^= 1 << (i % 8)
		if _, err := k.Decrypt(nil, b, []byte("c")); !errors.Is(err, envelope.ErrOpen) {
			t.Fatalf("bit %d: %v", i, err)
		}
	}
	for i := range box {
		if _, err := k.Decrypt(nil, box[:i], []byte("c")); !errors.Is(err, envelope.ErrOpen) {
			t.Fatalf("%d bytes: %v", i, err)
		}
	}
}

// TestNonces: no two boxes of a key have the same nonce.
func TestNonces(t *testing.T) {
	t.Parallel()
	const boxes = 100_000
	k := envelope.NewKey(core.NewDataKey(), 1)
	seen := make(map[[24]byte]bool, boxes)
	var box []byte
	for range boxes {
		box = k.Encrypt(box[:0], nil, nil)
		seen[[24]byte(box)] = true
	}
	if len(seen) != boxes {
		t.Errorf("%d nonces in %d boxes", len(seen), boxes)
	}
}

// TestDerive: each attempt and each project key gives a different key.
func TestDerive(t *testing.T) {
	t.Parallel()
	a := envelope.Derive(fixed(1), "v1/p/c/1/")
	if a != envelope.Derive(fixed(1), "v1/p/c/1/") {
		t.Error("it is another each time")
	}
	for _, b := range []core.DataKey{fixed(1), envelope.Derive(fixed(1), "v1/p/c/2/"), envelope.Derive(fixed(2), "v1/p/c/1/"), envelope.Derive(fixed(1), "")} {
		if a == b {
			t.Error("two are the same")
		}
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	var none *envelope.Key
	if got := none.Name("pack-0"); got != "pack-0" || envelope.Encrypted("v1/p/c/1/"+got) {
		t.Errorf("not encrypted: %s", got)
	}
	name := "v1/p/c/1/" + envelope.NewKey(fixed(1), 12).Name("pack-0")
	if v, ok := envelope.Version(name); name != "v1/p/c/1/pack-0.k12" || v != 12 || !ok || envelope.Prefix(name) != "v1/p/c/1/" {
		t.Errorf("%s: %d %v", name, v, ok)
	}
	for _, name := range []string{"", "manifest", "a.k1/manifest", "pack-0.k", "pack-0.k0", "pack-0.k01", "pack-0.k+1", "pack-0.kx", "pack-0.k1.k2", "pack-0.k99999999999999999999"} {
		if v, ok := envelope.Version(name); ok {
			t.Errorf("%q: %d", name, v)
		}
	}
}

// TestKeyOf: a key is found by the place of its object, and without a key nothing is read.
func TestKeyOf(t *testing.T) {
	t.Parallel()
	bare, err := dir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bare.Close() })
	if envelope.With(nil, new(envelope.Ring)) != nil {
		t.Error("no store and keys are a store")
	}
	ring := new(envelope.Ring)
	store := envelope.With(bare, ring)
	ring.Add(map[string]core.DataKey{"v1/p/c/1/": fixed(1)}) // later than With, as runners do
	box := envelope.NewKey(fixed(1), 1).Encrypt(nil, []byte("x"), nil)
	k, err := envelope.KeyOf(store, "v1/p/c/1/pack-0.k1")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := k.Decrypt(nil, box, nil); err != nil || string(got) != "x" {
		t.Errorf("%q, %v", got, err)
	}
	for _, in := range []struct {
		name string
		want core.Code
	}{{"v1/p/c/1/pack-0", ""}, {"v1/p/c/2/pack-0.k1", core.CodeKeyUnavailable}, {"v1/p/c/1/x/pack-0.k1", core.CodeKeyUnavailable}} {
		if k, err := envelope.KeyOf(store, in.name); k != nil || err == nil != (in.want == "") || err != nil && core.CodeOf(err) != in.want {
			t.Errorf("%s: %v, %v", in.name, k, err)
		}
	}
	if _, err := envelope.KeyOf(bare, "v1/p/c/1/pack-0.k1"); core.CodeOf(err) != core.CodeKeyUnavailable {
		t.Errorf("a store without keys: %v", err)
	}
}

// FuzzOpen: only what was encrypted can be opened.
func FuzzOpen(f *testing.F) {
	k := envelope.NewKey(fixed(1), 1)
	encrypted := goldenBox(f) // not with a fresh nonce: the fuzzer's workers are other processes
	f.Add(encrypted, []byte("context"))
	f.Add(encrypted[:envelope.Overhead], []byte("context"))
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, box, context []byte) {
		got, err := k.Decrypt(nil, box, context)
		switch {
		case err == nil && (!bytes.Equal(box, encrypted) || string(context) != "context"):
			t.Fatalf("%x is opened as %q", box, got)
		case err != nil && !errors.Is(err, envelope.ErrOpen):
			t.Fatal(err)
		}
	})
}

// FuzzVersion: a name is either that of an encrypted object or not, and writing the version again gives the same name.
func FuzzVersion(f *testing.F) {
	for _, name := range []string{"v1/p/c/1/pack-0.k1", "manifest", ".k1", "a/b.k9223372036854775807"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		v, ok := envelope.Version(name)
		if !ok {
			return
		}
		plain := name[:bytes.LastIndex([]byte(name), []byte(".k"))]
		if v < 1 || envelope.NewKey(fixed(1), v).Name(plain) != name {
			t.Fatalf("%q has version %d", name, v)
		}
	})
}

func BenchmarkEncrypt(b *testing.B) {
	k := envelope.NewKey(fixed(1), 1)
	plain := make([]byte, 32<<10)
	box := make([]byte, 0, len(plain)+envelope.Overhead)
	b.SetBytes(int64(len(plain)))
	for b.Loop() {
		box = k.Encrypt(box[:0], plain, nil)
	}
}
