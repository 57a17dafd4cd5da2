package build

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build/authority"
)

// rootInput is everything that a root file system depends on.
type rootInput struct {
	Source    string            `json:"source"`
	Suite     string            `json:"suite,omitempty"`
	Sources   string            `json:"sources,omitempty"` // they end up in the guest's own apt configuration
	Requested []string          `json:"requested,omitempty"`
	Packages  []string          `json:"packages,omitempty"`
	Excludes  []string          `json:"excludes,omitempty"`
	TarDigest core.Digest       `json:"tar_digest,omitempty"`
	Env       map[string]string `json:"env,omitempty"`

	Authorities []string `json:"authorities,omitempty"`

	// Of a pulled image. Of its configuration there is the part that is in the root file system: Env, WorkingDir and User.
	Layers []images.Layer `json:"layers,omitempty"`
	Config *images.Config `json:"config,omitempty"`
}

// known reports whether the inputs are known before the build. The content of a stream is known only after it was unpacked.
func (in rootInput) known() bool { return in.Source != images.SourceTar || in.TarDigest != "" }

// rootFacts are the facts about a finished root file system.
type rootFacts struct {
	File      images.File `json:"file"`
	Packages  []string    `json:"packages,omitempty"` // as installed
	TarDigest core.Digest `json:"tar_digest,omitempty"`
}

const factsFile = "facts.json"

func (b *builder) rootInput(ctx context.Context, r resolution) (rootInput, error) {
	in := rootInput{Source: b.source, Env: b.o.Env}
	if b.source == images.SourceDebian {
		in.Suite, in.Sources, in.Requested, in.Packages = b.apt.suite, string(b.apt.deb822()), b.o.Packages, r.Packages
		in.Excludes = dpkgExcludes
		var err error
		in.Authorities, err = authority.Check(b.o.Authorities)
		return in, err
	}
	if p := b.o.Pulled; p != nil {
		in.Layers, in.Config = p.Layers, &images.Config{Env: p.Config.Env, WorkingDir: p.Config.WorkingDir, User: p.Config.User}
		return in, nil
	}
	if b.o.FromTar == "-" {
		return in, nil
	}
	f, err := openArchive(b.o.FromTar)
	if err != nil {
		return in, err
	}
	defer f.Close()
	in.TarDigest, _, err = core.DigestReader(contextReader{ctx, f})
	if err != nil {
		return in, fmt.Errorf("read the archive: %w", err)
	}
	return in, nil
}

// rootFS puts the root file system at file: linked from the cache, or made.
func (b *builder) rootFS(ctx context.Context, in rootInput, file string) (rootFacts, error) {
	if in.known() {
		if facts, ok, err := b.reuseRootFS(in, file); ok || err != nil {
			return facts, err
		}
	}
	tree := filepath.Join(b.tmp, "tree")
	var facts rootFacts
	var err error
	start := time.Now().Unix()
	done := b.stage("rootfs", map[string]string{
		images.SourceDebian: "installing packages", images.SourceTar: "unpacking the archive", images.SourceRegistry: "unpacking the layers",
	}[in.Source])
	switch in.Source {
	case images.SourceDebian:
		facts.Packages, err = b.debianTree(ctx, in, tree)
	case images.SourceRegistry:
		err = b.layerTree(ctx, tree)
	default:
		facts.TarDigest, err = b.tarTree(ctx, tree)
		// The content of a stream may be known already, and a file may have changed meanwhile.
		in.TarDigest = facts.TarDigest
		if err == nil {
			if facts, ok, err := b.reuseRootFS(in, file); ok || err != nil {
				return facts, err
			}
		}
	}
	if err != nil {
		return facts, err
	}
	part := filepath.Join(b.tmp, "part")
	if err := os.Mkdir(part, 0o700); err != nil {
		return facts, err
	}
	if err := b.finishTree(ctx, in, tree, filepath.Join(part, images.RootFSFile), start); err != nil {
		return facts, err
	}
	if facts.File, err = images.HashFile(filepath.Join(part, images.RootFSFile)); err != nil {
		return facts, err
	}
	raw, err := json.Marshal(facts)
	if err != nil {
		return facts, err
	}
	if err := os.WriteFile(filepath.Join(part, factsFile), raw, 0o600); err != nil {
		return facts, err
	}
	key, err := images.CacheKey(images.KindRootFS, in)
	if err != nil {
		return facts, err
	}
	dir, err := b.store.CacheAdopt(ctx, key, part)
	if err != nil {
		return facts, err
	}
	done(fmt.Sprintf("made the root file system, %d MiB", facts.File.SizeBytes>>20))
	return facts, os.Link(filepath.Join(dir, images.RootFSFile), file)
}

