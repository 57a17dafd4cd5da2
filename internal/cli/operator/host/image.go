package host

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/cli/terminal"
)

// NewImageCommand makes the command "coppice image".
func NewImageCommand(a *cli.App) *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:   "image",
		Short: "Build, pull and manage guest images on this host",
		Long: `Build, pull and manage guest images on this host. An image has a kernel, an initrd with the guest agent, and a root file system. Building and
pulling need root.`,
	}
	c.PersistentFlags().StringVar(&dir, "images-dir", imagesDir(a), "image store `directory` (COPPICE_IMAGES_DIR, else images in COPPICE_DATA_DIR)")
	c.AddCommand(newImageBuildCommand(a, &dir), newImagePullCommand(a, &dir), newImageListCommand(a, &dir), newImageRemoveCommand(a, &dir))
	return c
}

func newImageBuildCommand(a *cli.App, dir *string) *cobra.Command {
	var o build.Options
	var env []string
	var verbose, noTools bool
	var authorities []string
	c := &cobra.Command{
		Use:   "build",
		Short: "Build an image from Debian packages, or from the output of docker export",
		Long: `Build an image from Debian packages, or from the root file system that docker export wrote. Cached parts are not built again. If nothing
changed, the command returns the existing image.

An image from Debian packages has Python with pip and venv, git, curl, ping, less and an editor (nano). --no-tools leaves out ping, pip, venv,
less and nano.

--guest-ca-file makes the guests of the image trust an authority of yours, such as that of a company whose network intercepts TLS.`,
		Example: "  coppice image build\n  coppice image build --name demo --package python3-toolz\n  docker export $(docker create alpine) | coppice image build --name alpine --from-tar -",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var err error
			if o.Env, err = argument.KeyValues("--env", env); err != nil {
				return err
			}
			if o.AgentBinary, err = agentBinary(o.AgentBinary); err != nil {
				return err
			}
			store, err := images.Open(*dir)
			if err != nil {
				return err
			}
			for _, file := range authorities {
				text, err := os.ReadFile(file)
				if err != nil {
					return core.Wrapf(err, core.Invalid, core.CodeInvalidField, "--guest-ca-file: %v", err)
				}
				o.Authorities += string(text) + "\n"
			}
			o.Stdin = a.Stdin
			if !noTools && o.FromTar == "" {
				o.Packages = append(o.Packages, build.ToolPackages()...)
			}
			if verbose {
				o.Log = a.Stderr
			}
			shown := func() {}
			if !a.JSON {
				steps := &buildSteps{a: a}
				o.Progress = steps.show
				if !verbose {
					shown = a.WorkingOn(c.Context(), steps.current)
				}
			}
			img, err := build.Image(c.Context(), store, o)
			shown()
			if err != nil {
				return err
			}
			return a.Print(imageFacts(img), func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s  %s  kernel %s, %s\n", img.Name, img.Digest, img.KernelRelease, render.Size(img.SizeBytes))
				return err
			})
		},
	}
	f := c.Flags()
	f.StringVar(&o.Name, "name", images.DefaultName, "`name` of the image")
	f.StringSliceVarP(&o.Packages, "package", "p", nil, "Debian `package` on top of the base; may be repeated")
	f.StringVar(&o.FromTar, "from-tar", "", "root file system as docker export writes it: a `file`, or - for standard input")
	f.StringArrayVarP(&env, "env", "e", nil, "default environment of sessions, `KEY=VALUE`; may be repeated")
	f.StringVar(&o.Suite, "suite", "", "Debian `release` (default: the host's)")
	f.StringVar(&o.AgentBinary, "agent", "", "guest agent `file` (default: coppice-guest beside this program)")
	f.StringArrayVar(&authorities, "guest-ca-file", nil, "PEM `file` with certificate authorities that guests trust, too; may be repeated")
	f.BoolVar(&noTools, "no-tools", false, "leave out "+strings.Join(build.ToolPackages(), ", "))
	f.BoolVar(&o.Rebuild, "rebuild", false, "build every part again")
	f.BoolVarP(&verbose, "verbose", "v", false, "show the output of the programs that the build runs")
	c.MarkFlagsMutuallyExclusive("from-tar", "package")
	c.MarkFlagsMutuallyExclusive("from-tar", "guest-ca-file")
	return c
}

