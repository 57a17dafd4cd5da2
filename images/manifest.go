package images

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/coppice-dev/coppice/core"
)

// The names of the files of an image, inside its directory.
const (
	manifestFile = "image.json"
	KernelFile   = "vmlinuz"
	InitrdFile   = "initrd.img"
	RootFSFile   = "rootfs.erofs"
	OverlayFile  = "overlay.ext4"
)

// formatVersion is the layout of image.json. Fields are added without a new version, never renamed or reused.
const formatVersion = 1

// RecipeVersion is increased whenever the same inputs would give other bytes. It is part of every cache key, so that a
// part made by an older recipe is not reused.
const RecipeVersion = 1

// The sources of a root file system.
const (
	SourceDebian = "debian"
	SourceTar    = "tar"
	// SourceRegistry is an image of a registry, in the format of OCI or Docker.
	SourceRegistry = "registry"
)

// File is one file of an image.
type File struct {
	Digest    core.Digest `json:"digest"`
	SizeBytes int64       `json:"size_bytes"` // apparent size; the overlay is sparse
}

// Recipe says what an image was made from. It is part of the digest.
type Recipe struct {
	Version int `json:"version"`
	// Source is SourceDebian, SourceTar or SourceRegistry.
	Source string `json:"source"`
	// Suite is the Debian release of the root file system; empty unless the source is SourceDebian.
	Suite string `json:"suite,omitempty"`
	// Requested are the packages asked for on top of the essential ones; Packages are all that were installed, as
	// name=version, sorted. Both are empty unless the source is SourceDebian.
	Requested []string `json:"requested,omitempty"`
	Packages  []string `json:"packages,omitempty"`
	// TarDigest is the digest of the archive as it was given; empty unless the source is SourceTar.
	TarDigest core.Digest `json:"tar_digest,omitempty"`
	// ManifestDigest is the digest of the image's manifest in the registry, and Layers are the digests of its layers as the
	// registry has them, the lowest first. Both are empty unless the source is SourceRegistry. The reference is not here: a
	// tag moves, and the same image has the same digest under every name.
	ManifestDigest core.Digest   `json:"manifest_digest,omitempty"`
	Layers         []core.Digest `json:"layers,omitempty"`
	// KernelPackage is the Debian package of the kernel and its modules, as name=version.
	KernelPackage string `json:"kernel_package"`
	// AgentDigest is the digest of the guest agent in the initrd.
	AgentDigest core.Digest `json:"agent_digest"`
	// Modules are the kernel modules in the initrd, in insmod order.
	Modules []string `json:"modules"`
}

// Config is what an image of a registry says about its programs. Env, WorkingDir and User are the defaults of sessions. The
// others are recorded, and nothing uses them yet.
type Config struct {
	Env          []string `json:"env,omitempty"` // KEY=VALUE
	WorkingDir   string   `json:"working_dir,omitempty"`
	User         string   `json:"user,omitempty"` // name or uid, optionally :group
	Entrypoint   []string `json:"entrypoint,omitempty"`
	Cmd          []string `json:"cmd,omitempty"`
	ExposedPorts []string `json:"exposed_ports,omitempty"` // 80/tcp, sorted
}

// Manifest is image.json.
type Manifest struct {
	Format        int             `json:"format"`
	Architecture  string          `json:"architecture"` // Debian's word: amd64, arm64
	KernelRelease string          `json:"kernel_release"`
	CommandLine   string          `json:"command_line"`
	RootFSType    string          `json:"rootfs_type"`
	Files         map[string]File `json:"files"`
	Recipe        Recipe          `json:"recipe"`
	// Config is nil unless the source is SourceRegistry.
	Config *Config `json:"config,omitempty"`
}

// encode returns the canonical bytes, whose digest names the image. Struct fields keep their order and map keys are
// sorted by encoding/json, so equal manifests have equal bytes.
func (m Manifest) encode() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(m); err != nil {
		return nil, fmt.Errorf("encode image.json: %w", err)
	}
	return b.Bytes(), nil
}

// decodeManifest reads image.json and checks what the rest of the package relies on.
func decodeManifest(b []byte) (Manifest, error) {
	var m Manifest
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("image.json: %w", err)
	}
	if m.Format != formatVersion {
		return m, fmt.Errorf("image.json has format %d, this program reads format %d", m.Format, formatVersion)
	}
	for _, name := range imageFiles() {
		f, ok := m.Files[name]
		if !ok {
			return m, fmt.Errorf("image.json does not name %s", name)
		}
		if _, err := core.ParseDigest(string(f.Digest)); err != nil {
			return m, fmt.Errorf("image.json: %s: %w", name, err)
		}
	}
	if len(m.Files) != len(imageFiles()) {
		return m, fmt.Errorf("image.json names %d files instead of %d", len(m.Files), len(imageFiles()))
	}
	return m, nil
}

func imageFiles() []string { return []string{KernelFile, InitrdFile, RootFSFile, OverlayFile} }
