package images

import (
	"errors"
	"io/fs"

	"github.com/coppice-dev/coppice/core"
)

// RecordOrigin notes that an image came from a repository of a registry. The note is not part of the image: the same image may
// be in several repositories.
func (g *Staging) RecordOrigin(repository string, d core.Digest) error {
	key, err := CacheKey(KindOrigin, []any{repository, d})
	if err != nil {
		return err
	}
	return g.CachePut(key, BuildFact{Digest: d})
}

// CheckDerivedName fails with NAME_TAKEN unless a name that was made from a reference may point at an image of that
// repository: the name is free, or the image that it points at came from there. Whoever chooses a reference must not choose
// what new workspaces boot.
func (s *Store) CheckDerivedName(name, repository string) error {
	const cure = "give a name with --name"
	if name == DefaultName {
		return core.Errorf(core.AlreadyExists, core.CodeNameTaken, "the name %q is that of the default image, which new workspaces boot; %s", name, cure)
	}
	d, err := s.readName(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	key, err := CacheKey(KindOrigin, []any{repository, d})
	if err != nil {
		return err
	}
	var fact BuildFact
	if s.cacheGet(key, &fact) && fact.Digest == d {
		return nil
	}
	return core.Errorf(core.AlreadyExists, core.CodeNameTaken, "the name %q belongs to an image that is not of %s; %s", name, core.Clip(repository), cure)
}
