package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const copyHelp = `Copy a file or directory into a workspace, out of it, or from one workspace to another. WORKSPACE:PATH has an absolute PATH; anything else
is a local path (./name if it has a colon).

If DESTINATION is a directory, the copy goes into it; otherwise the copy gets that name. "DIRECTORY/." means the content of the directory.
Inside a workspace, root owns the copies; outside, the caller owns them. What goes from one workspace to another passes through this machine
and is not stored here.

"-" is standard input as SOURCE, and standard output as DESTINATION. It is the content of one file; with --tar, it is a tar archive: of a
file or directory when it is written, and of what goes into the directory DESTINATION when it is read.

The command does not trust the workspace and writes nothing outside of DESTINATION. It follows links in the path that you type. Below
that path it replaces a link that is in the way or has the name of a copied file. It leaves out devices, sockets and pipes, and the content
of pseudo file systems such as /proc and /sys. It also leaves out symbolic links that lead out of the copied tree, unless --outside-links
is given. It copies at most 10 GiB unless --max-bytes says more. What is larger than the disk that it goes to is refused at once.`

func newCopyCommand(a *cli.App) *cobra.Command {
	var options coppice.CopyOptions
	var archive bool
	c := &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files and directories into, out of or between workspaces",
		Long:  copyHelp,
		Example: "  coppice ws cp ./src demo:/workspace\n  coppice ws cp demo:/workspace/out.txt .\n  coppice ws cp demo:/etc/. ./etc\n  coppice ws cp demo:/workspace second:/workspace\n" +
			"  coppice ws cp demo:/etc/hosts - | grep local\n  tar c . | coppice ws cp --tar - demo:/workspace",
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			from, to := endOf(args[0]), endOf(args[1])
			switch {
			case !from.remote() && !to.remote():
				return exit.Misuse(errors.New("at least one of SOURCE and DESTINATION must be WORKSPACE:/absolute/path (write ./name for a local name with a colon)"))
			case archive && !from.stream && !to.stream:
				return exit.Misuse(errors.New("--tar goes with - as SOURCE or DESTINATION"))
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			for _, end := range []*copyEnd{&from, &to} {
				if err := end.find(c.Context(), client); err != nil {
					return err
				}
			}
			if err := checkFit(c.Context(), client, from, to); err != nil {
				return err
			}
			var copied atomic.Int64
			options.Progress = copied.Store
			began := time.Now()
			done := a.WorkingOn(c.Context(), func() string { return "copying " + render.Size(copied.Load()) })
			got, err := copyBetween(c.Context(), a, client, from, to, archive, options)
			done()
			if err != nil {
				return err
			}
			return printCopied(a, got, time.Since(began), to.stream)
		},
	}
	f := c.Flags()
	f.BoolVar(&archive, "tar", false, "- is a tar archive instead of the content of one file")
	f.Int64Var(&options.MaxBytes, "max-bytes", coppice.DefaultCopyBytes, "copy at most this many `bytes` out of a workspace")
	f.IntVar(&options.MaxEntries, "max-entries", coppice.DefaultCopyEntries, "copy at most this `number` of files, directories and links out of a workspace")
	f.BoolVar(&options.OutsideLinks, "outside-links", false, "keep symbolic links that lead out of the copied tree")
	return c
}

// copyEnd is one end of a copy: a path in a workspace, a local path, or this program's standard input or output.
type copyEnd struct {
	workspace string // as the user named it, and its id once it was found
	path      string
	stream    bool
}

func endOf(arg string) copyEnd {
	if ref, path, ok := remotePath(arg); ok {
		return copyEnd{workspace: ref, path: path}
	}
	return copyEnd{path: arg, stream: arg == "-"}
}

func (e *copyEnd) remote() bool { return e.workspace != "" }

func (e *copyEnd) find(ctx context.Context, client *coppice.Client) error {
	if !e.remote() {
		return nil
	}
	ws, err := find.Workspace(ctx, client, e.workspace)
	e.workspace = ws.ID
	return err
}

