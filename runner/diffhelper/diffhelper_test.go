package diffhelper

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/internal/confine/confinetest"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/diskdiff"
	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
	"github.com/coppice-dev/coppice/runner/rootimage/erofstest"
)

// TestMain also makes helpers that were taken over: they answer what their request's After says.
func TestMain(m *testing.M) {
	confine.Enter(confine.Task{Name: taskName, Run: func(c *confine.Child) error {
		var in request
		if err := c.Request(&in); err != nil {
			return err
		}
		if text, ok := bytes.CutPrefix(in.After, []byte("answer:")); ok {
			return c.Answer(json.RawMessage(text))
		}
		if bytes.Equal(in.After, []byte("hang")) {
			_, err := io.ReadAll(os.Stdin) // the caller keeps it open
			return err
		}
		if bytes.Equal(in.After, []byte("panic")) {
			panic("on purpose")
		}
		return serve(c)
	}}, confine.Task{Name: filesTask, Run: takenOver})
	confinetest.AllowWithoutRoot(m)
	os.Exit(m.Run())
}

func stored(t *testing.T, b []byte) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func ask(t *testing.T, after string) (diskdiff.Page, error) {
	t.Helper()
	root := erofstest.Image(erofstest.File{Mode: erofstest.ModeDir, Entries: []erofstest.Entry{{Name: "a", File: 1, Type: erofstest.Regular}}}, erofstest.File{Mode: erofstest.ModeRegular, Data: []byte("x")})
	a := ext4test.Tiny(t)
	b := bytes.Replace(bytes.Clone(a), []byte("upper"), []byte("other"), 1) // an overlay with nothing in it
	return Compare(t.Context(), Request{A: stored(t, a), B: stored(t, b), Root: stored(t, root), After: []byte(after), Limit: 100, Budget: time.Minute, Wait: time.Minute})
}

// TestCompare: a helper gives what a comparison in this process gives.
func TestCompare(t *testing.T) {
	t.Parallel()
	got, err := ask(t, "")
	if err != nil || len(got.Changes) == 0 || len(got.Next) > 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	a := ext4test.Tiny(t)
	b := bytes.Replace(bytes.Clone(a), []byte("upper"), []byte("other"), 1)
	want, err := diskdiff.Compare(t.Context(), diskdiff.Request{A: stored(t, a), B: stored(t, b), Lower: fstest.MapFS{"a": {Data: []byte("x")}}, Limit: 100})
	if err != nil || len(want.Changes) != len(got.Changes) {
		t.Errorf("%d changes, want %d (%v)", len(got.Changes), len(want.Changes), err)
	}
}

