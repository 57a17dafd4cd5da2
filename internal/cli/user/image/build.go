// Package image has the part of "coppice image build" that asks a server: a Dockerfile and a directory
// become an image of the project.
package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	ignoreFile = ".dockerignore"
	logEvery   = 500 * time.Millisecond
)

// options are the flags of a build on a server.
type options struct {
	file, target        string
	args, allow         []string
	start, readyCommand string
	readyPort           int
	noCache, allowAll   bool
	vcpus, memory, disk int
	readyTimeout        time.Duration
}

// ExtendBuild gives the command that builds images on this host the flags of a build on a server. With a directory, or with --file, the
// server builds; otherwise this host does.
func ExtendBuild(a *cli.App, c *cobra.Command) *cobra.Command {
	here := c.RunE
	var o options
	local, remote := flagsOf(c.Flags()), o.flags()
	c.Flags().AddFlagSet(remote)
	c.Use = "build [DIR]"
	c.Short = "Build an image: from a Dockerfile on the server, or from Debian packages or a tar on this host"
	c.Long = `Build an image. With a directory, the server builds it from the Dockerfile of the directory: the image belongs to the project, every runner
can have it, and neither root nor a docker engine is needed. The files of the directory are sent, without those that .dockerignore names. Each
instruction that changes something is a checkpoint; a second build begins where something has changed. --start keeps a program running in the
image, so that each workspace from it begins with it.

Without a directory and without --file, this host builds an image for its runner.
` + strings.Replace(c.Long, "Build an image from", "It comes from", 1)
	c.Example = "  coppice image build . --name app\n" +
		"  coppice image build . -f deploy/Dockerfile --name app --build-arg VERSION=3 --start \"./serve\" --ready-port 8080\n" + c.Example
	c.Args = cobra.MaximumNArgs(1)
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 && !c.Flags().Changed("file") {
			for _, name := range flagsOf(remote) {
				if c.Flags().Changed(name) {
					return exit.Misuse(fmt.Errorf("--%s is for a build from a Dockerfile: give the directory, such as \".\"", name)) //nolint:err113 // a message
				}
			}
			return here(c, args)
		}
		for _, name := range local {
			if name != "name" && c.Flags().Changed(name) {
				return exit.Misuse(fmt.Errorf("--%s is for a build on this host, without a directory and without --file", name)) //nolint:err113 // a message
			}
		}
		dir := "."
		if len(args) == 1 {
			dir = args[0]
		}
		name, err := c.Flags().GetString("name")
		if err != nil {
			return err
		}
		if !c.Flags().Changed("name") {
			return exit.Misuse(errors.New("--name is missing: the image needs a name in the project")) //nolint:err113 // a message
		}
		return o.build(c, a, dir, name)
	}
	return c
}

func flagsOf(set *pflag.FlagSet) (names []string) {
	set.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return names
}

// flags are those that a build on a server has and one on this host has not.
func (o *options) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.StringVarP(&o.file, "file", "f", "", "Dockerfile, a `file` (default: Dockerfile in DIR)")
	f.StringVar(&o.target, "target", "", "`stage` of the Dockerfile")
	f.StringArrayVar(&o.args, "build-arg", nil, "value of an ARG, `KEY=VALUE`; may be repeated")
	f.StringVar(&o.start, "start", "", "`command` that the image keeps running")
	f.IntVar(&o.readyPort, "ready-port", 0, "wait until the command of --start listens on this `port`")
	f.StringVar(&o.readyCommand, "ready-command", "", "wait, after --start, until this `command` ends with status 0")
	f.DurationVar(&o.readyTimeout, "ready-timeout", 0, "how long to wait for --ready-port or --ready-command (default 2m)")
	f.BoolVar(&o.noCache, "no-cache", false, "carry out every instruction again")
	f.StringArrayVar(&o.allow, "allow", nil, "let the build reach this instead of all package bundles: `HOST[:PORT]`, *.DOMAIN, tcp://HOST:PORT or bundle:NAME; may be repeated")
	f.BoolVar(&o.allowAll, "allow-all", false, "let the build reach everything")
	f.IntVar(&o.vcpus, "vcpus", 0, "virtual CPUs (default: the server's)")
	f.IntVar(&o.memory, "memory", 0, "memory in `MiB` (default: the server's)")
	f.IntVar(&o.disk, "disk", 0, "disk in `GiB` (default: the server's)")
	return f
}

