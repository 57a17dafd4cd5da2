//go:build linux

package guestagent

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// nobody is a user of the machine without any rights.
const nobody = "65534:65534"

// userDir makes a directory that nobody owns, below one that everybody may enter.
func userDir(t *testing.T) string {
	t.Helper()
	require.Root(t)
	dir, err := os.MkdirTemp("/tmp", "coppice-files-") //nolint:usetesting // nobody may not enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chown(dir, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (a *testAgent) put(path, query, body string) (guestapi.FileInfo, error) {
	a.T.Helper()
	var info guestapi.FileInfo
	b, _, err := a.Do(http.MethodPut, guestapi.PathFileContent+"?path="+url.QueryEscape(path)+query, strings.NewReader(body)) //nolint:bodyclose // Do has read and closed it
	if err == nil {
		err = json.Unmarshal(b, &info)
	}
	return info, err
}

func content(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

func TestWriteInPlace(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	path := filepath.Join(t.TempDir(), "new", "f")
	if _, err := a.put(path, own()+"&in_place=1&mkdirs=1&mode=0600", "hello"); err != nil {
		t.Fatal(err)
	}
	open, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Close() }()
	for _, step := range []struct{ query, body, want string }{
		{"&offset=1", "ELL", "hELLo"},
		{"&append=1", " you", "hELLo you"},
		{"&offset=11", "x", "hELLo you\x00\x00x"},
		{"", "short", "short"},
	} {
		if _, err := a.put(path, "&in_place=1"+step.query, step.body); err != nil || content(t, path) != step.want {
			t.Errorf("%s: %q (%v), want %q", step.query, content(t, path), err, step.want)
		}
	}
	var b bytes.Buffer
	if _, err := b.ReadFrom(open); err != nil || b.String() != "short" {
		t.Errorf("who had the file open reads %q (%v)", b.String(), err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v (%v)", fi.Mode(), err)
	}
	if _, err := a.put(path, "&in_place=1&append=1&offset=3", ""); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("offset and append: %v", err)
	}
	if _, err := a.put(filepath.Dir(path), "&in_place=1", ""); core.CodeOf(err) != guestapi.CodeFileConflict {
		t.Errorf("a directory: %v", err)
	}
	if _, err := a.put(os.DevNull, "&in_place=1", "x"); core.CodeOf(err) != guestapi.CodeFileConflict {
		t.Errorf("a device: %v", err)
	}
}