// reuseRootFS links a cached root file system to file; false when there is none, or a damaged one.
func (b *builder) reuseRootFS(in rootInput, file string) (rootFacts, bool, error) {
	var facts rootFacts
	key, err := images.CacheKey(images.KindRootFS, in)
	if err != nil || b.o.Rebuild {
		return facts, false, err
	}
	dir := b.store.Cached(key)
	raw, err := os.ReadFile(filepath.Join(dir, factsFile))
	if err != nil || json.Unmarshal(raw, &facts) != nil {
		return facts, false, nil //nolint:nilerr // not cached
	}
	got, err := images.HashFile(filepath.Join(dir, images.RootFSFile))
	if err != nil || got != facts.File {
		b.note("rootfs", "the cached root file system is damaged; it is made again")
		return rootFacts{}, false, nil //nolint:nilerr // making it again is the cure
	}
	b.note("rootfs", "the root file system did not change")
	return facts, true, os.Link(filepath.Join(dir, images.RootFSFile), file)
}

// finishTree makes an unpacked tree fit for a guest, checks it and writes the file system.
func (b *builder) finishTree(ctx context.Context, in rootInput, tree, file string, start int64) error {
	root, err := os.OpenRoot(tree)
	if err != nil {
		return err
	}
	defer root.Close()
	epoch, err := newestShipped(root, start)
	if err != nil {
		return err
	}
	if in.Source == images.SourceDebian {
		if err := trimDebian(root); err != nil {
			return fmt.Errorf("trim the root file system: %w", err)
		}
	}
	if err := prepareTree(root, b.sessionDefaults(in)); err != nil {
		return fmt.Errorf("prepare the root file system: %w", err)
	}
	if err := lintTree(tree, in.Source, func(msg string) { b.note("lint", msg) }); err != nil {
		return err
	}
	if err := b.makeRootFS(ctx, tree, file, epoch); err != nil {
		return err
	}
	// Half a gigabyte of small files: removed now and not at the end, because the disk may be small.
	return images.RemoveTree(tree)
}

// dpkgExcludes are files that no program in a guest reads. They stay excluded for packages installed later.
var dpkgExcludes = []string{
	"path-exclude=/usr/share/doc/*", "path-include=/usr/share/doc/*/copyright",
	// The directories of man pages stay: a package whose alternatives have pages (any Java) fails without them.
	"path-exclude=/usr/share/man/*/*",
	"path-exclude=/usr/share/info/*", "path-exclude=/usr/share/groff/*",
	"path-exclude=/usr/share/lintian/*", "path-exclude=/usr/share/linda/*", "path-exclude=/usr/share/help/*",
	"path-exclude=/usr/share/locale/*", "path-include=/usr/share/locale/locale.alias",
	"path-exclude=/usr/share/zoneinfo/right/*", "path-exclude=/usr/share/zoneinfo/posix/*",
	"path-exclude=/usr/share/bash-completion/*",
}

