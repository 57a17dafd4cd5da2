//go:build linux

package account

import (
	"os"
	"strings"
	"testing"
)

// TestShellOfRoot wants the shell of an unnamed user to be the one that passwd gives root.
func TestShellOfRoot(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("/etc/passwd")
	if err != nil {
		t.Skip("this system has no passwd")
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
