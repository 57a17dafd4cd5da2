//go:build linux

package reseal

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func subject(t *testing.T, n pkix.Name) []byte {
	t.Helper()
	b, err := asn1.Marshal(n.ToRDNSequence())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestSubjectHash compares with the output of `openssl x509 -subject_hash` for certificates with these subjects.
func TestSubjectHash(t *testing.T) {
	t.Parallel()
	for want, n := range map[uint32]pkix.Name{
		0x812ea732: {CommonName: "Coppice egress of prj_00000000000000000000000000"},
		0x67d6f99c: {CommonName: "  Two   Words ", Organization: []string{"Ünïcode Ltd"}, Country: []string{"DE"}},
	} {
		if got, err := subjectHash(subject(t, n)); got != want || err != nil {
			t.Errorf("%v: %08x %v, want %08x", n, got, err, want)
		}
	}
	for _, bad := range [][]byte{nil, {1, 2, 3}, append(subject(t, pkix.Name{CommonName: "a"}), 0)} {
		if _, err := subjectHash(bad); err == nil {
			t.Errorf("% x was read", bad)
		}
	}
}

// TestTrustInDir: the CA is found by its hash beside another one with the same hash, and it replaces the CA of another
// project.
func TestTrustInDir(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	one := &x509.Certificate{RawSubject: subject(t, pkix.Name{CommonName: "one"})}
	two := &x509.Certificate{RawSubject: subject(t, pkix.Name{CommonName: "two"})}
	trust := func(ca string, cert *x509.Certificate) string {
		t.Helper()
		at, err := trustInDir(dir, ca, cert)
		if err != nil {
			t.Fatal(err)
		}
		link := at.name()
		if b, err := os.ReadFile(filepath.Join(dir, link)); err != nil || string(b) != ca {
			t.Errorf("%s: %q %v", link, b, err)
		}
		return link
	}
	first := trust("1", one)
	if again := trust("1", one); again != first {
		t.Errorf("once more: %s and %s", first, again)
	}
	if err := os.WriteFile(filepath.Join(dir, other(t, two)), []byte("somebody else's"), 0o600); err != nil {
		t.Fatal(err)
	}
	if link := trust("2", two); filepath.Ext(link) != ".1" {
		t.Errorf("beside another of that hash: %s", link)
	}
	if _, err := os.Lstat(filepath.Join(dir, first)); err == nil {
		t.Error("the CA of before is still found")
	}
	if at, err := trustInDir(filepath.Join(dir, "none"), "1", one); at.name() != "" || err != nil {
		t.Errorf("an image without that directory: %q %v", at.name(), err)
	}
}

// other returns the first name for a certificate's hash.
func other(t *testing.T, cert *x509.Certificate) string {
	t.Helper()
	dir := t.TempDir()
	at, err := trustInDir(dir, "x", cert)
	if err != nil {
		t.Fatal(err)
	}
	return at.name()
}

// TestTrustFiles: changes of the files that decide whether a CA is trusted are seen.
func TestTrustFiles(t *testing.T) {
	t.Parallel()
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	remove := func(path string) {
		t.Helper()
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
	for name, change := range map[string]func(root string){
		"nothing":                  func(string) {},
		"the bundle is written":    func(root string) { write(root+"/bundle", "another") },
		"the bundle is replaced":   func(root string) { write(root+"/new", "bundle"); _ = os.Rename(root+"/new", root+"/bundle") },
		"the bundle is removed":    func(root string) { remove(root + "/bundle") },
		"the bundle leads astray":  func(root string) { remove(root + "/link"); _ = os.Symlink("certs", root+"/link") },
		"another bundle appears":   func(root string) { write(root+"/later", "") },
		"the CA is written":        func(root string) { write(root+"/certs/"+trustName, "another") },
		"the hash is removed":      func(root string) { remove(root + "/certs/1.1") },
		"the hash leads elsewhere": func(root string) { remove(root + "/certs/1.1"); _ = os.Symlink("x", root+"/certs/1.1") },
		"the one before is gone":   func(root string) { remove(root + "/certs/1.0") },
		"the directory is removed": func(root string) { remove(root + "/certs") },
	} {
		root := t.TempDir()
		if err := os.Mkdir(root+"/certs", 0o755); err != nil {
			t.Fatal(err)
		}
		write(root+"/bundle", "bundle")
		write(root+"/certs/"+trustName, "CA")
		write(root+"/certs/1.0", "of the image")
		if err := errors.Join(os.Symlink("bundle", root+"/link"), os.Symlink(trustName, root+"/certs/1.1")); err != nil {
			t.Fatal(err)
		}
		state := func() []fileState {
			return trustFiles([]string{root + "/bundle", root + "/link", root + "/later"}, root+"/certs", hashed{"1", 1})
		}
		before := state()
		change(root)
		if equal := slices.Equal(before, state()); equal != (name == "nothing") {
			t.Errorf("%s: seen as unchanged: %t", name, equal)
		}
	}
	root := t.TempDir()
	before := trustFiles(nil, root+"/certs", hashed{})
	if err := os.Mkdir(root+"/certs", 0o755); err != nil {
		t.Fatal(err)
	}
	if slices.Equal(before, trustFiles(nil, root+"/certs", hashed{})) {
		t.Error("a directory that appears is not seen")
	}
}

// TestTrustHolds: only the CA that was installed last holds, and not one for which too many files would be remembered.
func TestTrustHolds(t *testing.T) {
	t.Parallel()
	last := remember("last", hashed{"00000000", maxBefore}, nil)
	if !last.holds("last") || last.holds("another") {
		t.Errorf("the last CA holds: %t, another one: %t", last.holds("last"), last.holds("another"))
	}
	if far := remember("far", hashed{"00000000", maxBefore + 1}, nil); far != nil || far.holds("far") {
		t.Error("too many files are remembered")
	}
}
