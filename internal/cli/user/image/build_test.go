package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/user/image"
)

// TestBuildFlags: flags of a build on a server and of one on this host do not mix, and a build on a server needs a name.
func TestBuildFlags(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args   []string
		says   string
		status int
		local  bool
	}{
		{nil, "", 0, true},
		{[]string{"--package", "x"}, "", 0, true},
		{[]string{"--build-arg", "A=b"}, "give the directory", exit.Usage, false},
		{[]string{".", "--package", "x"}, "--package is for a build on this host", exit.Usage, false},
		{[]string{"."}, "--name is missing", exit.Usage, false},
		{[]string{"--ready-timeout", "1m"}, "give the directory", exit.Usage, false},
		{[]string{".", "--name", "a", "--ready-port", "80"}, "wait for the command of --start", exit.Usage, false},
		{[]string{".", "--name", "a", "--start", "x", "--ready-timeout", "1m"}, "--ready-timeout is for", exit.Usage, false},
		{[]string{".", "other", "--name", "a"}, "", exit.Usage, false},
	} {
		local := false
		command := func(a *cli.App) *cobra.Command {
			one := &cobra.Command{Use: "build", Long: "Build an image from here.", RunE: func(*cobra.Command, []string) error {
				local = true
				return nil
			}}
			one.Flags().String("name", "base", "")
			one.Flags().String("package", "", "")
			return image.ExtendBuild(a, one)
		}
		a, _, stderr := clitest.App(nil)
		status := a.Run(t.Context(), append([]string{"build"}, c.args...), command)
		if status != c.status || local != c.local || !strings.Contains(stderr.String(), c.says) {
			t.Errorf("%q: status %d, on this host %v: %s", c.args, status, local, stderr)
		}
	}
}

// TestPack: the context has the files of the directory, without ignored ones, as root's; links stay links, and nothing outside is read.
func TestPack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"Dockerfile": "FROM base", ".dockerignore": "*.log\nnode_modules\n!keep.log\n", "a.py": "a", "x.log": "x", "keep.log": "k", "node_modules/big/file": "n", "src/deep/b": "b",
	} {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o640)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	out := new(bytes.Buffer)
	if err := image.Pack(t.Context(), dir, out); err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(out)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for tr := tar.NewReader(z); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Uname != "" {
			t.Errorf("%s belongs to %d %q", h.Name, h.Uid, h.Uname)
		}
		if h.Name != ".dockerignore" {
			list = append(list, h.Name+" "+string(b)+h.Linkname)
		}
	}
	slices.Sort(list)
	if got, want := strings.Join(list, ", "), "Dockerfile FROM base, a.py a, keep.log k, link /etc/passwd, src/ , src/deep/ , src/deep/b b"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	if err := image.Pack(t.Context(), filepath.Join(dir, "absent"), io.Discard); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory that is not there: %v", err)
	}
}
