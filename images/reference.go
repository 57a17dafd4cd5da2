package images

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// referenceFact says which image was pulled last under a reference. The file is named after the digest of the reference.
type referenceFact struct {
	Reference string      `json:"reference"`
	Digest    core.Digest `json:"digest"`
}

// RecordReferences notes that references mean an image. A reference is a whole name, with the registry: index.docker.io/library/python:3.12-slim.
// It is not part of the image: a tag moves to another image with a later pull.
func (g *Staging) RecordReferences(d core.Digest, references ...string) error {
	for _, r := range references {
		key, err := CacheKey(KindReference, r)
		if err != nil {
			return err
		}
		if err := g.CachePut(key, referenceFact{r, d}); err != nil {
			return err
		}
	}
	return nil
}

// references returns the references under which each image was pulled, sorted.
func (s *Store) references() (map[core.Digest][]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, cacheDir))
	if err != nil {
		return nil, fmt.Errorf("list references of images: %w", err)
	}
	out := map[core.Digest][]string{}
	for _, e := range entries {
		var fact referenceFact
		if strings.HasPrefix(e.Name(), KindReference+"-") && s.cacheGet(e.Name(), &fact) {
			out[fact.Digest] = append(out[fact.Digest], fact.Reference)
		}
	}
	for _, list := range out {
		slices.Sort(list)
	}
	return out, nil
}