// agentBinary finds the guest agent: the named one, or the one beside this program.
func agentBinary(path string) (string, error) {
	if path == "" {
		self, err := os.Executable()
		if err != nil {
			return "", err
		}
		path = filepath.Join(filepath.Dir(self), "coppice-guest")
	}
	if _, err := os.Stat(path); err != nil {
		return "", core.Wrapf(err, core.Invalid, core.CodeInvalidField, "there is no guest agent at %s; build it with \"make build\", or name another with --agent", path)
	}
	return filepath.Abs(path)
}

// buildSteps shows the steps of a build: each in a line, and on a terminal the one that takes longest, with its time, below them.
type buildSteps struct {
	a *cli.App

	mu    sync.Mutex // guards what follows
	begun []build.Event
}

func (s *buildSteps) show(e build.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	same := func(other build.Event) bool { return other.Stage == e.Stage }
	switch {
	case e.Done:
		s.begun = slices.DeleteFunc(s.begun, same)
	case !slices.ContainsFunc(s.begun, same):
		s.begun = append(s.begun, e)
	}
	if _, ok := terminal.Descriptor(s.a.Stderr); ok {
		fmt.Fprint(s.a.Stderr, "\r\x1b[K") // the line of current
	}
	fmt.Fprintln(s.a.Stderr, buildStep(e))
}

// current is the step that began first and still goes on.
func (s *buildSteps) current() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.begun) == 0 {
		return "building"
	}
	return s.begun[0].Msg
}

func buildStep(e build.Event) string {
	if e.Done {
		return fmt.Sprintf("%-8s %s (%.1f s)", e.Stage, e.Msg, e.Duration.Seconds())
	}
	return fmt.Sprintf("%-8s %s", e.Stage, e.Msg)
}

// imageLine is an image for programs.
type imageLine struct {
	Name          string      `json:"name"`
	Digest        core.Digest `json:"digest"`
	Source        string      `json:"source"`
	Packages      []string    `json:"packages,omitempty"` // asked for
	KernelRelease string      `json:"kernel_release"`
	SizeBytes     int64       `json:"size_bytes"`
	CreatedAt     time.Time   `json:"created_at"`
}

func imageFacts(img images.Image) imageLine {
	return imageLine{img.Name, img.Digest, img.Recipe.Source, img.Recipe.Requested, img.KernelRelease, img.SizeBytes, img.CreatedAt}
}

func newImageListCommand(a *cli.App, dir *string) *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the images of this host",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			store, err := images.Open(*dir)
			if err != nil {
				return err
			}
			list, damaged := store.List()
			lines := []imageLine{}
			for _, img := range list {
				lines = append(lines, imageFacts(img))
			}
			err = a.Print(lines, func(w io.Writer) error { return printImages(w, time.Now(), lines) })
			return errors.Join(err, damaged)
		},
	}
}

func printImages(w io.Writer, now time.Time, list []imageLine) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No images. Build one: coppice image build; or pull one: coppice image pull python:3.12-slim")
		return err
	}
	rows := make([][]string, 0, len(list))
	for _, img := range list {
		rows = append(rows, []string{img.Name, img.Digest.Short(), img.Source, img.KernelRelease, render.Size(img.SizeBytes), render.Age(now, img.CreatedAt)})
	}
	return render.Table(w, "NAME DIGEST SOURCE KERNEL SIZE AGE", rows)
}

func newImageRemoveCommand(a *cli.App, dir *string) *cobra.Command {
	return &cobra.Command{
		Use:   "rm IMAGE...",
		Short: "Remove a name, and the image with its last name; or an image by digest",
		Long: `Remove a name, and the image with its last name; or an image with all its names, by digest.

Checkpoints of an image need it: remove it only when none is left.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			store, err := images.Open(*dir)
			if err != nil {
				return err
			}
			removed := []string{}
			failed := argument.Each(args, func(ref string) error {
				if err := store.Remove(c.Context(), ref); err != nil {
					return err
				}
				removed = append(removed, ref)
				return nil
			})
			err = a.Print(removed, func(w io.Writer) error {
				for _, ref := range removed {
					fmt.Fprintf(w, "%s is removed\n", ref)
				}
				return nil
			})
			return errors.Join(failed, err)
		},
	}
}