// TestWorkAsUser: what a request does as a user has that user's rights and nothing more, whatever the path goes through.
func TestWorkAsUser(t *testing.T) {
	t.Parallel()
	dir := userDir(t)
	a := newTestAgent(t)
	as := "&user=" + nobody
	secret := filepath.Join(t.TempDir(), "secret") // t.TempDir is root's alone
	if err := os.WriteFile(secret, []byte("root's"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(secret, link); err != nil {
		t.Fatal(err)
	}
	for _, query := range []string{"", "&in_place=1"} {
		path := filepath.Join(dir, "mine"+query)
		info, err := a.put(path, as+query, "x")
		if err != nil || info.UID != 65534 || info.GID != 65534 || info.Owner == "" {
			t.Errorf("%q: %+v (%v)", query, info, err)
		}
		if _, err := a.put(filepath.Join("/etc", "coppice-test"), as+query, "x"); core.CodeOf(err) != guestapi.CodeFileDenied {
			t.Errorf("%q: a file of root's directory was written: %v", query, err)
		}
		if _, err := a.put(path, as+query+"&uid=0", "x"); core.CodeOf(err) != guestapi.CodeFileDenied {
			t.Errorf("%q: a file was given away: %v", query, err)
		}
	}
	if _, err := a.put(link, as+"&in_place=1", "x"); core.CodeOf(err) != guestapi.CodeFileDenied {
		t.Errorf("written through a link: %v", err)
	}
	// environ of root's processes is readable only for who may trace them.
	for name, path := range map[string]string{"link": link, "file": secret, "environ": "/proc/1/environ", "memory": "/proc/" + itoa(os.Getpid()) + "/mem"} {
		if b, _, err := a.file(http.MethodGet, path, as, nil); core.CodeOf(err) != guestapi.CodeFileDenied { //nolint:bodyclose // file has read and closed it
			t.Errorf("%s was read: %q %v", name, b, err)
		}
	}
	for path, in := range map[string]any{
		guestapi.PathMakeDir: guestapi.MakeDir{Path: "/etc/coppice-test/x", Parents: true, User: nobody},
		guestapi.PathRename:  guestapi.Rename{From: "/etc/hostname", To: filepath.Join(dir, "h"), User: nobody},
		guestapi.PathXAttrs:  guestapi.SetXAttrs{Path: "/etc/hostname", Set: map[string]string{"user.x": "y"}, User: nobody},
	} {
		if _, err := guesttest.Ask[guestapi.FileInfo](a, http.MethodPost, path, in); core.CodeOf(err) != guestapi.CodeFileDenied {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, _, err := a.file(http.MethodDelete, secret, as, nil); core.CodeOf(err) != guestapi.CodeFileDenied { //nolint:bodyclose // file has read and closed it
		t.Errorf("removed: %v", err)
	}
	if content(t, secret) != "root's" {
		t.Error("root's file has changed")
	}
	made := guesttest.Must[guestapi.MadeDir](t)(guesttest.Ask[guestapi.MadeDir](a, http.MethodPost, guestapi.PathMakeDir, guestapi.MakeDir{Path: filepath.Join(dir, "a/b"), Parents: true, User: nobody}))
	if !made.Created || made.UID != 65534 || made.Type != "dir" {
		t.Errorf("%+v", made)
	}
	// The agent itself has kept its rights.
	if b, _, err := a.file(http.MethodGet, secret, "", nil); err != nil || string(b) != "root's" { //nolint:bodyclose // file has read and closed it
		t.Errorf("%q (%v)", b, err)
	}
	for _, user := range []string{"4294967295", "65534:4294967295", "no-such-user", "65534:no-such-group"} {
		if _, err := a.put(filepath.Join(dir, "x"), "&user="+user, "x"); err == nil {
			t.Errorf("user %s did something", user)
		}
	}
}

func TestHomeOfAUser(t *testing.T) {
	t.Parallel()
	require.Root(t)
	a := newTestAgent(t)
	stat := func(path, user string) (guestapi.FileInfo, error) {
		return guesttest.Ask[guestapi.FileInfo](a, http.MethodGet, guestapi.PathFiles+"?stat=1&path="+url.QueryEscape(path)+"&user="+user, nil)
	}
	if info, err := stat("~", "root"); err != nil || info.Path != "/root" {
		t.Errorf("%+v (%v)", info, err)
	}
	if info, err := stat("~/../etc", "root"); err != nil || info.Path != "/etc" || info.Owner != "root" || info.Group != "root" {
		t.Errorf("%+v (%v)", info, err)
	}
	if _, err := stat("~x", "root"); core.CodeOf(err) != core.CodeFileNotFound {
		t.Errorf("another's home: %v", err)
	}
	if _, err := stat("~", ""); core.CodeOf(err) != core.CodeFileNotFound {
		t.Errorf("a file named ~ is a file for requests without a user: %v", err)
	}
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"pwd"}, Cwd: "~/", User: "root"})
	if a.AwaitEnd(s.ID); s.Cwd != "/root" {
		t.Errorf("cwd %s", s.Cwd)
	}
}

func TestMakeAndMoveDirectories(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	dir := t.TempDir()
	make := func(req guestapi.MakeDir) (guestapi.MadeDir, error) {
		return guesttest.Ask[guestapi.MadeDir](a, http.MethodPost, guestapi.PathMakeDir, req)
	}
	deep := filepath.Join(dir, "a", "b")
	if _, err := make(guestapi.MakeDir{Path: deep}); core.CodeOf(err) != core.CodeFileNotFound {
		t.Errorf("without its parents: %v", err)
	}
	if made, err := make(guestapi.MakeDir{Path: deep, Parents: true, Mode: "0700"}); err != nil || !made.Created || made.Mode != "0700" {
		t.Errorf("%+v (%v)", made, err)
	}
	if made, err := make(guestapi.MakeDir{Path: deep, Parents: true}); err != nil || made.Created || made.Mode != "0700" {
		t.Errorf("again: %+v (%v)", made, err)
	}
	if _, err := make(guestapi.MakeDir{Path: deep}); core.CodeOf(err) != guestapi.CodeFileConflict {
		t.Errorf("it exists: %v", err)
	}
	move := func(req guestapi.Rename) (guestapi.FileInfo, error) {
		return guesttest.Ask[guestapi.FileInfo](a, http.MethodPost, guestapi.PathRename, req)
	}
	to := filepath.Join(dir, "c", "d")
	if _, err := move(guestapi.Rename{From: deep, To: to}); core.CodeOf(err) != core.CodeFileNotFound {
		t.Errorf("into nothing: %v", err)
	}
	if info, err := move(guestapi.Rename{From: deep, To: to, Mkdirs: true}); err != nil || info.Path != to || info.Type != "dir" {
		t.Errorf("%+v (%v)", info, err)
	}
	if _, err := move(guestapi.Rename{From: filepath.Join(dir, "a"), To: to, NoReplace: true}); core.CodeOf(err) != guestapi.CodeFileConflict {
		t.Errorf("over what exists: %v", err)
	}
	if _, err := move(guestapi.Rename{From: "/proc/version", To: to + "x"}); core.CodeOf(err) != guestapi.CodeFileConflict {
		t.Errorf("to another file system: %v", err)
	}
}

func TestListTree(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	dir := t.TempDir()
	for _, name := range []string{"a/b/c/d", "e"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(dir, filepath.Join(dir, "a", "loop")); err != nil {
		t.Fatal(err)
	}
	for depth, want := range map[string]string{"": "a e", "1": "a e", "2": "a a/b a/loop e", "64": "a a/b a/b/c a/b/c/d a/loop e"} {
		l := guesttest.Must[guestapi.FileList](t)(guesttest.Ask[guestapi.FileList](a, http.MethodGet, guestapi.PathFiles+"?list=1&path="+dir+"&depth="+depth, nil))
		var got []string
		for _, e := range l.Entries {
			got = append(got, strings.TrimPrefix(e.Path, dir+"/"))
		}
		if strings.Join(got, " ") != want || l.Truncated {
			t.Errorf("depth %s: %v", depth, got)
		}
	}
	if _, err := guesttest.Ask[guestapi.FileList](a, http.MethodGet, guestapi.PathFiles+"?list=1&depth=65&path="+dir, nil); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("too deep: %v", err)
	}
}

func TestExtendedAttributes(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	change := func(req guestapi.SetXAttrs) (guestapi.FileInfo, error) {
		req.Path = path
		return guesttest.Ask[guestapi.FileInfo](a, http.MethodPost, guestapi.PathXAttrs, req)
	}
	info, err := change(guestapi.SetXAttrs{Set: map[string]string{"user.a": "1", "user.b": "zwei ü"}})
	require.That(t, "user_xattr", core.CodeOf(err) != core.CodeUnsupported, "set TMPDIR to a directory of a file system with extended attributes of users")
	if err != nil || info.XAttrs["user.a"] != "1" || info.XAttrs["user.b"] != "zwei ü" {
		t.Fatalf("%+v (%v)", info, err)
	}
	if info, err = change(guestapi.SetXAttrs{Remove: []string{"user.a", "user.none"}}); err != nil || len(info.XAttrs) != 1 {
		t.Errorf("%+v (%v)", info, err)
	}
	stat := guesttest.Must[guestapi.FileInfo](t)(guesttest.Ask[guestapi.FileInfo](a, http.MethodGet, guestapi.PathFiles+"?stat=1&xattrs=1&path="+path, nil))
	if stat.XAttrs["user.b"] != "zwei ü" {
		t.Errorf("%+v", stat)
	}
	many := map[string]string{}
	for i := range 65 {
		many["user."+itoa(i)] = ""
	}
	for name, req := range map[string]guestapi.SetXAttrs{
		"not of users": {Set: map[string]string{"trusted.a": "1"}}, "no name": {Set: map[string]string{"user.": "1"}},
		"long": {Set: map[string]string{"user.a": strings.Repeat("x", 4097)}}, "long name": {Remove: []string{"user." + strings.Repeat("x", 251)}}, "many": {Set: many},
	} {
		if _, err := change(req); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestLongPaths(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	if _, err := a.put("/"+strings.Repeat("x", 4096), "", ""); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("a long path: %v", err)
	}
	if _, err := guesttest.Ask[guestapi.MadeDir](a, http.MethodPost, guestapi.PathMakeDir, guestapi.MakeDir{Path: strings.Repeat("x", 300<<10)}); core.CodeOf(err) != core.CodeBodyTooLarge {
		t.Errorf("a long body: %v", err)
	}
}

// TestUnpackedEntriesAreSwapped: a user who puts something else in the place of an entry, while the tar is unpacked, gets
// nothing of root's.
func TestUnpackedEntriesAreSwapped(t *testing.T) {
	t.Parallel()
	dir := userDir(t)
	a := newTestAgent(t)
	victim, secret := filepath.Join(dir, "victim"), filepath.Join(dir, "secret")
	do(t, os.Mkdir(victim, 0o700), os.WriteFile(secret, []byte("root's"), 0o600))
	in := func(name string) string { return filepath.Join(dir, name) }
	for name, swap := range map[string]func() error{
		"a link for the directory":           func() error { return errors.Join(os.Rename(in("d"), in("away")), os.Symlink("victim", in("d"))) },
		"another directory":                  func() error { return errors.Join(os.Rename(in("d"), in("away")), os.Rename(victim, in("d"))) },
		"a name of root's file for the file": func() error { return errors.Join(os.Remove(in("f")), os.Link(secret, in("f"))) },
	} {
		body, into := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			_, _, err := a.file(http.MethodPut, dir, "&untar=1", body) //nolint:bodyclose // file has read and closed it
			ended <- errors.Join(err, body.Close())
		}()
		tw := tar.NewWriter(into)
		do(t, tw.WriteHeader(&tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o777, Uid: 65534, Gid: 65534}))
		do(t, tw.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o777, Uid: 65534, Gid: 65534, Size: 1, ModTime: time.Unix(1e9, 0)}))
		guesttest.Eventually(t, func() bool { _, err := os.Lstat(in("f")); return err == nil })
		do(t, swap())
		_, err := tw.Write([]byte("x"))
		do(t, err, tw.Close(), into.Close())
		if err := <-ended; (err == nil) != strings.HasSuffix(name, "for the file") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(victim); err != nil { // it is in the directory's place
			do(t, os.Rename(in("d"), victim))
		}
		for _, path := range []string{victim, secret} {
			fi, err := os.Stat(path)
			do(t, err)
			if st, ok := fi.Sys().(*syscall.Stat_t); !ok || st.Uid != 0 || fi.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s: %s is %v of user %d", name, path, fi.Mode(), st.Uid)
			}
		}
		if fi, err := os.Stat(in("f")); strings.HasPrefix(name, "another") && (err != nil || fi.Mode().Perm() != 0o777 || fi.ModTime().Unix() != 1e9) {
			t.Errorf("%s: the file is %v (%v)", name, fi, err)
		}
		do(t, os.RemoveAll(in("d")), os.RemoveAll(in("away")), os.Remove(in("f")))
	}
}

// TestModesThatAUserKeeps: a put as a user keeps the mode of the user's file, without its special bits, and not of another's.
func TestModesThatAUserKeeps(t *testing.T) {
	t.Parallel()
	dir := userDir(t)
	a := newTestAgent(t)
	for owner, want := range map[int]string{65534: "0751", 1: "0644"} {
		path := filepath.Join(dir, itoa(owner))
		do(t, os.WriteFile(path, nil, 0o600), os.Chown(path, owner, owner), os.Chmod(path, 0o751|os.ModeSetuid|os.ModeSetgid|os.ModeSticky))
		if info, err := a.put(path, "&user="+nobody, "x"); err != nil || info.Mode != want || info.UID != 65534 {
			t.Errorf("of user %d: %+v (%v)", owner, info, err)
		}
	}
}
