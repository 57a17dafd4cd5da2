package atomicfile

import (
	"bufio"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const writerEnv = "ATOMICFILE_TEST_PATH" // makes the test binary rewrite that file for ever

func TestMain(m *testing.M) {
	if path := os.Getenv(writerEnv); path != "" {
		rewrite(path)
	}
	os.Exit(m.Run())
}

// content is a file of n bytes that shows whether it is whole: one letter throughout, and a line feed at its end.
func content(letter byte) []byte {
	return append([]byte(strings.Repeat(string(letter), 1<<20)), '\n')
}

func rewrite(path string) {
	for i := byte(0); ; i = (i + 1) % 26 {
		if err := Write(path, content('a'+i), 0o600); err != nil {
			os.Stdout.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Stdout.WriteString("written\n")
	}
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestWrite(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, want := range []string{"one", "two"} {
		if err := Write(path, []byte(want), 0o666); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != want {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o666 {
		t.Errorf("mode %v, %v; want 0666 whatever the umask", fi.Mode(), err)
	}
	if diff := cmp.Diff([]string{"f"}, names(t, dir)); diff != "" {
		t.Error(diff)
	}
}

func TestFailureLeavesTheOldFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := Write(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	cause := errors.New("cause")
	err := WriteFunc(path, 0o600, func(w io.Writer) error {
		_, _ = w.Write([]byte("new"))
		return cause
	})
	if !errors.Is(err, cause) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want the cause and the path", err)
	}
	if err := WriteJSON(path, func() {}, 0o600); err == nil {
		t.Error("a function was written as JSON")
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "old" {
		t.Errorf("the file holds %q, %v", got, err)
	}
	if diff := cmp.Diff([]string{"f"}, names(t, dir)); diff != "" {
		t.Error(diff)
	}
	if err := Write(filepath.Join(dir, "absent", "f"), nil, 0o600); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want ErrNotExist", err)
	}
}

func TestJSON(t *testing.T) {
	t.Parallel()
	type thing struct {
		N    int      `json:"n"`
		Tags []string `json:"tags"`
	}
	path := filepath.Join(t.TempDir(), "f.json")
	want := thing{N: 1, Tags: []string{"a"}}
	if err := WriteJSON(path, want, 0o600); err != nil {
		t.Fatal(err)
	}
	var got thing
	if err := ReadJSON(path, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if err := os.WriteFile(path, []byte(`{"n":1}{"n":2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ReadJSON(path, &got); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("two values: got %v, want an error that names the file", err)
	}
	if err := ReadJSON(path+".absent", &got); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want ErrNotExist", err)
	}
}

func TestRenameAcrossDirectories(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	from, to := filepath.Join(dir, "a"), filepath.Join(dir, "b", "a")
	if err := errors.Join(os.Mkdir(filepath.Dir(to), 0o700), os.WriteFile(from, nil, 0o600), Rename(from, to)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(to); err != nil {
		t.Error(err)
	}
}

// TestKill kills a process that rewrites a file without pause: the file is whole each time, and what the killed
// writers left is cleared.
func TestKill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for range 20 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), writerEnv+"="+path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for range 2 { // the kill falls somewhere into the writes that follow
			if !lines.Scan() || lines.Text() != "written" {
				t.Fatalf("the writer said %q", lines.Text())
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		got, err := os.ReadFile(path)
		if err != nil || len(got) == 0 || string(got) != string(content(got[0])) {
			t.Fatalf("after a kill the file has %d bytes, %v: not whole", len(got), err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, ".f.tmp-1"), nil, 0o600); err != nil { // at least one
		t.Fatal(err)
	}
	if err := RemoveTemporary(dir); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"f"}, names(t, dir)); diff != "" {
		t.Error(diff)
	}
}
