//go:build linux

package account

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestShellOfRoot wants the shell of an unnamed user to be the one that passwd gives root.
func TestShellOfRoot(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("/etc/passwd")
	if err != nil {
		t.Fatal(err)
	}
	want := "/bin/sh"
	for line := range strings.Lines(string(b)) {
		if f := strings.Split(strings.TrimSpace(line), ":"); len(f) == 7 && f[0] == "root" {
			want = f[6]
		}
	}
	if got, err := Lookup(""); err != nil || got.Name != "root" || got.Home != "/root" || got.Shell != want || got.Cred != nil {
		t.Errorf("%+v, %v; want the shell %s", got, err, want)
	}
}

// TestRootWithoutPasswd: an image without accounts, such as one with a program alone, has root by its name.
func TestRootWithoutPasswd(t *testing.T) {
	t.Parallel()
	none := filepath.Join(t.TempDir(), "passwd")
	for _, user := range []string{"", "root"} {
		got, err := lookup(user, none)
		if err != nil || got.Name != "root" || got.Home != "/root" || got.Shell != "/bin/sh" || got.Cred != nil && (got.Cred.Uid != 0 || got.Cred.Gid != 0) {
			t.Errorf("%q: %+v, %v", user, got, err)
		}
	}
	if _, err := lookup("app", none); err == nil {
		t.Error("a user that does not exist was found")
	}
}
