//go:build linux

package guestagent

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/files"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
)

func itoa(n int) string { return strconv.Itoa(n) }

func (a *testAgent) file(method, path, query string, body io.Reader) ([]byte, *http.Response, error) {
	a.T.Helper()
	return a.Do(method, guestapi.PathFiles+"?path="+url.QueryEscape(path)+query, body)
}

// own makes files belong to the user who runs the test.
func own() string { return "&uid=" + itoa(os.Getuid()) + "&gid=" + itoa(os.Getgid()) }

func TestFileRoundTrip(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "new", "ünï 𝄞\n")
	data := bytes.Repeat([]byte{0, 1, 2, 0xff}, 100_000)
	if _, _, err := a.file(http.MethodPut, path, own()+"&mkdirs=1&mode=4640", bytes.NewReader(data)); err != nil { //nolint:bodyclose // file has read and closed it
		t.Fatal(err)
	}
	got, res, err := a.file(http.MethodGet, path, "", nil) //nolint:bodyclose // file has read and closed it
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("got %d bytes (%v)", len(got), err)
	}
	var info guestapi.FileInfo
	header := res.Header.Get(guestapi.HeaderFileInfo)
	if err := json.Unmarshal([]byte(header), &info); err != nil || info.Path != path || info.Size != int64(len(data)) || info.Mode != "4640" {
		t.Errorf("header %s: %+v %v", header, info, err)
	}
	for i := range len(header) {
		if header[i] < 0x20 || header[i] > 0x7e {
			t.Errorf("the header has the byte %#x", header[i])
		}
	}
	if stat := guesttest.Must[guestapi.FileInfo](t)(guesttest.Ask[guestapi.FileInfo](a, http.MethodGet, guestapi.PathFiles+"?stat=1&path="+url.QueryEscape(path), nil)); stat.Type != "file" || stat.Size != info.Size {
		t.Errorf("stat %+v", stat)
	}
	if _, _, err := a.file(http.MethodDelete, path, "", nil); err != nil { //nolint:bodyclose // file has read and closed it
		t.Fatal(err)
	}
	if _, _, err := a.file(http.MethodDelete, path, "", nil); core.CodeOf(err) != core.CodeFileNotFound { //nolint:bodyclose // file has read and closed it
		t.Errorf("a second removal: %v", err)
	}
}

