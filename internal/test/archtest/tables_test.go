package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

// names are the package-level names of a package of this module: functions, types, constants and variables, with methods and fields
// as Type.Name.
type names struct {
	code, tests map[string]bool
}

// declared lists the names of every package by its directory, as core or runner/vmm/qemu. Callers do not change it.
func declared(t *testing.T) map[string]names {
	t.Helper()
	all, err := declarations()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// declarations reads the names once for all tests.
var declarations = sync.OnceValues(func() (map[string]names, error) {
	dir, err := root()
	if err != nil {
		return nil, err
	}
	list, err := tree()
	if err != nil {
		return nil, err
	}
	all := map[string]names{}
	for _, p := range list {
		if p.path() == "" || p.ForTest != "" {
			continue
		}
		n := names{map[string]bool{}, map[string]bool{}}
		files, err := filepath.Glob(filepath.Join(dir, p.path(), "*.go"))
		if err != nil {
			return nil, err
		}
		for _, path := range files {
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return nil, err
			}
			into := n.code
			if strings.HasSuffix(path, "_test.go") {
				into = n.tests
			}
			for _, d := range f.Decls {
				maps.Copy(into, namesOf(d))
			}
		}
		all[p.path()] = n
	}
	return all, nil
})

func namesOf(d ast.Decl) map[string]bool {
	out := map[string]bool{}
	switch d := d.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil && len(d.Recv.List) == 1 {
			name = receiver(d.Recv.List[0].Type) + "." + name
		}
		out[name] = true
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.ValueSpec:
				for _, n := range s.Names {
					out[n.Name] = true
				}
			case *ast.TypeSpec:
				out[s.Name.Name] = true
				if st, ok := s.Type.(*ast.StructType); ok {
					for _, f := range st.Fields.List {
						for _, n := range f.Names {
							out[s.Name.Name+"."+n.Name] = true
						}
					}
				}
			}
		}
	}
	return out
}

func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// rows reads the rows of the tables in a Markdown document: the cells, without the lines of headings and rules.
func rows(t *testing.T, doc string) [][]string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(rootDir(t), doc))
	if err != nil {
		t.Fatal(err)
	}
	var out [][]string
	lines := strings.Split(string(b), "\n")
	for i, line := range lines {
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|---") || i+1 < len(lines) && strings.HasPrefix(lines[i+1], "|---") {
			continue
		}
		var cells []string
		for c := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
			cells = append(cells, strings.TrimSpace(c))
		}
		out = append(out, cells)
	}
	return out
}

var reference = regexp.MustCompile("`([a-z0-9/-]+)\\.([A-Za-z][A-Za-z0-9_.]*)`")

// references are the names in a cell, each as `package/path.Name`.
func references(cell string) (out [][2]string) {
	for _, m := range reference.FindAllStringSubmatch(cell, -1) {
		out = append(out, [2]string{m[1], m[2]})
	}
	return out
}

// checkTests wants a cell to name one test that exists, at least.
func checkTests(all map[string]names, cell string) error {
	refs := references(cell)
	if len(refs) == 0 {
		return fmt.Errorf("%q names no test", cell)
	}
	for _, r := range refs {
		if !all[r[0]].tests[r[1]] {
			return fmt.Errorf("there is no test %s in %s", r[1], r[0])
		}
	}
	return nil
}

// unlisted are constants that are named like bounds and have no row in docs/LIMITS.md, with the reason.
var unlisted = map[string]string{
	"controller/ratelimit.maxFailureDelay":      "a time: the longest delay of an answer to a wrong key",
	"controller/identity.maxLabel":              "a format: the length of a DNS label",
	"controller/storecheck.maxNeeders":          "a format: how many checkpoints a message names",
	"controller/countersign.maxAge":             "a time",
	"controller/countersign.maxAhead":           "a time",
	"controller/flows.maxFlows":                 "an algorithm: rows of one statement",
	"controller/postgres/tenantrows.maxKeysRow": "a type: the row of a quota",
	"guestagent.maxFlush":                       "a time",
	"guestagent/workload.maxIdleThreads":        "an algorithm: threads that the agent keeps",
	"guestagent.maxQuiesce":                     "a time",
	"guestagent/sessions.maxWait":               "a time",
	"guestagent/sessions.maxDeadline":           "a time",
	"runner/prepared.maxFor":                    "a time",
	"runner/cgroup.maxWeight":                   "a format: the largest weight that the kernel takes",
	"runner/diffhelper.maxSize":                 "a format: the largest file that an answer may name",
	"runner/ext4.maxTarget":                     "a format: the kernel's bound of a symlink",
	"runner/memory.maxIOV":                      "an algorithm: the kernel's bound of one call",
	"runner/netns.mostBurst":                    "a format: the largest burst that the kernel takes",
	"runner/rootimage.maxName":                  "a format: the longest name in a file system",
	"snapshotstore.maxAlone":                    "an algorithm: as maxScatter",
	"snapshotstore.maxGap":                      "an algorithm: as maxRequest",
	"snapshotstore.maxPack":                     "an algorithm: when a writer begins the next pack",
	"snapshotstore.maxRequest":                  "an algorithm: how reads are joined",
	"snapshotstore.maxScatter":                  "an algorithm: when a compaction is worth its cost",
	"snapshotstore.maxSmall":                    "an algorithm: as maxScatter",
	"snapshotstore/blob/cache.maxObject":        "an algorithm: it stands for an unknown size",
	"snapshotstore/blob/s3.maxBackoff":          "a time",
	"snapshotstore/blob/s3.maxParts":            "a format: S3's bound of an upload",
}

