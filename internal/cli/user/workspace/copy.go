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

func newCopyCommand(a *cli.App) *cobra.Command {
	var options coppice.CopyOptions
	c := &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files and directories into or out of a workspace",
		Long: `Copy a file or directory into or out of a workspace. One of SOURCE and DESTINATION is WORKSPACE:PATH with an absolute PATH.

If DESTINATION is a directory, the copy goes into it; otherwise the copy gets that name. "DIRECTORY/." means the content of the directory.
Inside a workspace, root owns the copies; outside, the caller owns them.

The command does not trust the workspace and writes nothing outside of DESTINATION. It follows links in the path that you type. Below
that path it replaces a link that is in the way or has the name of a copied file. It leaves out devices, sockets and pipes, and the content
of pseudo file systems such as /proc and /sys. It also leaves out symbolic links that lead out of the copied tree, unless --outside-links
is given. It copies at most 10 GiB unless --max-bytes says more.`,
		Example: "  coppice ws cp ./src demo:/workspace\n  coppice ws cp demo:/workspace/out.txt .\n  coppice ws cp demo:/etc/. ./etc",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			from, fromPath, fromRemote := remotePath(args[0])
			to, toPath, toRemote := remotePath(args[1])
			if fromRemote == toRemote {
				return exit.Misuse(errors.New("one of SOURCE and DESTINATION must be WORKSPACE:/absolute/path, and the other local (./name if it has a colon)"))
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ctx := c.Context()
			began := time.Now()
			var copied atomic.Int64
			options.Progress = copied.Store
			done := a.WorkingOn(ctx, func() string { return "copying " + render.Size(copied.Load()) })
			var n int64
			var got coppice.Copied
			if toRemote {
				n, err = copyWith(ctx, client, to, func(id string) (int64, error) { return client.CopyToWith(ctx, id, args[0], toPath, options) })
			} else {
				n, err = copyWith(ctx, client, from, func(id string) (int64, error) {
					var err error
					got, err = client.CopyFromWith(ctx, id, fromPath, args[1], options)
					return got.Bytes, err
				})
			}
			done()
			if err != nil {
				return err
			}
			if got.LeftOut > 0 {
				fmt.Fprintf(a.Stderr, "%d links and special files were left out: they lead outside or mean nothing here (--outside-links keeps symbolic links)\n", got.LeftOut)
			}
			if len(got.Pseudo) > 0 {
				fmt.Fprintf(a.Stderr, "the content of pseudo file systems was left out: %s\n", pseudoNames(got))
			}
			return a.Print(map[string]any{"bytes": n, "left_out": got.LeftOut, "left_out_pseudo": got.Pseudo, "duration_ms": time.Since(began).Milliseconds()}, func(io.Writer) error {
				fmt.Fprintf(a.Stderr, "%s in %.1f s\n", render.Size(n), time.Since(began).Seconds())
				return nil
			})
		},
	}
	f := c.Flags()
	f.Int64Var(&options.MaxBytes, "max-bytes", coppice.DefaultCopyBytes, "copy at most this many `bytes` out of a workspace")
	f.IntVar(&options.MaxEntries, "max-entries", coppice.DefaultCopyEntries, "copy at most this `number` of files, directories and links out of a workspace")
	f.BoolVar(&options.OutsideLinks, "outside-links", false, "keep symbolic links that lead out of the copied tree")
	return c
}

// pseudoNames lists what the guest left out. The names are the guest's.
func pseudoNames(got coppice.Copied) string {
	names := foreign.Visible(strings.Join(got.Pseudo, ", "))
	if got.MorePseudo > 0 {
		names += fmt.Sprintf(" and %d more", got.MorePseudo)
	}
	return names
}

func copyWith(ctx context.Context, client *coppice.Client, ref string, f func(id string) (int64, error)) (int64, error) {
	ws, err := find.Workspace(ctx, client, ref)
	if err != nil {
		return 0, err
	}
	return f(ws.ID)
}

// remotePath splits WORKSPACE:/path.
func remotePath(arg string) (ref, path string, ok bool) {
	ref, path, found := strings.Cut(arg, ":")
	if !found || ref == "" || strings.ContainsAny(ref, "/.") || !strings.HasPrefix(path, "/") {
		return "", "", false
	}
	return ref, path, true
}
