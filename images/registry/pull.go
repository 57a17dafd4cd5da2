package registry

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/imageref"
)

// Options say which image to fetch, and from where.
type Options struct {
	// Reference names the image, as docker pull takes it: python:3.12-slim, registry.example/team/app@sha256:….
	Reference string
	// Architecture is that of the machines; empty for this host's.
	Architecture string
	// Mirrors are asked before the registry, in this order: HOST[:PORT][/PATH]. A mirror decides what a tag means.
	Mirrors []string
	// PlainHTTP are registries and mirrors, HOST[:PORT], that are spoken to without TLS.
	PlainHTTP []string
	// TrustedHosts are HOST[:PORT] that registries may lead to although their addresses are not public.
	TrustedHosts []string
	// Public means that nobody whom the operator trusts has chosen the reference: unless the registry is one of TrustedHosts or
	// PlainHTTP, it is reached at public addresses only, like a host to which a registry leads.
	Public bool
	// MaxBytes bounds the layers as the registry has them, if it is not 0.
	MaxBytes int64
	// Keychain has the credentials; nil for those in Docker's configuration of this user.
	Keychain authn.Keychain
	// Progress is called, one call at a time, when something has changed. May be nil.
	Progress func(Progress)

	// Timeout bounds the whole pull. Stall is how long a registry may be silent. Attempts is how often a request is sent;
	// Backoff is the first wait between two of them. Zero values have defaults.
	Timeout, Stall, Backoff time.Duration
	Attempts                int

	resolver *net.Resolver                         // of tests; nil for the host's
	proxy    func(*http.Request) (*url.URL, error) // of tests; nil for that of the environment
}

// Progress is how far a pull is.
type Progress struct {
	Layers, LayersDone, LayersKept int   // kept: they were in the store
	Bytes, BytesDone               int64 // of the layers that have to be fetched
	// Note is something to tell the operator, once.
	Note string
}

// Image is a fetched image. Its layers are in the store.
type Image struct {
	// Reference is the whole name of what was fetched, and Repository that of its repository.
	Reference, Repository string
	// Manifest is the digest of its manifest.
	Manifest core.Digest
	// Layers are its layers, the lowest first.
	Layers []images.Layer
	Config images.Config
	// Fetched are the bytes that came from registries.
	Fetched int64
	// Kept are the layers that were in the store before.
	Kept int
}

type puller struct {
	o       Options
	ref     name.Reference
	layers  *images.Layers
	sources []*source

	entering sync.Mutex // one request for access at a time

	mu       sync.Mutex // guards what follows
	progress Progress
	fetched  int64
	leftOut  map[*source]bool // mirrors that have failed
}

// Pull fetches what is missing of an image. After an error, what was fetched stays in the store for the next attempt.
func Pull(ctx context.Context, layers *images.Layers, o Options) (Image, error) {
	p, err := newPuller(ctx, layers, o)
	if err != nil {
		return Image{}, err
	}
	defer p.sources[0].guard.close()
	ctx, cancel := context.WithTimeoutCause(ctx, p.o.Timeout, core.Errorf(core.TimedOut, core.CodeTimedOut, "the image was not fetched within %s", p.o.Timeout))
	defer cancel()
	var m manifest
	if err := p.fromAny(ctx, func(s *source) (err error) { m, err = p.findManifest(ctx, s); return err }); err != nil {
		return Image{}, err
	}
	img := Image{Reference: p.ref.Name(), Repository: p.ref.Context().Name(), Manifest: m.digest}
	var diffs []core.Digest
	if err := p.fromAny(ctx, func(s *source) (err error) { img.Config, diffs, err = p.readConfig(ctx, s, m); return err }); err != nil {
		return Image{}, err
	}
	img.Layers = layersOf(m, diffs)
	if err := p.fetch(ctx, img.Layers); err != nil {
		return Image{}, err
	}
	img.Fetched, img.Kept = p.fetched, p.progress.LayersKept
	return img, nil
}

// parallel is how many layers are fetched at once.
const parallel = 3

func (p *puller) fetch(ctx context.Context, layers []images.Layer) error {
	unique := map[core.Digest]images.Layer{}
	var missing int64
	for _, l := range layers {
		if _, twice := unique[l.Digest]; !twice && !p.has(l) {
			missing += l.SizeBytes
		}
		unique[l.Digest] = l
	}
	if p.o.MaxBytes > 0 && missing > p.o.MaxBytes {
		return core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "the layers of the image that have to be fetched have %d MiB, and at most %d MiB are allowed", missing>>20, p.o.MaxBytes>>20)
	}
	p.report(func(g *Progress) { g.Layers, g.Bytes = len(unique), missing })
	if err := p.layers.Room(missing); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for _, l := range unique {
		group.Go(func() error { return p.layer(ctx, l) })
	}
	return group.Wait()
}

func newPuller(ctx context.Context, layers *images.Layers, o Options) (*puller, error) {
	o = o.withDefaults()
	plain, err := hosts("--plain-http", o.PlainHTTP)
	if err != nil {
		return nil, err
	}
	named, err := hosts("--trusted-host", o.TrustedHosts)
	if err != nil {
		return nil, err
	}
	for h := range plain {
		named[h] = true
	}
	ref, err := parseReference(o.Reference, plain)
	if err != nil {
		return nil, err
	}
	p := &puller{o: o, ref: ref, layers: layers, leftOut: map[*source]bool{}}
	g := newGuard(named, plain, o)
	for _, m := range o.Mirrors {
		repo, err := mirrored(m, ref.Context(), plain)
		if err != nil {
			return nil, err
		}
		if err := p.add(ctx, repo, g); err != nil {
			return nil, err
		}
	}
	return p, p.add(ctx, ref.Context(), g)
}

