package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// The bounds of an image.
const (
	maxManifest    = 1 << 20 // bytes of a manifest or an index; in memory it is many times as large
	maxLayers      = 512
	maxPlatforms   = 512      // images of an index
	maxCompressed  = 64 << 30 // bytes of all layers
	maxEnv         = 1024     // variables
	maxConfigWords = 1024     // words of the entry point, of the command, and ports
	maxConfigText  = 512 << 10
)

var acceptedManifests = []string{
	string(types.OCIImageIndex), string(types.DockerManifestList), string(types.OCIManifestSchema1), string(types.DockerManifestSchema2),
}

// manifest is the manifest of one image, with its digest.
type manifest struct {
	digest core.Digest
	v1     *v1.Manifest
}

// findManifest finds the manifest of the image for a platform.
func (p *puller) findManifest(ctx context.Context, s *source) (manifest, error) {
	raw, kind, err := s.read(context.WithValue(ctx, bodyLimit{}, int64(maxManifest)), "manifests/"+p.ref.Identifier(), acceptedManifests)
	if err != nil {
		return manifest{}, err
	}
	digest := core.DigestOf(raw)
	if want := p.ref.Identifier(); strings.HasPrefix(want, "sha256:") && want != string(digest) {
		return manifest{}, refuse("%s sent a manifest with the digest %s for %s", s.repo.RegistryStr(), digest.Short(), core.Clip(want))
	}
	if kindOf(raw, kind).IsIndex() {
		index, err := v1.ParseIndexManifest(bytes.NewReader(raw))
		if err != nil {
			return manifest{}, refuse("the index of the image cannot be read (%v)", core.Clip(err.Error()))
		}
		chosen, err := choose(index, p.o.Architecture)
		if err != nil {
			return manifest{}, err
		}
		if raw, kind, err = p.document(ctx, s, "manifests/", chosen, maxManifest); err != nil {
			return manifest{}, err
		}
		digest = core.Digest(chosen.Digest.String())
	}
	if kind = kindOf(raw, kind); !kind.IsImage() {
		return manifest{}, refuse("what the registry has is no image of OCI or Docker schema 2 (%s)", core.Clip(string(kind)))
	}
	m, err := v1.ParseManifest(bytes.NewReader(raw))
	if err != nil {
		return manifest{}, refuse("the manifest of the image cannot be read (%v)", core.Clip(err.Error()))
	}
	return manifest{digest, m}, checkManifest(m)
}

// kindOf is the type that a manifest says it has; if it says none, the type that the answer had.
func kindOf(raw []byte, answered types.MediaType) types.MediaType {
	var m struct { // of a manifest or an index
		MediaType types.MediaType `json:"mediaType"`
	}
	if err := json.Unmarshal(raw, &m); err == nil && m.MediaType != "" {
		return m.MediaType
	}
	return answered
}

// choose finds the image of a platform in an index.
func choose(index *v1.IndexManifest, arch string) (v1.Descriptor, error) {
	if len(index.Manifests) > maxPlatforms {
		return v1.Descriptor{}, refuse("the index of the image has more than %d entries", maxPlatforms)
	}
	var have []string
	var found *v1.Descriptor
	for i, d := range index.Manifests {
		if d.Platform == nil || !d.MediaType.IsImage() {
			continue
		}
		have = append(have, d.Platform.OS+"/"+d.Platform.Architecture)
		if d.Platform.OS != "linux" || d.Platform.Architecture != arch {
			continue
		}
		// Variants of amd64 (v2, v3) need processors that not every host has; the plain one runs everywhere.
		if plain := d.Platform.Variant == "" || arch == "arm64" && d.Platform.Variant == "v8"; found == nil || plain && found.Platform.Variant != "" {
			found = &index.Manifests[i]
		}
	}
	if found == nil {
		slices.Sort(have)
		return v1.Descriptor{}, core.Errorf(core.NotFound, core.CodeImageNotFound,
			"the image is not there for linux/%s; it is there for %s", arch, core.Clip(strings.Join(slices.Compact(have), ", ")))
	}
	return *found, nil
}

// document reads a short blob or manifest and compares it with its descriptor.
func (p *puller) document(ctx context.Context, s *source, below string, d v1.Descriptor, most int64) ([]byte, types.MediaType, error) {
	if err := checkDescriptor(d, most); err != nil {
		return nil, "", err
	}
	raw, kind, err := s.read(context.WithValue(ctx, bodyLimit{}, most), below+d.Digest.String(), acceptedManifests)
	if err != nil {
		return nil, "", err
	}
	if int64(len(raw)) != d.Size || core.DigestOf(raw) != core.Digest(d.Digest.String()) {
		return nil, "", refuse("%s sent %d bytes that are not what the digest %s says", s.repo.RegistryStr(), len(raw), core.Clip(d.Digest.String()))
	}
	if d.MediaType != "" {
		kind = d.MediaType
	}
	return raw, kind, nil
}