// boundName is how constants are called that bound something.
var boundName = regexp.MustCompile(`^(max|most)[A-Z][A-Za-z0-9]*$`)

// limited are the subtrees whose code handles what others send.
var limited = []string{"controller", "runner", "egress", "snapshotstore", "images", "guestagent", "internal/daemon", "internal/sidecar", "internal/confine", "internal/pass", "internal/mtls"}

// TestLimitsDocument holds docs/LIMITS.md against the code: each row names a bound that exists and a test that exists, and each
// constant that is named like a bound has a row.
func TestLimitsDocument(t *testing.T) {
	t.Parallel()
	all := declared(t)
	listed := map[string]bool{}
	for _, row := range rows(t, "docs/LIMITS.md") {
		const columns = 6
		if len(row) != columns {
			t.Errorf("a row has %d cells, want %d: %q", len(row), columns, row)
			continue
		}
		what, inBytes, inCount, owner, atBound, test := row[0], row[1], row[2], row[3], row[4], row[5]
		if what == "" || inBytes == "" || inCount == "" || atBound == "" {
			t.Errorf("a row has an empty cell: %q", row)
		}
		owners := references(owner)
		if len(owners) == 0 {
			t.Errorf("%s: it has no owner", what)
		}
		for _, o := range owners {
			if !all[o[0]].code[o[1]] {
				t.Errorf("%s: there is no %s in %s", what, o[1], o[0])
			}
			listed[o[0]+"."+o[1]] = true
		}
		if err := checkTests(all, test); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for path, n := range all {
		if !under(path, limited) {
			continue
		}
		for name := range n.code {
			full := path + "." + name
			if boundName.MatchString(name) && !listed[full] && unlisted[full] == "" && !strings.Contains(path, "/fake") {
				t.Errorf("%s is named like a bound and has no row in docs/LIMITS.md", full)
			}
		}
	}
	for full := range unlisted {
		path, name, _ := strings.Cut(full, ".")
		if !all[path].code[name] || listed[full] {
			t.Errorf("%s is excused from docs/LIMITS.md without need", full)
		}
	}
}

// TestSecurityDocument holds docs/SECURITY.md against the tests: each threat of the model has a row that names tests that exist, or
// says why it is out of scope.
func TestSecurityDocument(t *testing.T) {
	t.Parallel()
	const threats = 35
	all := declared(t)
	seen := map[string]bool{}
	for _, row := range rows(t, "docs/SECURITY.md") {
		if len(row) != 3 || !strings.HasPrefix(row[0], "T") {
			t.Errorf("a row is not `| T1 | test | what it shows |`: %q", row)
			continue
		}
		seen[row[0]] = true
		if strings.HasPrefix(row[1], "out of scope") {
			if len(row[2]) < 20 {
				t.Errorf("%s: it is out of scope without a reason", row[0])
			}
			continue
		}
		if err := checkTests(all, row[1]); err != nil {
			t.Errorf("%s: %v", row[0], err)
		}
	}
	var missing []string
	for i := range threats {
		if id := fmt.Sprint("T", i+1); !seen[id] {
			missing = append(missing, id)
		}
	}
	if len(missing) > 0 {
		t.Errorf("threats without a row: %s", strings.Join(missing, " "))
	}
	for id := range seen {
		if slices.Contains(missing, id) {
			t.Errorf("%s has a row twice in the list", id)
		}
	}
}
