package archtest

import (
	"strings"
	"testing"
)

// TestGlossaryDocument compares docs/GLOSSARY.md with the code: every term has a meaning, and every name in the column "in code"
// exists. The package of a name is its directory, or the last element of it.
func TestGlossaryDocument(t *testing.T) {
	t.Parallel()
	const columns, fewest = 4, 40
	all := declared(t)
	terms := map[string]bool{}
	for _, row := range rows(t, "docs/GLOSSARY.md") {
		if len(row) != columns { // the words that shall go
			continue
		}
		term, meaning, inCode := row[0], row[1], row[2]
		if terms[term] || meaning == "" {
			t.Errorf("%s is there twice or has no meaning", term)
		}
		terms[term] = true
		names := references(inCode)
		if len(names) == 0 {
			t.Errorf("%s: it names no place in the code", term)
		}
		for _, n := range names {
			if !exists(all, n[0], n[1]) {
				t.Errorf("%s: there is no %s in %s", term, n[1], n[0])
			}
		}
	}
	if len(terms) < fewest {
		t.Errorf("the glossary has %d terms", len(terms))
	}
}

func exists(all map[string]names, dir, name string) bool {
	for path, n := range all {
		if (path == dir || strings.HasSuffix(path, "/"+dir)) && n.code[name] {
			return true
		}
	}
	return false
}
