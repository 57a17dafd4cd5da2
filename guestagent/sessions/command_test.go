//go:build linux

package sessions

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// TestDefaultsOfTheImage: a session that names no user and no directory has the image's. A directory that is none counts as
// none, and what a session says goes before.
func TestDefaultsOfTheImage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	user, workdir := write("user", "app:1000\nanother\n"), write("workdir", dir+"\n")
	none, file, relative := filepath.Join(dir, "none"), write("file", user+"\n"), write("relative", "srv\n")
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	long := write("long", strings.Repeat("x", 1<<20)) // no line is that long, and none is read
	for _, c := range []struct {
		spec          guestapi.SessionSpec
		user, workdir string
		want          guestapi.SessionSpec
	}{
		{guestapi.SessionSpec{}, user, workdir, guestapi.SessionSpec{User: "app:1000", Cwd: dir}},
		{guestapi.SessionSpec{User: "root", Cwd: "/tmp"}, user, workdir, guestapi.SessionSpec{User: "root", Cwd: "/tmp"}},
		{guestapi.SessionSpec{Cwd: "sub"}, none, workdir, guestapi.SessionSpec{Cwd: filepath.Join(dir, "sub")}},
		{guestapi.SessionSpec{Cwd: "~/sub"}, none, workdir, guestapi.SessionSpec{Cwd: "~/sub"}},
		{guestapi.SessionSpec{}, none, none, guestapi.SessionSpec{}},
		{guestapi.SessionSpec{}, fifo, fifo, guestapi.SessionSpec{}},
		{guestapi.SessionSpec{}, long, file, guestapi.SessionSpec{}},
		{guestapi.SessionSpec{}, none, relative, guestapi.SessionSpec{}},
	} {
		if got := withDefaults(c.spec, c.user, c.workdir); got.User != c.want.User || got.Cwd != c.want.Cwd {
			t.Errorf("%+v with %s and %s: %+v, want %+v", c.spec, c.user, c.workdir, got, c.want)
		}
	}
}