// debianTree installs a Debian system into tree and returns its packages as name=version, sorted.
//
// mmdebstrap runs in mount and process namespaces of its own. If this process is killed, its death signal ends unshare
// and unshare's ends the first process of the namespace, and with it all others; their mounts go with the namespace.
// A build that dies therefore never leaves the host's /dev or /sys mounted in a directory that the next one deletes.
// The namespace has no volumes of runners: one that is unmounted during a build would keep its loop device.
func (b *builder) debianTree(ctx context.Context, in rootInput, tree string) ([]string, error) {
	args := []string{
		"--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL", "--propagation", "private", "--",
		"mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory",
		"--include=" + strings.Join(in.Requested, ","),
		`--aptopt=APT::Install-Recommends "false"`,
	}
	for _, o := range dpkgExcludes {
		args = append(args, "--dpkgopt="+o)
	}
	hooks, err := authority.Hooks(in.Authorities, filepath.Join(b.tmp, "authorities"))
	if err != nil {
		return nil, err
	}
	args = append(args, hooks...)
	args = append(args, in.Suite, tree, b.apt.sourcesFile())
	if err := run(ctx, tool{name: "unshare", args: args, dir: "/", log: b.log, leaves: true, needs: []string{tree, b.apt.sourcesFile(), b.tmp, os.TempDir()}}); err != nil {
		return nil, fmt.Errorf("install packages: %w", err)
	}
	raw, err := os.ReadFile(filepath.Join(tree, "var", "lib", "dpkg", "status"))
	if err != nil {
		return nil, fmt.Errorf("read what was installed: %w", err)
	}
	var out []string
	for _, s := range stanzas(raw) {
		if s["status"] == "install ok installed" {
			out = append(out, s["package"]+"="+s["version"])
		}
	}
	slices.Sort(out)
	return out, nil
}

// tarTree unpacks the archive into tree and returns its digest.
func (b *builder) tarTree(ctx context.Context, tree string) (core.Digest, error) {
	if err := os.Mkdir(tree, 0o755); err != nil { //nolint:gosec // G301: the mode of the guest's /; the parent is closed
		return "", err
	}
	in := b.o.Stdin
	if b.o.FromTar != "-" {
		f, err := openArchive(b.o.FromTar)
		if err != nil {
			return "", err
		}
		defer f.Close()
		in = f
	}
	digest, err := untar(ctx, in, tree, defaultUntarLimits)
	if err != nil {
		return "", errors.Join(err, os.RemoveAll(tree))
	}
	return digest, nil
}

// layerTree unpacks the layers of a pulled image into tree.
func (b *builder) layerTree(ctx context.Context, tree string) error {
	if err := os.Mkdir(tree, 0o755); err != nil { //nolint:gosec // G301: the mode of the guest's /; the parent is closed
		return err
	}
	p := b.o.Pulled
	open := func(l images.Layer) (io.ReadCloser, error) { return os.Open(p.Store.Path(l.Digest)) }
	limits := defaultUntarLimits
	if b.o.MaxBytes > 0 {
		limits.Bytes, limits.Stream = min(limits.Bytes, b.o.MaxBytes), min(limits.Stream, b.o.MaxBytes+b.o.MaxBytes/4)
	}
	err := untarLayers(ctx, p.Layers, open, tree, limits)
	if err == nil {
		return nil
	}
	err = errors.Join(err, os.RemoveAll(tree))
	if ctx.Err() != nil {
		return err
	}
	// A layer may have been damaged since it was fetched. It is removed, so that the next pull fetches it again.
	for _, l := range p.Layers {
		if got, hashErr := images.HashFile(p.Store.Path(l.Digest)); hashErr == nil && got.Digest == l.Digest {
			continue
		}
		return errors.Join(core.Wrapf(err, core.DataLoss, images.CodeImageCorrupt, "the layer %s in the image store was damaged; pull the image again", l.Digest.Short()),
			p.Store.Remove(l.Digest))
	}
	return err
}

// sessionDefaults is what sessions of the image have unless they say otherwise.
func (b *builder) sessionDefaults(in rootInput) sessionDefaults {
	if in.Config == nil {
		return sessionDefaults{env: in.Env}
	}
	d := sessionDefaults{env: map[string]string{}, user: in.Config.User, dir: in.Config.WorkingDir}
	for _, kv := range in.Config.Env {
		k, v, _ := strings.Cut(kv, "=")
		if err := checkEnv(map[string]string{k: v}); err != nil {
			b.note("lint", core.MessageOf(err)+"; it is left out")
			continue
		}
		d.env[k] = v
	}
	maps.Copy(d.env, in.Env)
	for name, text := range map[string]*string{"USER": &d.user, "WORKDIR": &d.dir} {
		if strings.ContainsAny(*text, "\n\x00") || len(*text) > unix.PathMax {
			b.note("lint", "the image's "+name+" cannot be stored; it is left out")
			*text = ""
		}
	}
	return d
}
