package diffhelper

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/runner/diskdiff"
	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
	"github.com/coppice-dev/coppice/runner/rootimage/erofstest"
)

// takenOver is the task of files in a helper that may have been taken over: it answers what its request's path says.
func takenOver(c *confine.Child) error {
	var in lookRequest
	if err := c.Request(&in); err != nil {
		return err
	}
	switch text, lies := bytes.CutPrefix(in.Path, []byte("/answer:")); {
	case lies:
		for part := range strings.SplitSeq(string(text), "\n") {
			if err := c.Answer(json.RawMessage(part)); err != nil {
				return err
			}
		}
		return nil
	case string(in.Path) == "/panic":
		panic("on purpose")
	case string(in.Path) == "/hang":
		_, err := io.ReadAll(os.Stdin) // the caller keeps it open
		return err
	}
	return serveFiles(c)
}

func look(t *testing.T, path string, list, length int) (diskdiff.Found, error) {
	t.Helper()
	root := erofstest.Image(erofstest.File{Mode: erofstest.ModeDir, Entries: []erofstest.Entry{{Name: "a", File: 1, Type: erofstest.Regular}}}, erofstest.File{Mode: erofstest.ModeRegular, Data: []byte("xyz")})
	return Look(t.Context(), LookRequest{
		Query: diskdiff.Query{Overlay: stored(t, ext4test.Tiny(t)), Path: []byte(path), Follow: true, List: list, Length: length}, Root: stored(t, root), Wait: time.Minute,
	})
}

// TestLook: a helper reads what is there, and its errors have their codes.
func TestLook(t *testing.T) {
	t.Parallel()
	if got, err := look(t, "/a", 0, 2); err != nil || string(got.Data) != "he" || got.File.Size != 6 {
		t.Errorf("%+v, %v", got, err)
	}
	got, err := look(t, "/", 100, 0)
	if err != nil || len(got.Entries) < 2 || string(got.Entries[0].Name) != "a" {
		t.Errorf("%+v, %v", got, err)
	}
	for path, code := range map[string]core.Code{"/absent": core.CodeFileNotFound, "/": core.CodeInvalidField, "/panic": core.CodeDiskUnreadable} {
		if _, err := look(t, path, 0, 10); core.CodeOf(err) != code {
			t.Errorf("%s: %v, want %s", path, err, code)
		}
	}
	if _, err := look(t, "relative", 0, 1); core.CodeOf(err) != core.CodeInternal {
		t.Errorf("%v", err)
	}
}

// TestFilesHelperThatLies: what no file gives is refused.
func TestFilesHelperThatLies(t *testing.T) {
	t.Parallel()
	const file = `{"File":{"Name":"YQ==","Type":"file","Size":3}}`
	const end = `{"End":{}}`
	if _, err := look(t, "/answer:"+file+"\n"+end, 1, 1); err != nil {
		t.Fatalf("what a file gives is refused: %v", err)
	}
	for name, text := range map[string]string{
		"no end":               file,
		"no file":              end,
		"two files":            file + "\n" + file + "\n" + end,
		"more after the end":   file + "\n" + end + "\n" + end,
		"too many entries":     file + "\n" + `{"Entries":[{"Name":"YQ==","Type":"file"},{"Name":"Yg==","Type":"file"}]}` + "\n" + end,
		"too many bytes":       file + "\n" + `{"Data":"YWI="}` + "\n" + end,
		"an unknown type":      `{"File":{"Name":"YQ==","Type":"<b>"}}` + "\n" + end,
		"no name":              `{"File":{"Type":"file"}}` + "\n" + end,
		"a NUL":                `{"File":{"Name":"YQBi","Type":"file"}}` + "\n" + end,
		"a negative size":      `{"File":{"Name":"YQ==","Type":"file","Size":-1}}` + "\n" + end,
		"a name with a slash":  file + "\n" + `{"Entries":[{"Name":"YS9i","Type":"file"}]}` + "\n" + end,
		"less than nothing":    file + "\n" + `{"End":{"Unreadable":-1}}`,
		"a name that leads up": file + "\n" + `{"Entries":[{"Name":"Li4=","Type":"file"}]}` + "\n" + end,
	} {
		if got, err := look(t, "/answer:"+text, 1, 1); core.CodeOf(err) != core.CodeDiskUnreadable {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	// The names at the beginning of an answer are checked, however many follow.
	const entry = `{"Name":"YQ==","Type":"file"}`
	slash := `{"Entries":[{"Name":"YS9i","Type":"file"}` + strings.Repeat(","+entry, entryBatch) + "]}"
	if got, err := look(t, "/answer:"+file+"\n"+slash+"\n"+end, 2*entryBatch, 1); core.CodeOf(err) != core.CodeDiskUnreadable {
		t.Errorf("a name with a slash before many others: %d entries, %v", len(got.Entries), err)
	}
}
