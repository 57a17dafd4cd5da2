package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var quotedText = regexp.MustCompile("`([^`\n]*)`")

// TestWalkDocument compares docs/WALK.md with the code. Everything in backquotes is a function or a file of this module that exists.
// In a table, each function is in the file beside it. Each walk has its steps in order, and no step has an empty cell.
func TestWalkDocument(t *testing.T) {
	t.Parallel()
	const doc, walks, fewest = "docs/WALK.md", 3, 20
	dir := rootDir(t)
	text, err := os.ReadFile(filepath.Join(dir, doc))
	if err != nil {
		t.Fatal(err)
	}
	places := functions(t)
	for _, m := range quotedText.FindAllStringSubmatch(string(text), -1) {
		name := m[1]
		if strings.Contains(name, "/") {
			if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
				t.Errorf("there is no file %s", name)
			}
		} else if len(places[name]) == 0 {
			t.Errorf("there is no function %s", name)
		}
	}

	const stepCells, wordCells = 6, 4
	var steps []int // of each walk
	for _, row := range rows(t, doc) {
		if slices.Contains(row, "") || len(row) != stepCells && len(row) != wordCells {
			t.Errorf("a row has %d cells, or an empty one: %q", len(row), row)
			continue
		}
		function, file := strings.Trim(row[1], "`"), strings.Trim(row[2], "`")
		if !slices.Contains(places[function], file) {
			t.Errorf("%s is not in %s, but in %q", function, file, places[function])
		}
		if len(row) == wordCells {
			continue
		}
		if row[0] == "1" {
			steps = append(steps, 0)
		}
		if len(steps) > 0 {
			steps[len(steps)-1]++
		}
		if len(steps) == 0 || row[0] != strconv.Itoa(steps[len(steps)-1]) {
			t.Errorf("step %s of %s is not in order", row[0], function)
		}
	}
	if len(steps) != walks || slices.Min(append(steps, fewest)) < fewest {
		t.Errorf("the walks have %v steps, want %d walks of at least %d", steps, walks, fewest)
	}
}

// functions lists the files of every function outside tests, as package.Function, package.Type.Method or package.(*Type).Method.
func functions(t *testing.T) map[string][]string {
	t.Helper()
	dir, places := rootDir(t), map[string][]string{}
	for _, path := range tracked(t) {
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "testdata/") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, path), nil, parser.SkipObjectResolution)
		if os.IsNotExist(err) { // removed and not committed yet
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			name := f.Name.Name + "."
			if fn.Recv != nil && len(fn.Recv.List) == 1 {
				of := receiver(fn.Recv.List[0].Type)
				if _, pointer := fn.Recv.List[0].Type.(*ast.StarExpr); pointer {
					of = "(*" + of + ")"
				}
				name += of + "."
			}
			name += fn.Name.Name
			places[name] = append(places[name], path)
		}
	}
	return places
}
