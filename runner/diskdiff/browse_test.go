package diskdiff

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestLook: a path leads where it leads in the guest, through overlay and image, and never out of them.
func TestLook(t *testing.T) {
	t.Parallel()
	lower := image(t, base)
	large := strings.Repeat("0123456789", 100_000)
	overlay := disk(t, map[string]string{
		"etc/passwd": "changed", "etc/new": "-> ../usr/bin/tool", "root/abs": "-> /etc/passwd", "root/out": "-> ../../../../etc/passwd", "root/dir": "-> /usr/lib",
		"root/loop": "-> loop", "root/nowhere": "-> /absent/x", "data/large": large, "opt/w/": "",
	}, "cd etc", "mknod hosts c 0 0", "cd ../opt", "mknod x c 0 0", "ea_set w trusted.overlay.redirect x")
	look := func(path string, follow bool, list, length int, offset int64) (Found, error) {
		return Look(t.Context(), Query{Overlay: overlay, Lower: lower, Path: []byte(path), Follow: follow, List: list, Offset: offset, Length: length})
	}
	for path, want := range map[string]string{
		"/etc/passwd": "changed", "/etc//./passwd": "changed", "/usr/bin/other": "other", "/etc/new": "tool", "/root/abs": "changed", "/root/out": "changed",
		"/root/dir/a/one": "1", "/root/dir/../bin/tool": "tool", "/opt/w/y/z": "z", "/../../etc/passwd": "changed", "/data/large": large,
	} {
		got, err := look(path, true, 0, 1<<21, 0)
		if err != nil || string(got.Data) != want || got.File.Type != "file" || got.File.Size != int64(len(want)) {
			t.Errorf("%s: %d bytes, %+v, %v", path, len(got.Data), got.File, err)
		}
	}
	for path, want := range map[string]error{
		"/etc/hosts": ErrNoFile, "/etc/link": ErrNoFile, "/absent": ErrNoFile, "/etc/passwd/x": ErrNotDir, "/root/loop": ErrLinks, "/root/nowhere": ErrNoFile, "/usr": ErrNotFile,
		"/opt/x": ErrNoFile, "relative": errBadQuery, "": errBadQuery, "/a\x00b": errBadQuery, "/" + strings.Repeat("a/", 2048): errBadQuery,
	} {
		if got, err := look(path, true, 0, 10, 0); !errors.Is(err, want) {
			t.Errorf("%q: %+v, %v, want %v", path, got, err, want)
		}
	}
	for at, want := range map[int64]string{999_995: "56789", 1_000_000: "", 1 << 40: "", 5: "5678901234"} {
		if got, err := look("/data/large", true, 0, 10, at); err != nil || string(got.Data) != want {
			t.Errorf("from %d: %q, %v", at, got.Data, err)
		}
	}
	if got, err := look("/usr/bin/other", true, 0, 10, 2); err != nil || string(got.Data) != "her" { // of the image
		t.Errorf("%q, %v", got.Data, err)
	}
	for path, want := range map[string]string{
		"/etc": "symlink link 5 hosts, symlink new 15 ../usr/bin/tool, file passwd 7", "/root/dir": "dir a 0, file b 1", "/opt": "dir w 0", "/var": "",
		"/": "dir data 0, dir etc 0, dir opt 0, dir root 0, dir usr 0, dir var 0",
	} {
		got, err := look(path, false, 100, 0, 0)
		var lines []string
		for _, f := range got.Entries {
			lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s %s %d %s", f.Type, f.Name, f.Size, f.Target)))
		}
		if diff := cmp.Diff(want, strings.Join(lines, ", ")); diff != "" || err != nil || got.Truncated || got.Unreadable > 0 {
			t.Errorf("%s: %v %+v: %s", path, err, got, diff)
		}
	}
	if got, err := look("/etc", false, 2, 0, 0); err != nil || len(got.Entries) != 2 || !got.Truncated {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := look("/etc/passwd", false, 2, 0, 0); !errors.Is(err, ErrNotDir) {
		t.Errorf("a list of a file: %v", err)
	}
	if got, err := look("/root/abs", false, 0, 0, 0); err != nil || got.File.Type != "symlink" || string(got.File.Target) != "/etc/passwd" || string(got.File.Name) != "abs" {
		t.Errorf("a link: %+v, %v", got, err)
	}
}

// TestLookAtDamage: what a guest has damaged is said to be damaged, and everything else can still be read.
func TestLookAtDamage(t *testing.T) {
	t.Parallel()
	lower := image(t, base)
	overlay := disk(t, map[string]string{"d/bad": "b", "d/good": "g", "etc/x": "x"}, "cd d", "sif bad flags 0", "sif bad size 4096", "cd ..", "sif etc flags 0")
	look := func(path string, list, length int) (Found, error) {
		return Look(t.Context(), Query{Overlay: overlay, Lower: lower, Path: []byte(path), Follow: true, List: list, Length: length})
	}
	if got, err := look("/d/good", 0, 10); err != nil || string(got.Data) != "g" {
		t.Errorf("%+v, %v", got, err)
	}
	for _, path := range []string{"/d/bad", "/etc/passwd"} {
		if got, err := look(path, 0, 10); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %+v, %v", path, got, err)
		}
	}
	if got, err := look("/etc", 10, 0); !errors.Is(err, ErrDamaged) {
		t.Errorf("%+v, %v", got, err)
	}
}
