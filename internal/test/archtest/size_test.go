package archtest

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// maxPackage is how many lines a package may have, without its tests and generated files.
const maxPackage = 4000

// large are the packages that have more lines than that. Each has a reason, and a bound at its present size: lower it when the package shrinks, and do not raise it.
var large = map[string]struct {
	lines int
	why   string
}{}

// TestPackageSize keeps packages small enough to have one subject.
func TestPackageSize(t *testing.T) {
	t.Parallel()
	sizes := map[string]int{}
	for _, p := range packages(t) {
		if p.path() == "" || p.ForTest != "" {
			continue
		}
		n, err := handwritten(p.Dir)
		if err != nil {
			t.Fatal(err)
		}
		sizes[p.path()] = n
	}
	for _, path := range slices.Sorted(maps.Keys(sizes)) {
		bound, why := maxPackage, "split it by subject"
		if l, ok := large[path]; ok {
			bound, why = l.lines, l.why
		}
		if sizes[path] > bound {
			t.Errorf("%s has %d lines without tests and generated files, more than %d: %s", path, sizes[path], bound, why)
		}
	}
	for path, l := range large {
		switch {
		case l.why == "" || l.lines <= maxPackage:
			t.Errorf("%s: an exception needs a reason and a bound over %d", path, maxPackage)
		case sizes[path] < maxPackage*9/10:
			t.Errorf("%s has %d lines: it needs no exception any more", path, sizes[path])
		case sizes[path] < l.lines*9/10:
			t.Errorf("%s has %d lines: lower its bound of %d", path, sizes[path], l.lines)
		}
	}
}

// handwritten counts the lines of a package for every platform, without its tests and generated files.
func handwritten(dir string) (int, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	lines := 0
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return 0, err
		}
		if !bytes.HasPrefix(text, []byte("// Code generated ")) && !bytes.Contains(text, []byte("\n// Code generated ")) {
			lines += bytes.Count(text, []byte("\n"))
		}
	}
	return lines, err
}
