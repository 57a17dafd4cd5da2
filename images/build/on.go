package build

import (
	"context"
	"os"
	"path/filepath"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// buildOn makes the root file system of a pulled image and publishes it with the kernel, the initrd and the overlay disk of an image
// that the store has. A host needs neither apt nor its indexes for it.
func (b *builder) buildOn(ctx context.Context) (images.Image, error) {
	if b.o.Pulled == nil {
		return images.Image{}, core.Errorf(core.Invalid, core.CodeInvalidField, "only a pulled image is made on another image")
	}
	on, err := b.on.Get(b.o.On)
	if err != nil {
		return images.Image{}, err
	}
	if on.RootFSType != rootFSType {
		return images.Image{}, core.Errorf(core.FailedPrecondition, images.CodeImageBuildFailed, "the image %s has a root file system of the type %s, and this program makes %s; build it again",
			b.o.On, core.Clip(on.RootFSType), rootFSType)
	}
	input, err := b.rootInput(ctx, resolution{})
	if err != nil {
		return images.Image{}, err
	}
	key, err := images.CacheKey(images.KindBuild, []any{input, b.o.Pulled.Manifest, b.o.Pulled.Config, on.Digest})
	if err != nil {
		return images.Image{}, err
	}
	var fact images.BuildFact
	if !b.o.Rebuild && b.store.CacheGet(key, &fact) {
		if img, err := b.store.Image(fact.Digest); err == nil {
			b.note("cached", "nothing changed since "+img.Digest.Short()+" was built")
			return img, b.name(img.Digest)
		}
	}
	img, err := b.assembleOn(ctx, input, on)
	if err != nil {
		return images.Image{}, err
	}
	if err := b.store.CachePut(key, images.BuildFact{Digest: img.Digest}); err != nil {
		return images.Image{}, err
	}
	return img, b.name(img.Digest)
}

func (b *builder) assembleOn(ctx context.Context, input rootInput, on images.Image) (images.Image, error) {
	out := filepath.Join(b.tmp, "out")
	if err := os.Mkdir(out, 0o700); err != nil {
		return images.Image{}, err
	}
	facts, err := b.rootFS(ctx, input, filepath.Join(out, images.RootFSFile))
	if err != nil {
		return images.Image{}, err
	}
	p := b.o.Pulled
	m := images.Manifest{
		Architecture: on.Architecture, KernelRelease: on.KernelRelease, CommandLine: on.CommandLine, RootFSType: rootFSType, Config: &p.Config,
		Files: map[string]images.File{images.RootFSFile: facts.File},
		Recipe: images.Recipe{
			Version: images.RecipeVersion, Source: b.source, ManifestDigest: p.Manifest,
			KernelPackage: on.Recipe.KernelPackage, AgentDigest: on.Recipe.AgentDigest, Modules: on.Recipe.Modules,
		},
	}
	for _, l := range p.Layers {
		m.Recipe.Layers = append(m.Recipe.Layers, l.Digest)
	}
	for name, path := range map[string]string{images.KernelFile: on.Kernel, images.InitrdFile: on.Initrd, images.OverlayFile: on.Overlay} {
		m.Files[name] = on.Files[name]
		if err := os.Link(path, filepath.Join(out, name)); err != nil {
			return images.Image{}, err
		}
	}
	done := b.stage("publish", "flushing")
	img, err := b.store.Publish(ctx, out, m)
	if err != nil {
		return images.Image{}, err
	}
	done("published " + img.Digest.Short())
	return img, nil
}