func copyBetween(ctx context.Context, a *cli.App, client *coppice.Client, from, to copyEnd, archive bool, options coppice.CopyOptions) (coppice.Copied, error) {
	switch {
	case from.remote() && to.remote():
		return client.CopyAcross(ctx, from.workspace, from.path, to.workspace, to.path, options)
	case from.stream:
		return copyIn(ctx, client, a.Stdin, to, archive, options)
	case to.stream:
		return copyOut(ctx, client, from, a.Stdout, archive, options)
	case from.remote():
		return client.CopyFromWith(ctx, from.workspace, from.path, to.path, options)
	}
	n, err := client.CopyToWith(ctx, to.workspace, from.path, to.path, options)
	return coppice.Copied{Bytes: n}, err
}

// copyIn writes standard input into a file of a workspace, or unpacks it there.
func copyIn(ctx context.Context, client *coppice.Client, in io.Reader, to copyEnd, archive bool, options coppice.CopyOptions) (got coppice.Copied, err error) {
	counted := &counter{Reader: in, tell: options.Progress}
	if archive {
		_, err = client.UploadTar(ctx, to.workspace, to.path, counted)
	} else {
		_, err = client.WriteFile(ctx, to.workspace, to.path, counted, coppice.WriteOptions{})
	}
	return coppice.Copied{Bytes: counted.n}, err
}

// copyOut writes a file of a workspace to standard output, or a file or directory as an archive.
func copyOut(ctx context.Context, client *coppice.Client, from copyEnd, out io.Writer, archive bool, options coppice.CopyOptions) (coppice.Copied, error) {
	var body io.ReadCloser
	var err error
	if archive {
		body, err = client.DownloadTar(ctx, from.workspace, from.path)
	} else {
		body, _, err = client.OpenFile(ctx, from.workspace, from.path)
	}
	if err != nil {
		return coppice.Copied{}, err
	}
	defer body.Close()
	counted := &counter{Reader: body, tell: options.Progress}
	_, err = io.Copy(out, io.LimitReader(counted, options.MaxBytes+1))
	if err == nil && counted.n > options.MaxBytes {
		err = fmt.Errorf("the data exceeds the bound on copied bytes, %d; to copy it all, raise --max-bytes", options.MaxBytes)
	}
	return coppice.Copied{Bytes: counted.n}, err
}

// counter counts what is read and tells how much it was.
type counter struct {
	io.Reader
	n    int64
	tell func(int64)
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += int64(n)
	c.tell(c.n)
	return n, err
}

// printCopied says what was copied. Where standard output is the copy, nothing else goes there.
func printCopied(a *cli.App, got coppice.Copied, took time.Duration, streamed bool) error {
	if got.LeftOut > 0 {
		fmt.Fprintf(a.Stderr, "%d links and special files were left out: they lead outside or mean nothing there (--outside-links keeps symbolic links)\n", got.LeftOut)
	}
	if len(got.Pseudo) > 0 {
		fmt.Fprintf(a.Stderr, "the content of pseudo file systems was left out: %s\n", pseudoNames(got))
	}
	if streamed {
		return nil
	}
	return a.Print(map[string]any{"bytes": got.Bytes, "left_out": got.LeftOut, "left_out_pseudo": got.Pseudo, "duration_ms": took.Milliseconds()}, func(io.Writer) error {
		fmt.Fprintf(a.Stderr, "%s in %.1f s\n", render.Size(got.Bytes), took.Seconds())
		return nil
	})
}

// pseudoNames lists what the guest left out. The names are the guest's.
func pseudoNames(got coppice.Copied) string {
	names := foreign.Visible(strings.Join(got.Pseudo, ", "))
	if got.MorePseudo > 0 {
		names += fmt.Sprintf(" and %d more", got.MorePseudo)
	}
	return names
}

// remotePath splits WORKSPACE:/path.
func remotePath(arg string) (ref, path string, ok bool) {
	ref, path, found := strings.Cut(arg, ":")
	if !found || ref == "" || strings.ContainsAny(ref, "/.") || !strings.HasPrefix(path, "/") {
		return "", "", false
	}
	return ref, path, true
}
