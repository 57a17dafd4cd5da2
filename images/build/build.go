package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build/authority"
)

// BasePackages are the packages of every Debian image in addition to the essential ones.
func BasePackages() []string {
	return []string{"ca-certificates", "curl", "git", "iproute2", "procps", "python3"}
}

// ToolPackages are the packages that people and agents look for first in a machine of theirs. coppice image build adds them, unless it is asked not to.
func ToolPackages() []string {
	return []string{"iputils-ping", "less", "nano", "python3-pip", "python3-venv"}
}

// Options say what to build.
type Options struct {
	// Name under which the image is published; images.DefaultName if empty.
	Name string
	// DerivedName means that nobody has chosen the name: it was made from the reference of a pulled image. It then replaces no
	// image of another repository.
	DerivedName bool
	// AgentBinary is the path of the guest agent: a static executable, the guest's first program.
	AgentBinary string
	// Packages are Debian packages on top of BasePackages. Not with FromTar.
	Packages []string
	// Authorities are certificates in PEM form of authorities that the guest trusts, beside Debian's. Not with FromTar.
	Authorities string
	// Suite is the Debian release; empty for the host's. It must be among the host's apt sources. An image from a tar
	// takes only its kernel from there.
	Suite string
	// FromTar is a root file system as `docker export` writes it: a path, or "-" for Stdin.
	FromTar string
	Stdin   io.Reader
	// Pulled is an image of a registry. Not with FromTar, Packages and Authorities.
	Pulled *Pulled
	// On is the name or digest of an image of the store, whose kernel, initrd and overlay disk a pulled image gets. So nothing is needed
	// from Debian's archives, and no agent.
	On string
	// ForProject publishes a pulled image without a name, for a project: see images.Staging.RecordPulled.
	ForProject bool
	// MaxBytes bounds the files of a pulled image, if it is not 0.
	MaxBytes int64
	// Env is the default environment of sessions in the guest; `docker export` loses the image's own. That of a pulled image
	// is there without it, and these variables come on top.
	Env map[string]string
	// Rebuild ignores the cache and makes every part again.
	Rebuild bool
	// Progress is called, one call at a time, when a stage begins, ends or warns. May be nil.
	Progress func(Event)
	// Log receives the output of the programs that a build runs. May be nil; the error of a failed build has the last
	// lines anyway.
	Log io.Writer
}

// Pulled is an image of a registry whose layers are in the store.
type Pulled struct {
	// Reference is the whole name that was pulled. Repository is the whole name of its repository, without a tag.
	Reference, Repository string
	Manifest              core.Digest
	Layers                []images.Layer // the lowest first
	Config                images.Config
	// Store has the layers. The caller keeps it open during the build.
	Store *images.Layers
}

// Event is one step of a build's progress.
type Event struct {
	Stage string // rootfs, kernel, initrd, overlay, publish, cached, lint
	Msg   string
	// Duration is set when the stage ended.
	Duration time.Duration
	Done     bool
}

// Image makes an image, publishes it in the store and points the name at it. If none of its inputs has changed, it
// returns the existing image at once; parts that did not change are reused. It needs root.
//
// After an error or a cancellation nothing is published; a killed build leaves a temporary directory, which the next
// one removes. Concurrent builds in one store wait for each other.
func Image(ctx context.Context, store *images.Store, o Options) (images.Image, error) {
	o, err := o.validate()
	if err != nil {
		return images.Image{}, err
	}
	source := o.source()
	if err := checkHost(source); err != nil {
		return images.Image{}, err
	}
	staging, err := store.Stage(ctx)
	if err != nil {
		return images.Image{}, err
	}
	if o.DerivedName && o.Pulled != nil {
		if err := store.CheckDerivedName(o.Name, o.Pulled.Repository); err != nil { // again, under the lock
			return images.Image{}, errors.Join(err, staging.Close())
		}
	}
	b := &builder{store: staging, on: store, o: o, source: source, tmp: staging.Dir}
	if o.Log != nil {
		b.log = &lockedWriter{w: o.Log}
	}
	work := b.build
	if o.On != "" {
		work = b.buildOn
	}
	img, err := work(ctx)
	if err = errors.Join(err, staging.Close()); err != nil {
		return images.Image{}, err
	}
	if !o.ForProject {
		img.Name = o.Name
	}
	return img, nil
}

// CheckHost checks the options and the host before an image is pulled, as far as that is possible then.
func (o Options) CheckHost() error {
	if _, err := o.validate(); err != nil {
		return err
	}
	return checkHost(images.SourceRegistry)
}

func checkHost(source string) error {
	if os.Geteuid() != 0 {
		return core.Errorf(core.PermissionDenied, CodeRootRequired,
			"building an image needs root, to keep the owners and set-user-id bits of its files; cure: run the same command with sudo")
	}
	return checkPrograms(source)
}

