package docs

import (
	"encoding/xml"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "draw the pictures of docs/img again")

// TestPictures compares each picture of docs/img with its source. -update draws them.
func TestPictures(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(root, "docs/img")
	sources, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil || len(sources) == 0 {
		t.Fatalf("there are no sources in %s: %v", dir, err)
	}
	drawn := map[string]bool{}
	for _, source := range sources {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		want, err := Draw(filepath.Base(source), string(text))
		if err != nil {
			t.Error(err)
			continue
		}
		if err := xml.Unmarshal([]byte(want), new(struct{})); err != nil {
			t.Errorf("%s: %v", source, err)
		}
		file := strings.TrimSuffix(source, ".txt") + ".svg"
		drawn[file] = true
		if *update {
			if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(file)
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("%s is not current (-want +got):\n%s\nrun: make generate", file, diff)
		}
	}
	pictures, err := filepath.Glob(filepath.Join(dir, "*.svg"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range pictures {
		if !drawn[file] {
			t.Errorf("%s has no source", file)
		}
	}
}

func TestDrawRefuses(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"circle a 1 1 1 1", "part", "part a 1 2 3", "line a b", `note 1 1 "no end`, "picture 1", "frame 1 1 1 1", "part a b 1 1 1"} {
		if _, err := Draw("bad.txt", source); err == nil {
			t.Errorf("%q was drawn", source)
		}
	}
}