// TestHelperThatLies: what no comparison gives is refused.
func TestHelperThatLies(t *testing.T) {
	t.Parallel()
	good := `{"Changes":[{"Path":"L2E=","Kind":"added","Type":"file","Size":1}]}`
	for name, text := range map[string]string{
		"no end":             good,
		"no JSON":            `"`,
		"a relative path":    `{"Changes":[{"Path":"YQ==","Kind":"added","Type":"file"}],"End":{}}`,
		"a NUL":              `{"Changes":[{"Path":"LwA=","Kind":"added","Type":"file"}],"End":{}}`,
		"no path":            `{"Changes":[{"Kind":"added","Type":"file"}],"End":{}}`,
		"an unknown kind":    `{"Changes":[{"Path":"L2E=","Kind":"<b>","Type":"file"}],"End":{}}`,
		"an unknown type":    `{"Changes":[{"Path":"L2E=","Kind":"added","Type":"<b>"}],"End":{}}`,
		"an unknown what":    `{"Changes":[{"Path":"L2E=","Kind":"changed","Type":"file","What":["<b>"]}],"End":{}}`,
		"a negative size":    `{"Changes":[{"Path":"L2E=","Kind":"added","Type":"file","Size":-1}],"End":{}}`,
		"a page without end": `{"End":{"Next":"YW5zd2VyOg=="}}`,
		"less than nothing":  `{"End":{"Unreadable":-1}}`,
	} {
		if _, err := ask(t, "answer:"+text); core.CodeOf(err) != core.CodeDiskUnreadable && name != "no JSON" || err == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestErrors: whatever happens to the helper because of a disk is an error that says so, and no fault of the runner.
func TestErrors(t *testing.T) {
	t.Parallel()
	if _, err := ask(t, "panic"); core.CodeOf(err) != core.CodeDiskUnreadable || core.CategoryOf(err) != core.FailedPrecondition {
		t.Errorf("a panic: %v", err)
	}
	for _, limit := range []confine.Limit{confine.LimitMemory, confine.LimitCPU, confine.LimitAnswer, confine.LimitThreads} {
		if err := judge(&confine.LimitError{Task: taskName, Limit: limit, Bound: "1"}); core.CodeOf(err) != core.CodeDiskUnreadable || !errors.As(err, new(*confine.LimitError)) {
			t.Errorf("%s: %v", limit, err)
		}
	}
	_, err := Compare(t.Context(), Request{A: stored(t, nil), B: stored(t, nil), Root: stored(t, nil), Limit: 1, Wait: time.Minute})
	if core.CodeOf(err) != core.CodeDiskUnreadable {
		t.Errorf("no disks: %v", err)
	}
}

// TestKilledForWantOfMemory: a comparison whose helper the kernel killed says nothing of the disks, and may be tried again.
func TestKilledForWantOfMemory(t *testing.T) { //nolint:paralleltest // it looks for the only helper of this process
	require.Root(t)
	done := make(chan error, 1)
	go func() {
		_, err := ask(t, "hang")
		done <- err
	}()
	eventually.True(t, "the helper is killed", func() bool {
		list, err := filepath.Glob("/proc/self/task/*/children")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range list {
			b, _ := os.ReadFile(path) // a thread may have ended
			for f := range strings.FieldsSeq(string(b)) {
				cmdline, _ := os.ReadFile("/proc/" + f + "/cmdline")
				if pid, err := strconv.Atoi(f); err == nil && string(cmdline) == "coppice-confined\x00"+taskName+"\x00" {
					_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
				}
			}
		}
		return len(done) > 0
	})
	if err := <-done; core.CategoryOf(err) != core.Exhausted || core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("the kernel killed the helper: %v", err)
	}
}

// FuzzAnswer: whatever passes the check is what a guest can have.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte(`{"Changes":[{"Path":"L2E=","Kind":"added","Type":"file","What":["mode"],"Size":1}],"End":{"Next":"L2I="}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var a answer
		if err := json.Unmarshal(b, &a); err != nil {
			return
		}
		var page diskdiff.Page
		if err := a.check(Request{Limit: 10}, &page); err != nil {
			return
		}
		if len(a.Changes) > 10 {
			t.Errorf("%d changes", len(a.Changes))
		}
		for _, c := range a.Changes {
			if c.Path[0] != '/' || len(c.Path) > diskdiff.MaxPath || c.Size < 0 {
				t.Errorf("%+v", c)
			}
		}
	})
}

// BenchmarkCompare measures the smallest comparison, which is the start of a helper.
func BenchmarkCompare(b *testing.B) {
	dir := b.TempDir()
	root := erofstest.Image(erofstest.File{Mode: erofstest.ModeDir})
	var files []*os.File
	for i, content := range [][]byte{ext4test.Tiny(b), ext4test.Tiny(b), root} {
		path := filepath.Join(dir, string(rune('a'+i)))
		if err := os.WriteFile(path, content, 0o600); err != nil {
			b.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			b.Fatal(err)
		}
		defer f.Close()
		files = append(files, f)
	}
	for b.Loop() {
		if _, err := Compare(b.Context(), Request{A: files[0], B: files[1], Root: files[2], Limit: 1, Budget: time.Minute, Wait: time.Minute}); err != nil {
			b.Fatal(err)
		}
	}
}
