package snapshotstore_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// store returns the store together with its keys.
func (x *rig) store() blob.Blobs { return envelope.With(x.blobs, &x.ring) }

// encrypt encrypts all later writes, with a new key of the project.
func (x *rig) encrypt() {
	k := core.NewDataKey()
	x.secret, x.version = &k, x.version+1
}

// key returns the key of an attempt; nil when writes are not encrypted.
func (x *rig) key(prefix string) *envelope.Key {
	if x.secret == nil {
		return nil
	}
	k := envelope.Derive(*x.secret, prefix)
	x.ring.Add(map[string]core.DataKey{prefix: k})
	return envelope.NewKey(k, x.version)
}

// both runs a test with an unencrypted store and with an encrypted one.
func both(t *testing.T, test func(t *testing.T, x *rig)) {
	t.Helper()
	t.Run("clear", func(t *testing.T) {
		t.Parallel()
		test(t, newRig(t))
	})
	t.Run("encrypted", func(t *testing.T) {
		t.Parallel()
		x := newRig(t)
		x.encrypt()
		test(t, x)
	})
}

// reveal returns the names of the files in a directory that contain a text, unchanged, in hex or in base64.
func reveal(t *testing.T, dir, text string) []string {
	t.Helper()
	var forms []string
	forms = append(forms, text, hex.EncodeToString([]byte(text)))
	for skip := range 3 { // the text may begin at each of three positions in a base64 group
		forms = append(forms, base64.RawStdEncoding.EncodeToString([]byte(text[skip:]))[:len(text)])
	}
	var found []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		for _, form := range forms {
			if bytes.Contains(b, []byte(form)) {
				found = append(found, path)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestNothingInClear: with encryption, no object contains a checkpoint's data or what its manifest says about it;
// without encryption, objects do.
func TestNothingInClear(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(21, 22))
	secret := make([]byte, page) // random, so that it does not compress
	for i := range secret {
		secret[i] = byte('!' + r.IntN(90))
	}
	for _, encrypted := range []bool{false, true} {
		x := newRig(t)
		if encrypted {
			x.encrypt()
		}
		m := newImage(1 << 20)
		m.pages[9] = secret
		w := x.seal(nil, nil, m, m.whole())
		x.check(w.Manifest, "memory", m)
		for what, text := range map[string]string{"memory": string(secret[100:160]), "the manifest": `"guest_image"`} {
			if found := reveal(t, x.dir, text); len(found) == 0 != encrypted {
				t.Errorf("encrypted: %v, %s is in %d objects", encrypted, what, len(found))
			}
		}
	}
}

// TestKeysOverTime: data that was written under earlier keys, or unencrypted before, can be read together with new
// data.
func TestKeysOverTime(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	r := rand.New(rand.NewPCG(23, 24))
	m := newImage(4 << 20)
	m.write(r, 300)
	type generation struct {
		ref manifest.Ref
		m   *image
	}
	w := x.seal(nil, nil, m, m.whole()) // a template of the operator, unencrypted
	chain := []generation{{w.Manifest, m.clone()}}
	for i := range 12 {
		if i%4 == 0 {
			x.encrypt()
		}
		before := m.clone()
		changed := m.write(r, 30)
		w = x.seal(w.Snapshot, before, m, changed)
		chain = append(chain, generation{w.Manifest, m.clone()})
	}
	versions := make(map[int64]bool)
	for _, key := range w.Needs {
		v, _ := envelope.Version(key)
		versions[v] = true
	}
	if len(versions) != 4 {
		t.Errorf("the last one needs objects of keys %v", versions)
	}
	for _, g := range chain {
		x.check(g.ref, "memory", g.m)
	}
	checker := snapshotstore.NewChecker(x.store(), snapshotstore.Whole)
	if faults, err := checker.Check(t.Context(), w.Manifest); err != nil || len(faults) > 0 {
		t.Errorf("%v, %v", faults, err)
	}
}

// TestWithoutKey: a reader without the key, or with another one, gets an error that says so, and reads nothing. It is
// not reported as damage.
func TestWithoutKey(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	x.encrypt()
	r := rand.New(rand.NewPCG(25, 26))
	m := newImage(4 << 20)
	m.write(r, 500)
	first := x.seal(nil, nil, m, m.whole())
	before := m.clone()
	second := x.seal(first.Snapshot, before, m, m.write(r, 3))
	prefix := envelope.Prefix(second.Manifest.Key)
	mine := envelope.Derive(*x.secret, prefix)
	for name, keys := range map[string]map[string]core.DataKey{
		"none":          nil,
		"another":       {prefix: core.NewDataKey()},
		"not the other": {prefix: mine},
	} {
		store := envelope.With(x.blobs, envelope.NewRing(keys))
		if _, err := snapshotstore.Open(t.Context(), store, second.Manifest); core.CodeOf(err) != core.CodeKeyUnavailable || core.CategoryOf(err) != core.FailedPrecondition {
			t.Errorf("%s: %v", name, err)
		}
		if faults, err := snapshotstore.NewChecker(store, snapshotstore.Whole).Check(t.Context(), second.Manifest); core.CodeOf(err) != core.CodeKeyUnavailable || len(faults) > 0 {
			t.Errorf("%s: check: %v, %v", name, faults, err)
		}
	}
	s, err := snapshotstore.Open(t.Context(), x.store(), second.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	// The maps can be read, and the key to some of the frames is missing.
	store := envelope.With(x.blobs, envelope.NewRing(map[string]core.DataKey{prefix: mine}))
	_, err = snapshotstore.Fetch(t.Context(), store, s.Image("memory").Runs(), snapshotstore.FetchOptions{}, func(int64, []byte) error { return nil })
	if core.CodeOf(err) != core.CodeKeyUnavailable {
		t.Errorf("frames: %v", err)
	}
	file, err := snapshotstore.NewExport(s, "dev")
	if err != nil {
		t.Fatal(err)
	}
	if err := file.Write(t.Context(), store, new(bytes.Buffer)); core.CodeOf(err) != core.CodeKeyUnavailable {
		t.Errorf("export: %v", err)
	}
}

// TestExportEncrypted: an exported file is the same whether the checkpoint is encrypted in the store or not, and can be
// imported in both forms.
func TestExportEncrypted(t *testing.T) {
	t.Parallel()
	clear, encrypted := newRig(t), newRig(t)
	encrypted.encrypt()
	w, images := clear.chain(rand.New(rand.NewPCG(1, 2)), 4<<20, 5)
	file := clear.export(w.Manifest)
	_, stored, err := encrypted.importFile(bytes.NewReader(file), "v1/a/b/1/")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range stored.Objects {
		if !strings.HasSuffix(o.Key, ".k1") {
			t.Errorf("%s is unencrypted", o.Key)
		}
	}
	for name, m := range images {
		encrypted.check(stored.Manifest, name, m)
	}
	checker := snapshotstore.NewChecker(encrypted.store(), snapshotstore.Whole)
	if faults, err := checker.Check(t.Context(), stored.Manifest); err != nil || len(faults) > 0 || checker.Frames == 0 {
		t.Errorf("%v, %v", faults, err)
	}
	again := encrypted.export(stored.Manifest)
	im, back, err := clear.importFile(bytes.NewReader(again), "v1/a/c/1/")
	if err != nil {
		t.Fatal(err)
	}
	for name, m := range images {
		clear.check(back.Manifest, name, m)
	}
	first, err := snapshotstore.ReadImport(bytes.NewReader(file))
	if err != nil || im.Content("memory") != first.Content("memory") {
		t.Errorf("its frames are others: %v", err)
	}
	if len(again) != len(file) {
		t.Errorf("the file has %d bytes instead of %d", len(again), len(file))
	}
}