func (o Options) source() string {
	switch {
	case o.Pulled != nil:
		return images.SourceRegistry
	case o.FromTar != "":
		return images.SourceTar
	}
	return images.SourceDebian
}

var packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+$`)

func (o Options) validate() (Options, error) {
	if o.Name == "" {
		o.Name = images.DefaultName
	}
	if err := core.ValidateName("image", o.Name); err != nil {
		return o, err
	}
	for _, p := range o.Packages {
		if !packageName.MatchString(p) {
			return o, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not the name of a Debian package", core.Clip(p))
		}
	}
	if o.FromTar != "" && len(o.Packages) > 0 {
		return o, core.Errorf(core.Invalid, core.CodeInvalidField, "packages cannot be added to an image from a tar; install them in the Dockerfile")
	}
	if o.FromTar != "" && o.Authorities != "" {
		return o, core.Errorf(core.Invalid, core.CodeInvalidField, "certificate authorities cannot be added to an image from a tar; add them in the Dockerfile")
	}
	if o.Pulled != nil && (o.FromTar != "" || len(o.Packages) > 0 || o.Authorities != "") {
		return o, core.Errorf(core.Invalid, core.CodeInvalidField, "packages, certificate authorities and an archive cannot be added to a pulled image; add them in its Dockerfile")
	}
	if _, err := authority.Check(o.Authorities); err != nil {
		return o, err
	}
	if o.FromTar == "-" && o.Stdin == nil {
		return o, core.Errorf(core.Invalid, core.CodeInvalidField, "the archive must come from standard input, and there is no standard input")
	}
	if o.Suite != "" && !packageName.MatchString(o.Suite) {
		return o, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not the name of a Debian suite", core.Clip(o.Suite))
	}
	if o.On != "" {
		return o, checkEnv(o.Env)
	}
	if o.AgentBinary == "" {
		return o, core.Errorf(core.Invalid, core.CodeInvalidField, "no guest agent was named; cure: CGO_ENABLED=0 go build ./cmd/coppice-guest")
	}
	o.Packages = slices.Compact(slices.Sorted(slices.Values(append(BasePackages(), o.Packages...))))
	return o, checkEnv(o.Env)
}

// builder is one build. Its stages may run at the same time.
type builder struct {
	store  *images.Staging // nil: nothing is published
	on     *images.Store   // has the image of Options.On
	o      Options
	source string
	tmp    string
	log    io.Writer
	apt    *aptConfig

	progressMu sync.Mutex // one call of Progress at a time
}

// resolution is the answer of the host's indexes about the packages and the kernel.
type resolution struct {
	Packages []string             `json:"packages,omitempty"`
	Kernel   images.KernelPackage `json:"kernel"`
}

func (b *builder) build(ctx context.Context) (images.Image, error) {
	aptDir := filepath.Join(b.tmp, "apt")
	if err := os.Mkdir(aptDir, 0o700); err != nil {
		return images.Image{}, err
	}
	var err error
	if b.apt, err = readAptConfig(ctx, b.o.Suite, aptDir, b.log); err != nil {
		return images.Image{}, err
	}
	if err := checkAgent(b.o.AgentBinary, b.apt.arch); err != nil {
		return images.Image{}, err
	}
	agent, err := images.HashFile(b.o.AgentBinary)
	if err != nil {
		return images.Image{}, fmt.Errorf("read the guest agent: %w", err)
	}
	resolved, err := b.resolve(ctx)
	if err != nil {
		return images.Image{}, err
	}
	input, err := b.rootInput(ctx, resolved)
	if err != nil {
		return images.Image{}, err
	}
	inputs := []any{input, resolved.Kernel, guestModules, agent, b.apt.arch, commandLine(b.apt.arch), OverlayArgs(), overlayMountOptions}
	if b.o.Pulled != nil {
		inputs = append(inputs, b.o.Pulled.Manifest)
	}
	key, err := images.CacheKey(images.KindBuild, inputs)
	if err != nil {
		return images.Image{}, err
	}
	var fact images.BuildFact
	if input.known() && !b.o.Rebuild && b.store.CacheGet(key, &fact) {
		if img, err := b.store.Image(fact.Digest); err == nil {
			b.note("cached", "nothing changed since "+img.Digest.Short()+" was built")
			return img, b.name(img.Digest)
		}
	}
	img, err := b.assemble(ctx, input, resolved, agent)
	if err != nil {
		return images.Image{}, err
	}
	if input.known() {
		if err := b.store.CachePut(key, images.BuildFact{Digest: img.Digest}); err != nil {
			return images.Image{}, err
		}
	}
	return img, b.name(img.Digest)
}

// name points the name at the image.
func (b *builder) name(d core.Digest) error {
	if b.o.ForProject {
		return b.store.RecordPulled(d)
	}
	if p := b.o.Pulled; p != nil && p.Repository != "" {
		if err := errors.Join(b.store.RecordOrigin(p.Repository, d), b.store.RecordReferences(d, p.Reference, p.Repository+"@"+string(p.Manifest))); err != nil {
			return err
		}
	}
	return b.store.Name(b.o.Name, d)
}

// resolve finds the versions of everything from Debian. The answer is cached while the host's indexes stay unchanged:
// asking apt takes two seconds, looking at its files almost none.
func (b *builder) resolve(ctx context.Context) (resolution, error) {
	state, err := b.apt.indexState()
	if err != nil {
		return resolution{}, err
	}
	packages := b.o.Packages
	if b.source != images.SourceDebian {
		packages = nil
	}
	key, err := images.CacheKey(images.KindResolve, []any{state, b.source, packages})
	if err != nil {
		return resolution{}, err
	}
	var r resolution
	if !b.o.Rebuild && b.store.CacheGet(key, &r) {
		return r, nil
	}
	if r.Kernel, err = b.apt.newestKernel(ctx); err != nil {
		return r, err
	}
	if b.source == images.SourceDebian {
		if r.Packages, err = b.apt.resolve(ctx, packages); err != nil {
			return r, err
		}
	}
	return r, b.store.CachePut(key, r)
}

// assemble makes what is not cached and publishes the image.
func (b *builder) assemble(ctx context.Context, input rootInput, resolved resolution, agent images.File) (images.Image, error) {
	out := filepath.Join(b.tmp, "out")
	if err := os.Mkdir(out, 0o700); err != nil {
		return images.Image{}, err
	}
	recipe := images.Recipe{Version: images.RecipeVersion, Source: b.source, KernelPackage: resolved.Kernel.String(), AgentDigest: agent.Digest}
	m := images.Manifest{
		Architecture: b.apt.arch, KernelRelease: resolved.Kernel.Release(),
		CommandLine: commandLine(b.apt.arch), RootFSType: rootFSType, Files: map[string]images.File{},
	}
	group, groupCtx := errgroup.WithContext(ctx)
	var facts rootFacts
	var overlay images.File
	group.Go(func() error {
		var err error
		facts, err = b.rootFS(groupCtx, input, filepath.Join(out, images.RootFSFile))
		return err
	})
	group.Go(func() error {
		modules, err := b.kernelAndInitrd(groupCtx, resolved.Kernel, out)
		recipe.Modules = modules
		if err != nil {
			return err
		}
		overlay, err = b.makeOverlay(groupCtx, filepath.Join(out, images.OverlayFile))
		return err
	})
	if err := group.Wait(); err != nil {
		return images.Image{}, err
	}
	recipe.Suite, recipe.Requested, recipe.Packages, recipe.TarDigest = input.Suite, input.Requested, facts.Packages, facts.TarDigest
	if p := b.o.Pulled; p != nil {
		recipe.ManifestDigest, m.Config = p.Manifest, &p.Config
		for _, l := range p.Layers {
			recipe.Layers = append(recipe.Layers, l.Digest)
		}
	}
	m.Recipe = recipe
	done := b.stage("publish", "hashing and flushing")
	m.Files[images.RootFSFile], m.Files[images.OverlayFile] = facts.File, overlay
	for _, name := range []string{images.KernelFile, images.InitrdFile} {
		f, err := images.HashFile(filepath.Join(out, name))
		if err != nil {
			return images.Image{}, err
		}
		m.Files[name] = f
	}
	img, err := b.store.Publish(ctx, out, m)
	if err != nil {
		return images.Image{}, err
	}
	done("published " + img.Digest.Short())
	return img, nil
}

func (b *builder) kernelAndInitrd(ctx context.Context, pkg images.KernelPackage, out string) (modules []string, err error) {
	bundle, err := b.kernel(ctx, pkg, b.tmp)
	if err != nil {
		return nil, err
	}
	if err := os.Link(bundle.Path(), filepath.Join(out, images.KernelFile)); err != nil {
		return nil, err
	}
	done := b.stage("initrd", "writing the initrd")
	if err := writeInitrd(filepath.Join(out, images.InitrdFile), b.o.AgentBinary, bundle); err != nil {
		return nil, err
	}
	done(fmt.Sprintf("wrote the initrd with %d modules", len(bundle.Modules)))
	return bundle.Modules, nil
}

// stage reports the beginning of a stage and returns what reports its end.
func (b *builder) stage(name, msg string) (done func(msg string)) {
	start := time.Now()
	b.emit(Event{Stage: name, Msg: msg})
	return func(msg string) {
		b.emit(Event{Stage: name, Msg: msg, Done: true, Duration: time.Since(start)})
	}
}

func (b *builder) note(stage, msg string) { b.emit(Event{Stage: stage, Msg: msg, Done: true}) }

func (b *builder) emit(e Event) {
	if b.o.Progress == nil {
		return
	}
	b.progressMu.Lock()
	defer b.progressMu.Unlock()
	b.o.Progress(e)
}

// lockedWriter lets programs that run at the same time share one log.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

func joinClose(err error, c io.Closer) error { return errors.Join(err, c.Close()) }
