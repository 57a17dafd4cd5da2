package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/images/registry"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/render"
)

func newImagePullCommand(a *cli.App, dir *string) *cobra.Command {
	o := registry.Options{}
	b := build.Options{}
	var env []string
	var verbose bool
	c := &cobra.Command{
		Use:   "pull REFERENCE",
		Short: "Make an image from one of a registry, such as python:3.12-slim",
		Long: `Make an image from one of a registry, in the format of OCI or Docker. Layers that an earlier pull has fetched are not fetched again. A pull that
was interrupted continues. If nothing changed, the command returns the existing image.

The image's ENV, WORKDIR and USER are the defaults of sessions. ENTRYPOINT, CMD and EXPOSE are recorded, and nothing is started.

Credentials come from Docker's configuration of the user that runs the command (DOCKER_CONFIG, else ~/.docker/config.json), as docker login
writes it. A registry may lead to other hosts, for layers and for tokens: only at public addresses, unless --trusted-host names them.`,
		Example: `  coppice image pull python:3.12-slim
  coppice image pull --name app --mirror mirror.example:5000 registry.example/team/app:1.4
  coppice image pull --plain-http localhost:5000 localhost:5000/app`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			o.Reference = args[0]
			var err error
			if b.Env, err = argument.KeyValues("--env", env); err != nil {
				return err
			}
			if b.AgentBinary, err = agentBinary(b.AgentBinary); err != nil {
				return err
			}
			if b.Name == "" {
				if b.Name, b.DerivedName, err = derivedName(*dir, o.Reference); err != nil {
					return err
				}
			}
			if verbose {
				b.Log = a.Stderr
			}
			got, err := pullImage(c.Context(), a, *dir, o, b)
			if err != nil {
				return err
			}
			return a.Print(got, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s  %s  kernel %s, %s\n", got.Name, got.Digest, got.KernelRelease, render.Size(got.SizeBytes))
				return err
			})
		},
	}
	f := c.Flags()
	f.StringVar(&b.Name, "name", "", "`name` of the image (default: from the reference, such as python-3-12-slim)")
	f.StringArrayVar(&o.Mirrors, "mirror", nil, "`HOST[:PORT][/PATH]` to ask before the registry; may be repeated")
	f.StringArrayVar(&o.PlainHTTP, "plain-http", nil, "registry or mirror, `HOST[:PORT]`, that has no TLS; may be repeated")
	f.StringArrayVar(&o.TrustedHosts, "trusted-host", nil, "`HOST[:PORT]` that a registry may lead to although its address is private; may be repeated")
	f.DurationVar(&o.Timeout, "timeout", 2*time.Hour, "longest `duration` of the transfer")
	f.StringArrayVarP(&env, "env", "e", nil, "environment of sessions on top of the image's, `KEY=VALUE`; may be repeated")
	f.StringVar(&b.AgentBinary, "agent", "", "guest agent `file` (default: coppice-guest beside this program)")
	f.BoolVar(&b.Rebuild, "rebuild", false, "unpack the layers again")
	f.BoolVarP(&verbose, "verbose", "v", false, "show the output of the programs that make the image")
	return c
}

// derivedName is the name of an image for which the operator gives none. It fails before anything is fetched if the name is
// another image's.
func derivedName(dir, reference string) (name string, derived bool, err error) {
	name, repository, err := registry.NameFor(reference)
	if err != nil {
		return "", false, err
	}
	store, err := images.Open(dir)
	if err != nil {
		return "", false, err
	}
	return name, true, store.CheckDerivedName(name, repository)
}

// pulledLine is a pulled image for programs.
type pulledLine struct {
	imageLine
	Reference      string         `json:"reference"`
	ManifestDigest core.Digest    `json:"manifest_digest"`
	Layers         int            `json:"layers"`
	LayersKept     int            `json:"layers_kept"` // they were in the store
	FetchedBytes   int64          `json:"fetched_bytes"`
	Config         *images.Config `json:"config"`
}

func pullImage(ctx context.Context, a *cli.App, dir string, o registry.Options, b build.Options) (_ pulledLine, err error) {
	store, err := images.Open(dir)
	if err != nil {
		return pulledLine{}, err
	}
	if err := b.CheckHost(); err != nil { // before gigabytes are fetched for nothing
		return pulledLine{}, err
	}
	layers, err := store.Layers(ctx)
	if err != nil {
		return pulledLine{}, err
	}
	defer func() { err = errors.Join(err, layers.Close()) }()
	steps := &buildSteps{a: a}
	fetching := &pullSteps{steps: steps}
	shown := func() {}
	if !a.JSON {
		o.Progress = fetching.show
		b.Progress = steps.show
		shown = a.WorkingOn(ctx, fetching.current)
	}
	began := time.Now()
	pulled, err := registry.Pull(ctx, layers, o)
	fetching.end()
	if err != nil {
		shown()
		return pulledLine{}, err
	}
	if !a.JSON {
		steps.show(build.Event{
			Stage: "pull", Done: true, Duration: time.Since(began),
			Msg: fmt.Sprintf("%s: %s fetched, %d of %d layers were there", pulled.Reference, render.Size(pulled.Fetched), pulled.Kept, len(pulled.Layers)),
		})
	}
	b.Pulled = &build.Pulled{Reference: pulled.Reference, Repository: pulled.Repository, Manifest: pulled.Manifest, Layers: pulled.Layers, Config: pulled.Config, Store: layers}
	img, err := build.Image(ctx, store, b)
	shown()
	if err != nil {
		return pulledLine{}, err
	}
	return pulledLine{imageFacts(img), pulled.Reference, pulled.Manifest, len(pulled.Layers), pulled.Kept, pulled.Fetched, img.Config}, nil
}

// pullSteps shows how far a pull is: on a terminal below the lines of the steps, and notes in lines of their own.
type pullSteps struct {
	steps *buildSteps

	mu    sync.Mutex // guards what follows
	now   registry.Progress
	ended bool
}

func (s *pullSteps) show(p registry.Progress) {
	s.mu.Lock()
	s.now = p
	s.mu.Unlock()
	if p.Note != "" {
		s.steps.show(build.Event{Stage: "pull", Msg: p.Note, Done: true})
	}
}

func (s *pullSteps) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
}

func (s *pullSteps) current() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.ended:
		return s.steps.current()
	case s.now.Layers == 0:
		return "asking the registry"
	}
	return fmt.Sprintf("fetching layers: %d of %d, %s of %s", s.now.LayersDone, s.now.Layers, render.Size(s.now.BytesDone), render.Size(s.now.Bytes))
}
