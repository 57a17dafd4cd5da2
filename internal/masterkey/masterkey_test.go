package masterkey_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/masterkey"
)

func TestEncrypt(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "key")
	if _, found, err := masterkey.Open(path); found || err != nil {
		t.Fatal(found, err)
	}
	made, err := masterkey.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	key, found, err := masterkey.Open(path)
	if !found || err != nil {
		t.Fatal(found, err)
	}
	secret := []byte("a secret that is not to be seen")
	encrypted := made.Encrypt("thing", secret)
	if bytes.Contains(encrypted, secret[:8]) || bytes.Equal(encrypted, made.Encrypt("thing", secret)) {
		t.Error("it is not encrypted")
	}
	if got, err := key.Decrypt("thing", encrypted); err != nil || !bytes.Equal(got, secret) {
		t.Errorf("%q, %v", got, err)
	}
	other, err := masterkey.New(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Decrypt("thing", encrypted); core.CodeOf(err) != core.CodeIncompatibleHost {
		t.Errorf("with another key: %v", err)
	}
	for name, b := range map[string][]byte{"other": encrypted, "thing": encrypted[:4]} {
		if _, err := key.Decrypt(name, b); err == nil {
			t.Errorf("%s of %d bytes is opened", name, len(b))
		}
	}
}

func TestKeyFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "key")
	if _, err := masterkey.Create(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := masterkey.Open(path); core.CodeOf(err) != core.CodeIncompatibleHost {
		t.Errorf("a file that others may read: %v", err)
	}
	if err := os.WriteFile(path, []byte("abc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := masterkey.Open(path); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("a file that holds no key: %v", err)
	}
}
