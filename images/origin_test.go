package images

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestDerivedNames: a name that was made from a reference moves only from an image of the same repository, and never is that
// of the default image.
func TestDerivedNames(t *testing.T) {
	t.Parallel()
	s := openStore(t)
	img := mustPublish(t, s, "python-3-12", "one")
	record := func(repository string, d core.Digest) {
		t.Helper()
		g, err := s.Stage(t.Context())
		if err == nil {
			err = errors.Join(g.RecordOrigin(repository, d), g.RecordReferences(d, repository+":3.12"), g.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	check := func(name, repository string, want core.Code) {
		t.Helper()
		err := s.CheckDerivedName(name, repository)
		if want == "" && err != nil || want != "" && core.CodeOf(err) != want {
			t.Errorf("%s of %s: %v, want %q", name, repository, err, want)
		}
	}
	check(DefaultName, "registry.example/base", core.CodeNameTaken)
	check("free", "registry.example/free", "")
	check("python-3-12", "registry.example/a/python", core.CodeNameTaken) // it may be an image of the operator
	record("registry.example/a/python", img.Digest)
	check("python-3-12", "registry.example/a/python", "")
	check("python-3-12", "registry.example/b/python", core.CodeNameTaken)
	references, err := s.references()
	if err != nil || len(references) != 1 || !slices.Equal(references[img.Digest], []string{"registry.example/a/python:3.12"}) {
		t.Errorf("references: %v, %v", references, err)
	}
	other := mustPublish(t, s, "other", "two")
	if err := s.Tag(t.Context(), string(other.Digest), "python-3-12"); err != nil {
		t.Fatal(err)
	}
	check("python-3-12", "registry.example/a/python", core.CodeNameTaken)
	if err := s.Remove(t.Context(), string(img.Digest)); err != nil {
		t.Fatal(err)
	}
	checkTidy(t, s)
	if references, err := s.references(); err != nil || len(references) != 0 {
		t.Errorf("references of a removed image: %v, %v", references, err)
	}
	if left, err := filepath.Glob(filepath.Join(s.Dir(), cacheDir, KindOrigin+"-*")); err != nil || len(left) > 0 {
		t.Errorf("notes about a removed image: %v, %v", left, err)
	}
}
