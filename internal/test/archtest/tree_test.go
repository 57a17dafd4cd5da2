package archtest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/test/require"
)

var update = flag.Bool("update", false, "write the generated files again")

func rootDir(t *testing.T) string {
	t.Helper()
	dir, err := root()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// golden compares a file of the tree with what it should hold, or writes it.
func golden(t *testing.T, path, want string) {
	t.Helper()
	path = filepath.Join(rootDir(t), path)
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("%s is not current (-want +got):\n%s\nrun: make generate", path, diff)
	}
}

// tracked lists the files that git knows, relative to the root.
func tracked(t *testing.T) []string {
	t.Helper()
	git := require.Program(t, "git", "git")
	cmd := exec.CommandContext(t.Context(), git, "-c", "safe.directory=*", "ls-files", "-z")
	cmd.Dir = rootDir(t)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	return strings.FieldsFunc(string(out), func(r rune) bool { return r == 0 })
}

func TestEveryPackageHasOneDoc(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		if p.path() == "" || len(p.GoFiles) == 0 {
			continue
		}
		var docs []string
		for _, name := range append(p.GoFiles, p.CgoFiles...) {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Error(err)
				continue
			}
			if f.Doc == nil {
				continue
			}
			docs = append(docs, name)
			want := "Package " + p.Name + " "
			if p.Name == "main" {
				want = "Command " + filepath.Base(p.path()) + " "
			}
			if !strings.HasPrefix(f.Doc.Text(), want) {
				t.Errorf("%s/%s: the package's doc does not begin with %q", p.path(), name, want)
			}
		}
		if len(docs) != 1 {
			t.Errorf("%s: %d files have a package doc (%s), want one", p.path(), len(docs), strings.Join(docs, ", "))
		}
	}
}

// TestNoMachinePaths keeps the paths of the machines on which this is written out of what is published.
func TestNoMachinePaths(t *testing.T) {
	t.Parallel()
	names := []string{"wor" + "k", "far" + "m"}
	form := regexp.MustCompile(`(^|[^A-Za-z0-9_.])/(` + strings.Join(names, "|") + `)/`)
	for _, name := range tracked(t) {
		data, err := os.ReadFile(filepath.Join(rootDir(t), name))
		if os.IsNotExist(err) { // removed and not committed yet, or a link to nowhere
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		// Few files have such a path at all, and the expression is slow.
		if !slices.ContainsFunc(names, func(dir string) bool { return bytes.Contains(data, []byte("/"+dir+"/")) }) {
			continue
		}
		for n, line := range strings.Split(string(data), "\n") {
			if form.MatchString(line) {
				t.Errorf("%s:%d names a path of one machine: %s", name, n+1, strings.TrimSpace(line))
			}
		}
	}
}

// TestEveryDirectoryIsNamed keeps the map of the tree in docs/DEVELOPING.md whole.
func TestEveryDirectoryIsNamed(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(rootDir(t), "docs/DEVELOPING.md"))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, name := range tracked(t) {
		dir, _, below := strings.Cut(name, "/")
		if !below || strings.HasPrefix(dir, ".") || seen[dir] {
			continue
		}
		seen[dir] = true
		if !strings.Contains(string(text), "| `"+dir+"/` |") {
			t.Errorf("the map in docs/DEVELOPING.md lacks %s/", dir)
		}
	}
}

// generated lists what tools write from what. CI builds no generator; it compares with the sums that `make generate`
// left, so that neither an edited output nor a changed input goes unnoticed.
var generated = []madeFrom{
	{"api/api.gen.go", []string{"api/openapi.yaml", "api/codegen.yaml", "api/imports.tmpl"}},
	{"api/requests.gen.json", []string{"api/openapi.yaml"}},
	{"sdk/go/types.gen.go", []string{"api/openapi.yaml", "sdk/go/codegen.yaml", "sdk/go/overlay.yaml", "api/imports.tmpl"}},
	{python + "src/coppice/models.py", []string{"api/openapi.yaml", python + "tools/generate.py"}},
	{python + "src/coppice/_operations.py", []string{"api/openapi.yaml", python + "tools/generate.py"}},
	{python + "src/coppice/_codes.py", []string{"docs/ERRORS.md", python + "tools/generate.py"}},
	pythonSync("__init__"), pythonSync("admin"), pythonSync("checkpoint"), pythonSync("client"), pythonSync("events"), pythonSync("files"),
	pythonSync("network"), pythonSync("session"), pythonSync("steps"), pythonSync("transport"), pythonSync("watches"), pythonSync("workspace"),
	{"controller/compat/e2b/envd/process/process.pb.go", []string{"controller/compat/e2b/envd/process/process.proto"}},
	{"controller/compat/e2b/envd/process/process.connect.go", []string{"controller/compat/e2b/envd/process/process.proto"}},
	{"controller/compat/e2b/envd/filesystem/filesystem.pb.go", []string{"controller/compat/e2b/envd/filesystem/filesystem.proto"}},
	{"controller/compat/e2b/envd/filesystem/filesystem.connect.go", []string{"controller/compat/e2b/envd/filesystem/filesystem.proto"}},
}

const python = "sdk/python/"

// madeFrom is a file and what it is made from.
type madeFrom struct {
	output string
	inputs []string
}

// pythonSync is a file of the synchronous Python client, which is made from the asynchronous one.
func pythonSync(name string) madeFrom {
	return madeFrom{python + "src/coppice/_sync/" + name + ".py", []string{python + "src/coppice/_async/" + name + ".py", python + "tools/generate.py"}}
}

func isGenerated(name string) bool {
	return strings.HasSuffix(name, ".gen.go") || strings.HasSuffix(name, ".pb.go") || strings.HasSuffix(name, ".connect.go")
}

func TestGeneratedFilesAreCurrent(t *testing.T) {
	t.Parallel()
	dir := rootDir(t)
	sum := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
		}
		s := sha256.Sum256(data)
		return hex.EncodeToString(s[:])
	}
	var text strings.Builder
	known := map[string]bool{}
	for _, g := range generated {
		known[g.output] = true
		fmt.Fprintf(&text, "%s\n\t%s\n", g.output, sum(g.output))
		for _, in := range g.inputs {
			fmt.Fprintf(&text, "\t%s %s\n", sum(in), in)
		}
	}
	golden(t, "internal/test/archtest/testdata/generated.sums", text.String())

	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (rel == "bin" || rel == "var" || rel != "." && strings.HasPrefix(d.Name(), ".")):
			return fs.SkipDir
		case isGenerated(rel) && !known[rel]:
			t.Errorf("%s is generated, but this test does not know from what", rel)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