func checkDescriptor(d v1.Descriptor, most int64) error {
	if _, err := core.ParseDigest(d.Digest.String()); err != nil {
		return refuse("the image refers to a part by %q, which is no sha256 digest", core.Clip(d.Digest.String()))
	}
	if d.Size < 0 || d.Size > most {
		return refuse("a part of the image has %d bytes, the bound is %d", d.Size, most)
	}
	return nil
}

func checkManifest(m *v1.Manifest) error {
	if len(m.Layers) > maxLayers {
		return refuse("the image has %d layers, the bound is %d", len(m.Layers), maxLayers)
	}
	if len(m.Layers) == 0 {
		return refuse("the image has no layers")
	}
	total, sizes := int64(0), map[string]int64{}
	for _, d := range m.Layers {
		if err := checkDescriptor(d, maxCompressed); err != nil {
			return err
		}
		if !d.MediaType.IsLayer() || !d.MediaType.IsDistributable() {
			return refuse("the image has a layer of the type %q, which is not fetched", core.Clip(string(d.MediaType)))
		}
		if size, again := sizes[d.Digest.String()]; again && size != d.Size {
			return refuse("the image says two sizes of the layer %s", d.Digest)
		}
		sizes[d.Digest.String()] = d.Size
		if total += d.Size; total > maxCompressed {
			return refuse("the layers of the image have more than %d GiB", maxCompressed>>30)
		}
	}
	return nil
}

// readConfig reads the configuration of the image, and the digests of its layers without compression.
func (p *puller) readConfig(ctx context.Context, s *source, m manifest) (images.Config, []core.Digest, error) {
	var none images.Config
	if !m.v1.Config.MediaType.IsConfig() {
		return none, nil, refuse("the configuration of the image has the type %q", core.Clip(string(m.v1.Config.MediaType)))
	}
	raw, _, err := p.document(ctx, s, "blobs/", m.v1.Config, maxAnswer)
	if err != nil {
		return none, nil, err
	}
	c, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return none, nil, refuse("the configuration of the image cannot be read (%v)", core.Clip(err.Error()))
	}
	if c.OS != "linux" || c.Architecture != p.o.Architecture {
		return none, nil, core.Errorf(core.NotFound, core.CodeImageNotFound,
			"the image is for %s, and this host needs linux/%s", core.Clip(c.OS+"/"+c.Architecture), p.o.Architecture)
	}
	if len(c.RootFS.DiffIDs) != len(m.v1.Layers) {
		return none, nil, refuse("the image has %d layers and %d digests of their contents", len(m.v1.Layers), len(c.RootFS.DiffIDs))
	}
	diffs := make([]core.Digest, 0, len(c.RootFS.DiffIDs))
	for _, h := range c.RootFS.DiffIDs {
		d, err := core.ParseDigest(h.String())
		if err != nil {
			return none, nil, refuse("the image refers to a layer's content by %q, which is no sha256 digest", core.Clip(h.String()))
		}
		diffs = append(diffs, d)
	}
	out := images.Config{
		Env: c.Config.Env, WorkingDir: c.Config.WorkingDir, User: c.Config.User, Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd,
	}
	for port := range c.Config.ExposedPorts {
		out.ExposedPorts = append(out.ExposedPorts, port)
	}
	slices.Sort(out.ExposedPorts)
	return out, diffs, checkConfig(out)
}

func checkConfig(c images.Config) error {
	if len(c.Env) > maxEnv {
		return refuse("the image sets %d variables of the environment, the bound is %d", len(c.Env), maxEnv)
	}
	words := slices.Concat(c.Entrypoint, c.Cmd, c.ExposedPorts)
	if len(words) > maxConfigWords {
		return refuse("the image's entry point, command and ports have more than %d words", maxConfigWords)
	}
	text := len(c.WorkingDir) + len(c.User)
	for _, w := range append(words, c.Env...) {
		text += len(w)
	}
	if text > maxConfigText {
		return refuse("the image's configuration has more than %d KiB of text", maxConfigText>>10)
	}
	return nil
}

// layersOf pairs the layers of a manifest with the digests of their contents.
func layersOf(m manifest, diffs []core.Digest) []images.Layer {
	out := make([]images.Layer, 0, len(diffs))
	for i, d := range m.v1.Layers {
		out = append(out, images.Layer{Digest: core.Digest(d.Digest.String()), Content: diffs[i], SizeBytes: d.Size})
	}
	return out
}