func (o *options) request(name string) (coppice.BuildImageRequest, error) {
	args, err := argument.KeyValues("--build-arg", o.args)
	req := coppice.BuildImageRequest{Name: name, Target: o.target, BuildArgs: args, NoCache: o.noCache}
	for from, to := range map[*int]**int{&o.vcpus: &req.Resources.VCPUs, &o.memory: &req.Resources.MemoryMiB, &o.disk: &req.Resources.DiskGiB} {
		if *from != 0 {
			*to = from
		}
	}
	if o.allowAll {
		req.Network.EgressPolicy = coppice.EgressAllowAll
	}
	if len(o.allow) > 0 {
		req.Network.EgressPolicy, req.Network.Allow = coppice.EgressDenyAll, &o.allow
	}
	waits := o.readyPort != 0 || o.readyCommand != ""
	switch {
	case o.start == "" && waits:
		return req, exit.Misuse(errors.New("--ready-port and --ready-command wait for the command of --start, which is missing")) //nolint:err113 // a message
	case o.readyTimeout != 0 && !waits:
		return req, exit.Misuse(errors.New("--ready-timeout is for --ready-port or --ready-command")) //nolint:err113 // a message
	case o.start != "":
		req.Start = &coppice.BuildStart{Command: o.start}
		if waits {
			req.Start.Ready = &coppice.BuildReady{Port: o.readyPort, Command: o.readyCommand, TimeoutSeconds: int(o.readyTimeout.Seconds())}
		}
	}
	return req, err
}

func (o *options) build(c *cobra.Command, a *cli.App, dir, name string) error {
	req, err := o.request(name)
	if err != nil {
		return err
	}
	file := o.file
	if file == "" {
		file = filepath.Join(dir, "Dockerfile")
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("the Dockerfile: %w", err)
	}
	req.Dockerfile = string(text)
	client, err := a.Client()
	if err != nil {
		return err
	}
	ctx := c.Context()
	req.Context = "build-" + strings.ToLower(rand.Text())
	sent := a.Working(ctx, "sending the files of "+dir)
	from, to := io.Pipe()
	go func() { _ = to.CloseWithError(Pack(ctx, dir, to)) }()
	_, err = client.PutUpload(ctx, req.Context, from)
	_ = from.Close()
	sent()
	if err != nil {
		return err
	}
	defer func() { _ = client.DeleteUpload(context.WithoutCancel(ctx), req.Context) }() // it expires otherwise
	op, err := client.StartBuild(ctx, req)
	if err != nil {
		return err
	}
	if err := follow(ctx, client, op.ID, a.Stderr); err != nil {
		return err
	}
	if op, err = client.WaitOperation(ctx, op.ID); err != nil {
		return err
	}
	if op.Problem != nil {
		return fmt.Errorf("the build has failed: %s (%s)", op.Problem.Message, op.Problem.Code) //nolint:err113 // the server's words
	}
	image, err := client.BuiltImage(ctx, name)
	if err != nil {
		return err
	}
	return a.Print(image, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "%s  %s  %d steps, %d from the cache\n", image.Name, image.CheckpointID, image.Build.Steps, image.Build.CachedSteps)
		return err
	})
}

// follow shows the log of a build until the build ends.
func follow(ctx context.Context, client *coppice.Client, id coppice.OperationID, to io.Writer) error {
	for at := int64(0); ; {
		op, err := client.Operation(ctx, id)
		if err != nil {
			return err
		}
		text, next, err := client.OperationLog(ctx, id, at)
		if err != nil {
			return err
		}
		if _, err := to.Write(text); err != nil {
			return err
		}
		at = next
		switch {
		case len(text) > 0:
			continue
		case op.Done():
			return nil
		}
		timer := time.NewTimer(logEvery)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
	}
}

// Pack writes the files of a directory as a tar with gzip, without those that its .dockerignore names. Links are not followed.
func Pack(ctx context.Context, dir string, to io.Writer) error {
	ignored, err := os.ReadFile(filepath.Join(dir, ignoreFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	patterns, err := ignorefile.ReadAll(bytes.NewReader(ignored))
	if err != nil {
		return fmt.Errorf("%s: %w", ignoreFile, err)
	}
	ignore, err := patternmatcher.New(patterns)
	if err != nil {
		return fmt.Errorf("%s: %w", ignoreFile, err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	z, err := gzip.NewWriterLevel(to, gzip.BestSpeed)
	if err != nil {
		return err
	}
	w := tar.NewWriter(z)
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		out, err := ignore.MatchesOrParentMatches(name)
		if err != nil {
			return err
		}
		if out && name != ignoreFile {
			if d.IsDir() && !ignore.Exclusions() {
				return fs.SkipDir
			}
			return nil
		}
		return pack(root, name, w)
	})
	if err != nil {
		return err
	}
	return errors.Join(w.Close(), z.Close())
}

func pack(root *os.Root, name string, w *tar.Writer) error {
	info, err := root.Lstat(name)
	if err != nil {
		return err
	}
	link := ""
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		if link, err = root.Readlink(name); err != nil {
			return err
		}
	case !info.IsDir() && !info.Mode().IsRegular():
		return nil // sockets, pipes and devices
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname = filepath.ToSlash(name), 0, 0, "", ""
	if info.IsDir() {
		h.Name += "/"
	}
	if err := w.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
		return err
	}
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return errors.Join(err, f.Close())
}
