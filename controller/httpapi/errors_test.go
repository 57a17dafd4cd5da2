package httpapi_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/core"
)

type documented struct {
	category core.Category
	status   int
}

var errorRow = regexp.MustCompile("^\\| `([A-Z_]+)` \\| ([a-z_]+) \\| ([0-9]{3}) \\| [^|]+ \\| [^|]+ \\|$")

func readErrors(t *testing.T) map[core.Code]documented {
	t.Helper()
	text, err := os.ReadFile("../../docs/ERRORS.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[core.Code]documented{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		m := errorRow.FindStringSubmatch(line)
		if m == nil {
			t.Errorf("not a row of five columns: %s", line)
			continue
		}
		status, err := strconv.Atoi(m[3])
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := rows[core.Code(m[1])]; twice {
			t.Errorf("%s is there twice", m[1])
		}
		rows[core.Code(m[1])] = documented{core.Category(m[2]), status}
	}
	return rows
}

// source is every non-test file of the module.
func source(t *testing.T) []*ast.File {
	t.Helper()
	var files []*ast.File
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && len(d.Name()) > 2 || slices.Contains([]string{"testdata", "bin", "var"}, d.Name())):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		files = append(files, f)
		return err
	})
	if err != nil || len(files) < 50 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	return files
}

// codesOf finds the constants of type Code and, by name, their values.
func codesOf(files []*ast.File) map[string]core.Code {
	codes := map[string]core.Code{}
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != len(spec.Names) || lastName(spec.Type) != "Code" {
				return true
			}
			for i, v := range spec.Values {
				if lit, ok := v.(*ast.BasicLit); ok {
					if s, err := strconv.Unquote(lit.Value); err == nil {
						codes[spec.Names[i].Name] = core.Code(s)
					}
				}
			}
			return true
		})
	}
	return codes
}

func lastName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// TestErrorsAreDocumented compares docs/ERRORS.md with the code: every code that is defined or used has a row, no row is left
// over, and every place that makes an error gets the status that the row promises.
func TestErrorsAreDocumented(t *testing.T) {
	t.Parallel()
	rows, files := readErrors(t), source(t)
	codes := codesOf(files)
	categories := map[string]core.Category{}
	for _, c := range []core.Category{
		core.NotFound, core.AlreadyExists, core.Invalid, core.Conflict, core.FailedPrecondition, core.Exhausted, core.Unavailable, core.PermissionDenied,
		core.Unauthenticated, core.DataLoss, core.Canceled, core.TimedOut, core.Internal,
	} {
		name := ""
		for part := range strings.SplitSeq(string(c), "_") {
			name += strings.ToUpper(part[:1]) + part[1:]
		}
		categories[name] = c
	}
	used := map[core.Code]bool{}
	for _, c := range codes {
		used[c] = true
	}
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			at := map[string]int{"Errorf": 0, "Wrapf": 1}
			first, ok := at[lastName(call.Fun)]
			if !ok || len(call.Args) < first+3 {
				return true
			}
			category, known := categories[lastName(call.Args[first])]
			code := codes[lastName(call.Args[first+1])]
			if lit, ok := call.Args[first+1].(*ast.BasicLit); ok {
				s, err := strconv.Unquote(lit.Value)
				if err != nil {
					t.Fatal(err)
				}
				code = core.Code(s)
			}
			if !known || code == "" {
				return true // chosen at run time
			}
			used[code] = true
			if got := httpapi.Status(core.Errorf(category, code, "x")); rows[code].status != 0 && got != rows[code].status {
				t.Errorf("%s: %s as %s gives %d, the table says %d", f.Name.Name, code, category, got, rows[code].status)
			}
			return true
		})
	}
	for _, code := range slices.Sorted(maps.Keys(used)) {
		if _, ok := rows[code]; !ok {
			t.Errorf("%s has no row in docs/ERRORS.md", code)
		}
	}
	for code, row := range rows {
		if !used[code] {
			t.Errorf("%s is documented and nowhere in the code", code)
		}
		if got := httpapi.Status(core.Errorf(row.category, code, "x")); got != row.status {
			t.Errorf("%s as %s gives %d, the table says %d", code, row.category, got, row.status)
		}
	}
}
