package masterkey_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/masterkey"
)

func ringOf(t *testing.T, text string) (*masterkey.Ring, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "master.key")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return masterkey.OpenRing(path)
}

// TestRing: the first key of a file wraps, all unwrap, and a wrapped key is of no use under another name.
func TestRing(t *testing.T) {
	t.Parallel()
	a, b := strings.Repeat("0a", 32), strings.Repeat("0b", 32)
	first, err := ringOf(t, a+"\n")
	if err != nil {
		t.Fatal(err)
	}
	both, err := ringOf(t, "\n"+b+"\n"+a+"\n")
	if err != nil {
		t.Fatal(err)
	}
	second, err := ringOf(t, b)
	if err != nil {
		t.Fatal(err)
	}
	key := core.NewDataKey()
	wrapped, err := first.Wrap(t.Context(), "key 1", key)
	if err != nil || bytes.Contains(wrapped, key[:8]) || first.Current() == both.Current() || both.Current() != second.Current() || strings.Contains(a, first.Current()) {
		t.Fatalf("%q %q, %v", first.Current(), both.Current(), err)
	}
	if got, err := both.Unwrap(t.Context(), first.Current(), "key 1", wrapped); err != nil || got != key {
		t.Errorf("%v", err)
	}
	if _, err := second.Unwrap(t.Context(), first.Current(), "key 1", wrapped); core.CodeOf(err) != core.CodeKeyUnavailable || !strings.Contains(err.Error(), first.Current()) {
		t.Errorf("without the master key: %v", err)
	}
	if _, err := both.Unwrap(t.Context(), first.Current(), "key 2", wrapped); core.CodeOf(err) != core.CodeKeyUnavailable {
		t.Errorf("under another name: %v", err)
	}
	for i := range wrapped {
		changed := bytes.Clone(wrapped)
		changed[i] ^= 1
		if _, err := first.Unwrap(t.Context(), first.Current(), "key 1", changed); core.CodeOf(err) != core.CodeKeyUnavailable {
			t.Errorf("byte %d: %v", i, err)
		}
	}
}

func TestRingFile(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]core.Code{"": core.CodeInvalidField, "\n": core.CodeInvalidField, "abc\n": core.CodeInvalidField, strings.Repeat("0a", 32) + "\nabc": core.CodeInvalidField} {
		if _, err := ringOf(t, text); core.CodeOf(err) != want || strings.Contains(err.Error(), "abc") {
			t.Errorf("%q: %v", text, err)
		}
	}
	path := filepath.Join(t.TempDir(), "master.key")
	if _, err := masterkey.OpenRing(path); core.CodeOf(err) != core.CodeKeyUnavailable || !strings.Contains(err.Error(), "openssl rand") {
		t.Errorf("no file: %v", err)
	}
	if err := os.WriteFile(path, []byte(strings.Repeat("0a", 32)), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := masterkey.OpenRing(path); core.CodeOf(err) != core.CodeIncompatibleHost {
		t.Errorf("a file that others may read: %v", err)
	}
}