// TestBrokenUploadLeavesTheFileAlone: a body that ends early changes nothing and leaves nothing behind.
func TestBrokenUploadLeavesTheFileAlone(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, a.URL+guestapi.PathFiles+"?path="+path+own(), io.MultiReader(strings.NewReader("new"), errReader{}))
	if err != nil {
		t.Fatal(err)
	}
	if res, err := http.DefaultTransport.RoundTrip(req); err == nil {
		_ = res.Body.Close()
		t.Error("half a body was taken")
	}
	guesttest.Eventually(t, func() bool {
		list, err := os.ReadDir(dir)
		return err == nil && len(list) == 1
	})
	if b, err := os.ReadFile(path); err != nil || string(b) != "old" {
		t.Errorf("the file is %q (%v)", b, err)
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func TestListDirectory(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	dir := t.TempDir()
	for i := range files.MaxListing + 3 {
		if err := os.Symlink("x", filepath.Join(dir, itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	list := guesttest.Must[guestapi.FileList](t)(guesttest.Ask[guestapi.FileList](a, http.MethodGet, guestapi.PathFiles+"?list=1&path="+dir, nil))
	if len(list.Entries) != files.MaxListing || !list.Truncated || list.Entries[0].Type != "symlink" || list.Entries[0].Target != "x" {
		t.Errorf("%d entries, truncated %t, first %+v", len(list.Entries), list.Truncated, list.Entries[0])
	}
}

// TestHostileTars: whatever an archive contains, nothing is written outside of the directory.
func TestHostileTars(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	parent := t.TempDir()
	outside := filepath.Join(parent, "outside")
	if err := os.Mkdir(outside, 0o755); err != nil {
		t.Fatal(err)
	}
	entry := func(name string, kind byte, link string) []*tar.Header {
		return []*tar.Header{{Name: name, Typeflag: kind, Linkname: link, Mode: 0o644, Uid: os.Getuid(), Gid: os.Getgid()}}
	}
	for name, list := range map[string][]*tar.Header{
		"dots":                    entry("../outside/x", tar.TypeReg, ""),
		"dots inside":             entry("a/../../outside/x", tar.TypeReg, ""),
		"absolute link":           append(entry("l", tar.TypeSymlink, outside), entry("l/x", tar.TypeReg, "")...),
		"relative link":           append(entry("l", tar.TypeSymlink, "../outside"), entry("l/x", tar.TypeReg, "")...),
		"hard link out":           entry("h", tar.TypeLink, "../outside/x"),
		"device":                  entry("d", tar.TypeBlock, ""),
		"unknown type":            entry("d", 'Z', ""),
		"file where a dir stands": append(entry("d/", tar.TypeDir, ""), entry("d", tar.TypeReg, "")...),
	} {
		var b bytes.Buffer
		tw := tar.NewWriter(&b)
		for _, h := range list {
			if err := tw.WriteHeader(h); err != nil {
				t.Fatal(err)
			}
		}
		_ = tw.Close()
		if _, _, err := a.file(http.MethodPut, filepath.Join(parent, "in"), "&untar=1", &b); err == nil || core.CategoryOf(err) == core.Internal && name != "relative link" && name != "absolute link" && name != "hard link out" { //nolint:bodyclose // file has read and closed it
			t.Errorf("%s: %v", name, err)
		}
		_ = os.RemoveAll(filepath.Join(parent, "in"))
	}
	if list, err := os.ReadDir(outside); err != nil || len(list) != 0 {
		t.Errorf("outside there is %v (%v)", list, err)
	}
	// An absolute name is taken as a name inside the directory.
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	if err := tw.WriteHeader(entry("/etc/x", tar.TypeReg, "")[0]); err != nil {
		t.Fatal(err)
	}
	_ = tw.Close()
	if _, _, err := a.file(http.MethodPut, filepath.Join(parent, "in"), "&untar=1", &b); err != nil { //nolint:bodyclose // file has read and closed it
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(parent, "in", "etc", "x")); err != nil {
		t.Error(err)
	}
}

// TestTransfersAreBounded: neither a file nor a tar can send more than its bound, and a tar of /proc is refused.
func TestTransfersAreBounded(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	large := filepath.Join(t.TempDir(), "large")
	if err := os.WriteFile(large, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(large, files.MaxTransfer+1); err != nil { // a hole
		t.Fatal(err)
	}
	if _, _, err := a.file(http.MethodGet, large, "", nil); core.CodeOf(err) != core.CodeBodyTooLarge { //nolint:bodyclose // file has read and closed it
		t.Errorf("a file that is larger than the default: %v", err)
	}
	b, res, err := a.file(http.MethodGet, large, "&tar=1&max_bytes=100000", nil) //nolint:bodyclose // file has read and closed it
	if err != nil || len(b) > 100_000 || !strings.Contains(res.Trailer.Get(guestapi.HeaderStatus), "max_bytes") {
		t.Errorf("a tar of %d bytes, %v, trailer %v", len(b), err, res.Trailer)
	}
	// The size of a file of /proc is not known before it is read.
	if _, _, err := a.file(http.MethodGet, "/proc/self/status", "&max_bytes=10", nil); err == nil { //nolint:bodyclose // file has read and closed it
		t.Error("a file of /proc exceeded its bound")
	}
	if _, _, err := a.file(http.MethodGet, "/proc", "&tar=1", nil); core.CodeOf(err) != guestapi.CodeFileConflict { //nolint:bodyclose // file has read and closed it
		t.Errorf("a tar of /proc: %v", err)
	}
}
