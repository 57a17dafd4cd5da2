package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const helpUser = "do it as this `user` of the workspace, with the user's rights; default root"

// onPath runs do for the workspace of WORKSPACE:PATH.
func onPath(a *cli.App, c *cobra.Command, arg string, do func(client *coppice.Client, id, path string) error) error {
	ref, path, ok := remotePath(arg)
	if !ok {
		return exit.Misuse(fmt.Errorf("%q is not WORKSPACE:/absolute/path", arg))
	}
	client, err := a.Client()
	if err != nil {
		return err
	}
	ws, err := find.Workspace(c.Context(), client, ref)
	if err != nil {
		return err
	}
	return do(client, ws.ID, path)
}

func newMakeDirCommand(a *cli.App) *cobra.Command {
	var req coppice.MakeDirectoryRequest
	c := &cobra.Command{
		Use:     "mkdir WORKSPACE:PATH",
		Short:   "Make a directory in a workspace",
		Example: "  coppice ws mkdir -p demo:/workspace/a/b",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return onPath(a, c, args[0], func(client *coppice.Client, id, path string) error {
				req.Path = path
				made, err := client.MakeDirectory(c.Context(), id, req)
				if err != nil {
					return err
				}
				return a.Print(made, func(io.Writer) error { return nil })
			})
		},
	}
	f := c.Flags()
	f.BoolVarP(&req.Parents, "parents", "p", false, "make missing directories above it too; it is no error if it exists")
	f.StringVarP(&req.Mode, "mode", "m", "", "permission `bits`, octal; default 0755")
	f.StringVarP(&req.User, "user", "u", "", helpUser)
	return c
}

func newMoveCommand(a *cli.App) *cobra.Command {
	var req coppice.RenameFileRequest
	c := &cobra.Command{
		Use:     "mv WORKSPACE:PATH PATH",
		Short:   "Move a file or directory of a workspace",
		Example: "  coppice ws mv demo:/workspace/a /workspace/b",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			return onPath(a, c, args[0], func(client *coppice.Client, id, path string) error {
				req.From, req.To = path, args[1]
				file, err := client.RenameFile(c.Context(), id, req)
				if err != nil {
					return err
				}
				return a.Print(file, func(io.Writer) error { return nil })
			})
		},
	}
	f := c.Flags()
	f.BoolVarP(&req.NoReplace, "no-clobber", "n", false, "refuse if something is at the new path")
	f.BoolVarP(&req.Mkdirs, "parents", "p", false, "make missing directories above the new path")
	f.StringVarP(&req.User, "user", "u", "", helpUser)
	return c
}

func newStatCommand(a *cli.App) *cobra.Command {
	opts := coppice.StatOptions{XAttrs: true}
	c := &cobra.Command{
		Use:   "stat WORKSPACE:PATH",
		Short: "Describe a file or directory of a workspace",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return onPath(a, c, args[0], func(client *coppice.Client, id, path string) error {
				file, err := client.Stat(c.Context(), id, path, opts)
				if err != nil {
					return err
				}
				return a.Print(file, func(w io.Writer) error { return printFile(w, file) })
			})
		},
	}
	f := c.Flags()
	f.BoolVarP(&opts.Follow, "follow", "L", false, "describe what a symbolic link leads to")
	f.StringVarP(&opts.User, "user", "u", "", helpUser)
	return c
}

func printFile(w io.Writer, f coppice.FileInfo) error {
	attributes := render.Pairs(f.XAttrs)
	if f.XAttrsTruncated {
		attributes += " (and others)"
	}
	return render.Facts(w,
		"path", f.Path, "type", string(f.Type), "target", f.Target, "size", fmt.Sprint(f.Size), "mode", f.Mode,
		"owner", ownerText(f.UID, f.Owner), "group", ownerText(f.GID, f.Group), "modified", render.Moment(f.MTime), "attributes", attributes,
	)
}

func ownerText(id int, name string) string {
	if name == "" {
		return fmt.Sprint(id)
	}
	return fmt.Sprintf("%d (%s)", id, name)
}

func newWatchCommand(a *cli.App) *cobra.Command {
	var req coppice.CreateWatchRequest
	c := &cobra.Command{
		Use:   "watch WORKSPACE:PATH",
		Short: "Print the changes of a directory of a workspace as they happen",
		Long: `Print the changes of a directory of a workspace as they happen, until Ctrl-C or the end of the directory.

With --json, each line is an event.`,
		Example: "  coppice ws watch -r demo:/workspace",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return onPath(a, c, args[0], func(client *coppice.Client, id, path string) (err error) {
				ctx := c.Context()
				req.Path = path
				watch, err := client.CreateWatch(ctx, id, req)
				if err != nil {
					return err
				}
				defer func() { err = errors.Join(err, endWatch(ctx, client, id, watch.ID)) }()
				if watch.Incomplete {
					fmt.Fprintln(a.Stderr, "coppice: some directories are not watched: they are too many, or the user may not read them")
				}
				for e, err := range client.WatchEvents(ctx, id, watch.ID, 0) {
					if err != nil {
						return err
					}
					if err := printEvent(a, e); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	f := c.Flags()
	f.BoolVarP(&req.Recursive, "recursive", "r", false, "watch the directories below it too")
	f.StringVarP(&req.User, "user", "u", "", helpUser)
	return c
}

func printEvent(a *cli.App, e coppice.WatchEvent) error {
	if a.JSON {
		return foreign.EncodeJSON(a.Stdout, e, "")
	}
	_, err := fmt.Fprintf(a.Stdout, "%-8s %s\n", e.Type, foreign.Visible(e.Path))
	return err
}

// endWatch ends a watch, also after Ctrl-C.
func endWatch(ctx context.Context, client *coppice.Client, id, watch string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	return client.DeleteWatch(ctx, id, watch)
}