func (o Options) withDefaults() Options {
	if o.Architecture == "" {
		o.Architecture = runtime.GOARCH
	}
	if o.Keychain == nil {
		o.Keychain = authn.DefaultKeychain
	}
	if o.proxy == nil {
		o.proxy = http.ProxyFromEnvironment
	}
	set := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	set(&o.Timeout, 2*time.Hour)
	set(&o.Stall, time.Minute)
	set(&o.Backoff, time.Second)
	if o.Attempts == 0 {
		o.Attempts = 5
	}
	return o
}

func parseReference(text string, plain map[string]bool) (name.Reference, error) {
	ref, err := imageref.Parse(text)
	if err != nil {
		return nil, err
	}
	if isPlain(ref.Context().Registry, plain) {
		return name.ParseReference(text, name.Insecure)
	}
	return ref, nil
}

func mirrored(mirror string, of name.Repository, plain map[string]bool) (name.Repository, error) {
	bad := func(err error) error {
		return core.Wrapf(err, core.Invalid, core.CodeInvalidField, "--mirror %q is not HOST[:PORT][/PATH]", core.Clip(mirror))
	}
	host, path, _ := strings.Cut(strings.TrimSuffix(mirror, "/"), "/")
	if _, err := hosts("--mirror", []string{host}); err != nil {
		return name.Repository{}, bad(err)
	}
	reg, err := name.NewRegistry(host, name.StrictValidation)
	if err != nil {
		return name.Repository{}, bad(err)
	}
	if isPlain(reg, plain) {
		if reg, err = name.NewRegistry(host, name.StrictValidation, name.Insecure); err != nil {
			return name.Repository{}, bad(err)
		}
	}
	repo := reg.Repo(strings.TrimPrefix(path+"/"+of.RepositoryStr(), "/"))
	if _, err := name.NewRepository(repo.Name()); err != nil {
		return name.Repository{}, bad(err)
	}
	return repo, nil
}

func isPlain(r name.Registry, plain map[string]bool) bool {
	return plain[hostPort(&url.URL{Scheme: "http", Host: r.RegistryStr()})]
}

// add adds a repository as a source. The operator has named its host, unless Options.Public says otherwise.
func (p *puller) add(ctx context.Context, repo name.Repository, g *guard) error {
	auth, err := p.credentials(ctx, repo)
	if err != nil {
		return err
	}
	s := &source{repo: repo, guard: g, auth: auth, scheme: "https"}
	if isPlain(repo.Registry, g.plain) {
		s.scheme = "http"
	}
	if p.o.Public {
		p.sources = append(p.sources, s)
		return nil
	}
	g.named[hostPort(&url.URL{Scheme: s.scheme, Host: repo.RegistryStr()})] = true
	p.sources = append(p.sources, s)
	return nil
}

// askLimit bounds a credential helper. It may ask a person.
const askLimit = 2 * time.Minute

// credentials looks for those of a repository. A helper that the configuration names is a program: it may hang, and cannot be canceled.
func (p *puller) credentials(ctx context.Context, repo name.Repository) (authn.Authenticator, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, askLimit, core.Errorf(core.TimedOut, core.CodeTimedOut,
		"the program that Docker's configuration names for credentials did not answer within %s", askLimit))
	defer cancel()
	type answer struct {
		auth authn.Authenticator
		err  error
	}
	answers := make(chan answer, 1)
	go func() {
		auth, err := p.o.Keychain.Resolve(repo)
		answers <- answer{auth, err}
	}()
	select {
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case a := <-answers:
		if a.err != nil {
			return nil, core.Wrapf(a.err, core.Invalid, core.CodeInvalidField,
				"the credentials for %s cannot be read from the configuration of Docker or Podman: %s; if none are needed, set DOCKER_CONFIG to an empty directory",
				repo.RegistryStr(), core.Clip(a.err.Error()))
		}
		return a.auth, nil
	}
}

// hosts parses the values of a flag.
func hosts(flag string, list []string) (map[string]bool, error) {
	out := map[string]bool{}
	for _, h := range list {
		u, err := url.Parse("//" + h)
		if err != nil || u.Host != h || u.Hostname() == "" || strings.HasSuffix(h, ":") {
			return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "%s %q is not HOST[:PORT]", flag, core.Clip(h))
		}
		ports := []string{"80", "443"}
		if u.Port() != "" {
			ports = []string{u.Port()}
		}
		for _, port := range ports {
			out[net.JoinHostPort(strings.ToLower(u.Hostname()), port)] = true
		}
	}
	return out, nil
}

func (p *puller) report(change func(*Progress)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.progress)
	if p.o.Progress != nil {
		p.o.Progress(p.progress)
	}
	p.progress.Note = ""
}

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// NameFor is the name of a pulled image when none is given: the last word of the repository, and the tag. Other references
// have the same name, so it returns the whole name of the repository, too.
func NameFor(reference string) (text, repository string, err error) {
	ref, err := parseReference(reference, nil)
	if err != nil {
		return "", "", err
	}
	repo := ref.Context().RepositoryStr()
	text = repo[strings.LastIndexByte(repo, '/')+1:]
	if tag, ok := ref.(name.Tag); ok && tag.TagStr() != "latest" {
		text += "-" + tag.TagStr()
	}
	text = strings.Trim(notInNames.ReplaceAllString(strings.ToLower(text), "-"), "-")
	text = strings.Trim(text[:min(len(text), 63)], "-")
	if text == "" {
		return "", "", core.Errorf(core.Invalid, core.CodeInvalidField, "no name can be made from %q; give one with --name", core.Clip(reference))
	}
	return text, ref.Context().Name(), nil
}
