package host

import (
	"cmp"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/runner/trash"
)

// NewTrashCommand makes the command "coppice runner-trash".
func NewTrashCommand(a *cli.App) *cobra.Command {
	var dataDir string
	c := &cobra.Command{
		Use:   "runner-trash",
		Short: "List the checkpoints that a runner of this host keeps although the database does not know them",
		Long: `List the checkpoints that a runner of this host keeps although the database does not know them. A failover of the database can lose
their rows. The runner removes them after an hour, or earlier if it needs the disk space. A request that names one takes it back.`,
		Example: "  coppice runner-trash --data-dir /var/lib/coppice",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			dir, err := daemon.TrashDir(dataDir)
			if err != nil {
				return err
			}
			list, err := trash.List(dir)
			if err != nil {
				return err
			}
			return a.Print(list, func(w io.Writer) error { return printTrash(w, time.Now(), list) })
		},
	}
	flag := func(c *cobra.Command) *cobra.Command {
		c.Flags().StringVar(&dataDir, "data-dir", cmp.Or(a.Getenv("COPPICE_DATA_DIR"), DefaultDataDir), "the runner's data `directory`")
		return c
	}
	change := func(use, short string, do func(dir string, id core.CheckpointID) error) *cobra.Command {
		return flag(&cobra.Command{
			Use: use + " CHECKPOINT", Short: short, Args: cobra.ExactArgs(1),
			RunE: func(_ *cobra.Command, args []string) error {
				id, err := core.ParseID[core.CheckpointID](args[0])
				if err != nil {
					return err
				}
				dir, err := daemon.TrashDir(dataDir)
				if err != nil {
					return err
				}
				return do(dir, id)
			},
		})
	}
	c.AddCommand(
		change("keep", "Keep a checkpoint in the runner's trash until it is taken back or released", trash.Keep),
		change("release", "Release a kept checkpoint, so that the runner may remove it", trash.Unkeep),
	)
	return flag(c)
}

func printTrash(w io.Writer, now time.Time, list []trash.Entry) error {
	rows := make([][]string, len(list))
	for i, e := range list {
		kept := ""
		if e.Kept {
			kept = "yes"
		}
		rows[i] = []string{string(e.ID), now.Sub(e.Since).Round(time.Second).String(), fmt.Sprintf("%d MiB", e.Bytes>>20), kept}
	}
	return render.Table(w, "ID SINCE DISK KEPT", rows)
}
