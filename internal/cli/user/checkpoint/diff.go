package checkpoint

import (
	"encoding/base64"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newDiffCommand(a *cli.App) *cobra.Command {
	var content bool
	c := &cobra.Command{
		Use:   "diff FROM TO",
		Short: "Show the differences between two checkpoints of one tree",
		Long: `Show the differences between two checkpoints of one tree: files added (A), changed (M) and removed (D), processes started (+) and ended (-),
and how much memory differs. No machine is started for it. A renamed file appears as one removed and one added file.

The files are those of the disk, and /etc/hosts, /etc/hostname, /etc/resolv.conf and /etc/machine-id, which a machine has in memory, mounted
over those of the disk. They are listed if a program has changed them; what Coppice writes there for each machine does not count. Anything else
that a machine keeps in memory counts as memory: /run, and other file systems in memory.

With --content, the lines that differ follow, for text files of at most 1 MiB.`,
		Example: "  coppice ckpt diff before-upgrade 9r4w6xcv\n  coppice ckpt diff before-upgrade 9r4w6xcv --content",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			client, from, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			to, err := find.Checkpoint(c.Context(), client, args[1])
			if err != nil {
				return err
			}
			done := a.Working(c.Context(), "comparing")
			diff, err := wholeDiff(client.DiffCheckpoints(c.Context(), from.ID, to.ID))
			if err != nil || !content {
				done()
				if err != nil {
					return err
				}
				return a.Print(diff, func(w io.Writer) error { return printDiff(w, diff) })
			}
			whole, err := contents(c.Context(), client, diff)
			done()
			if err != nil {
				return err
			}
			return a.Print(whole, func(w io.Writer) error {
				err := printDiff(w, diff)
				printContents(w, whole.Contents)
				return err
			})
		},
	}
	c.Flags().BoolVar(&content, "content", false, "also show the lines of text files that differ")
	return c
}

// wholeDiff joins all pages to one.
func wholeDiff(pages func(func(coppice.CheckpointDiff, error) bool)) (coppice.CheckpointDiff, error) {
	var all coppice.CheckpointDiff
	first := true
	for p, err := range pages {
		if err != nil {
			return all, err
		}
		if first {
			all, first = p, false
			continue
		}
		all.Items = append(all.Items, p.Items...)
		all.Unreadable += p.Unreadable
	}
	all.NextCursor = ""
	return all, nil
}

func printDiff(w io.Writer, d coppice.CheckpointDiff) error {
	marks := map[coppice.FileChangeChange]string{coppice.FileAdded: "A", coppice.FileChanged: "M", coppice.FileRemoved: "D"}
	count := map[coppice.FileChangeChange]int{}
	for _, f := range d.Items {
		count[f.Change]++
		line := marks[f.Change] + " " + pathOf(f)
		var what []string
		for _, s := range f.What {
			what = append(what, string(s))
		}
		if f.InMemory {
			what = append(what, "in memory")
		}
		if len(what) > 0 {
			line += " (" + strings.Join(what, ", ") + ")"
		}
		fmt.Fprintln(w, line)
	}
	if p := d.Processes; p != nil {
		for _, x := range p.Started {
			fmt.Fprintln(w, processLine("+", x))
		}
		for _, x := range p.Gone {
			fmt.Fprintln(w, processLine("-", x))
		}
	}
	summary := fmt.Sprintf("%d added, %d changed, %d removed", count[coppice.FileAdded], count[coppice.FileChanged], count[coppice.FileRemoved])
	if p := d.Processes; p != nil {
		summary += fmt.Sprintf("; %d started, %d gone", len(p.Started), len(p.Gone))
	}
	if d.MemoryChangedBytes != nil {
		summary += fmt.Sprintf("; %s of memory differ", render.Size(*d.MemoryChangedBytes))
	}
	fmt.Fprintln(w, summary)
	if !d.FilesComplete {
		fmt.Fprintln(w, "Files may be missing: a guest could not write everything to its disk before its capture.")
	}
	if d.IdentityUnknown {
		fmt.Fprintln(w, "Changes to /etc/hosts, hostname, machine-id and resolv.conf may be missing: a guest did not report what it has there.")
	}
	if d.Unreadable > 0 {
		fmt.Fprintf(w, "%d files are damaged on a guest's disk. They are left out, or counted as changed.\n", d.Unreadable)
	}
	if d.Processes != nil && !d.Processes.Complete {
		fmt.Fprintln(w, "Processes may be missing: a guest named only some of them, or none.")
	}
	return nil
}

// pathOf shows a path of a guest's choice on one line, quoted when it has anything that is not plainly visible.
func pathOf(f coppice.FileChange) string {
	path := f.Path
	if b, err := base64.StdEncoding.DecodeString(f.PathBase64); err == nil && f.PathBase64 != "" {
		path = string(b)
	}
	if quoted := strconv.Quote(path); quoted != `"`+path+`"` {
		return quoted
	}
	return path
}

func processLine(mark string, p coppice.WorkloadProcess) string {
	args := p.Args
	if args == "" {
		args = "[" + p.Command + "]"
	}
	return fmt.Sprintf("%s process %d %s", mark, p.PID, foreign.Visible(args))
}
