package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// onPath runs do for the checkpoint of CHECKPOINT:PATH.
func onPath(a *cli.App, c *cobra.Command, arg string, do func(client *coppice.Client, id, path string) error) error {
	ref, path, ok := strings.Cut(arg, ":")
	if !ok || ref == "" || !strings.HasPrefix(path, "/") {
		return exit.Misuse(fmt.Errorf("%q is not CHECKPOINT:/absolute/path", arg))
	}
	client, cp, err := find.ClientAndCheckpoint(c.Context(), a, ref)
	if err != nil {
		return err
	}
	return do(client, cp.ID, path)
}

func newCatCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "cat CHECKPOINT:PATH",
		Short: "Print a file of a checkpoint; no machine is started for it",
		Long: `Print a file of a checkpoint, as its guest saw it when it was captured. No machine is started for it. Files that a guest keeps in memory
only, such as those in /run and /proc, are not there.`,
		Example: "  coppice ckpt cat before-upgrade:/etc/debian_version",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return onPath(a, c, args[0], func(client *coppice.Client, id, path string) error {
				body, info, err := client.OpenCheckpointFile(c.Context(), id, path)
				if err != nil {
					return err
				}
				defer body.Close()
				n, err := io.Copy(a.Stdout, body)
				if err == nil && n < info.Size {
					err = errors.New("the server broke off before the end of the file")
				}
				return err
			})
		},
	}
}

// listFiles lists a directory of a checkpoint, or shows what else is there.
func listFiles(a *cli.App, c *cobra.Command, arg string) error {
	return onPath(a, c, arg, func(client *coppice.Client, id, path string) error {
		info, err := client.StatCheckpointFile(c.Context(), id, path)
		if err != nil {
			return err
		}
		list := coppice.FileList{Path: path, Entries: []coppice.FileInfo{info}}
		if info.Type == coppice.FileTypeDir || info.Type == coppice.FileTypeSymlink && strings.HasSuffix(path, "/") {
			if list, err = client.ListCheckpointFiles(c.Context(), id, path); err != nil {
				return err
			}
		}
		err = a.Print(list, func(w io.Writer) error { return printFiles(w, list) })
		if list.Truncated {
			fmt.Fprintf(a.Stderr, "%d entries are shown; there are more\n", len(list.Entries))
		}
		if list.Unreadable > 0 {
			fmt.Fprintf(a.Stderr, "%d entries are left out: the guest has damaged them on its disk\n", list.Unreadable)
		}
		return err
	})
}

func printFiles(w io.Writer, list coppice.FileList) error {
	rows := make([][]string, 0, len(list.Entries))
	for _, f := range list.Entries {
		name := f.Name
		switch f.Type {
		case coppice.FileTypeDir:
			name += "/"
		case coppice.FileTypeSymlink:
			name += " -> " + f.Target
		case coppice.FileTypeFile, coppice.FileTypeOther:
		}
		rows = append(rows, []string{string(f.Type), f.Mode, fmt.Sprintf("%d:%d", f.UID, f.GID), fmt.Sprint(f.Size), render.Moment(f.MTime), name})
	}
	return render.Table(w, "TYPE MODE OWNER SIZE MODIFIED NAME", rows)
}
