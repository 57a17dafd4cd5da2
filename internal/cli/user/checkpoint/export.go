package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/cli/terminal"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newExportCommand(a *cli.App) *cobra.Command {
	var to string
	c := &cobra.Command{
		Use:   "export CHECKPOINT",
		Short: "Write a checkpoint to one file",
		Long: `Write a checkpoint to one file, which another cluster can import. The file has its memory, its disk and its image, with any secrets
in them. With a store, the file comes from there: the command waits until the checkpoint is sealed. Without a store, the host of the
checkpoint makes the file, and must be up.

The file appears only when it is complete. With "-o -" it goes to standard output.`,
		Example: "  coppice ckpt export before-upgrade -o before.ckpt\n  coppice ckpt export before-upgrade -o - | ssh other coppice ckpt import -",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if _, ok := terminal.Descriptor(a.Stdout); ok && to == "-" {
				return exit.Misuse(errors.New("a checkpoint cannot be written to a terminal: redirect standard output"))
			}
			client, cp, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			if to == "" {
				to = cp.ID + ".ckpt"
			}
			began := time.Now()
			if cp.State == coppice.CheckpointCaptured || cp.State == coppice.CheckpointCapturing {
				done := a.Working(c.Context(), "waiting until it is in the store")
				_, err = client.WaitSealed(c.Context(), cp.ID) // if it never will be, the export says so
				done()
				if err != nil && !errors.Is(err, coppice.CodeUnsupported) { // without a store nothing is sealed
					return err
				}
			}
			n, err := exportTo(c.Context(), a, client, cp.ID, to)
			if err != nil {
				return err
			}
			said := func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s: %s in %.1f s\n", cp.ID, render.Size(n), time.Since(began).Seconds())
				return err
			}
			if to == "-" {
				return said(a.Stderr)
			}
			return a.Print(map[string]any{"checkpoint_id": cp.ID, "file": to, "bytes": n, "duration_ms": time.Since(began).Milliseconds()}, said)
		},
	}
	c.Flags().StringVarP(&to, "output", "o", "", "`file` to write, - for standard output (default the checkpoint's id and .ckpt)")
	return c
}

// exportTo writes a file under another name, and renames it when it is complete.
func exportTo(ctx context.Context, a *cli.App, client *coppice.Client, id, to string) (n int64, err error) {
	body, whole, err := client.ExportCheckpoint(ctx, id)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, body.Close()) }()
	from := &counted{r: body}
	defer a.WorkingOn(ctx, func() string { return "exporting " + from.of(whole) })()
	if to == "-" {
		return io.Copy(a.Stdout, from)
	}
	part, err := os.CreateTemp(filepath.Dir(to), filepath.Base(to)+".*.part")
	if err != nil {
		return 0, err
	}
	n, err = io.Copy(part, from)
	if err = errors.Join(err, part.Sync(), part.Close()); err == nil {
		err = os.Rename(part.Name(), to)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(part.Name()))
	}
	return n, err
}

// counted counts what is read.
type counted struct {
	r io.Reader
	n atomic.Int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n.Add(int64(n))
	return n, err
}

// of says how much of a whole was read; 0: nobody knows how much that is.
func (c *counted) of(whole int64) string {
	n := c.n.Load()
	if whole <= 0 {
		return render.Size(n)
	}
	return fmt.Sprintf("%s of %s (%d %%)", render.Size(n), render.Size(whole), 100*n/whole)
}

func newImportCommand(a *cli.App) *cobra.Command {
	var name string
	var quiet bool
	c := &cobra.Command{
		Use:   "import FILE",
		Short: "Make a checkpoint from an exported file",
		Long: `Make a checkpoint from a file that was exported, here or elsewhere; - is standard input. The server verifies the file while it is sent, and
imports only complete files. The checkpoint can be forked on hosts of the class of its original host. The file does not have the network mode
and the environment.

The command needs the scope checkpoint:import, which a key has only if it was named, because a VMM loads the content of the file. Import only
files that you trust.`,
		Example: "  coppice ckpt import before.ckpt --name before-upgrade",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			from, opts := &counted{r: a.Stdin}, coppice.ImportOptions{Name: name}
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer f.Close()
				if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
					opts.Size = info.Size()
				}
				from.r = f
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			done := a.WorkingOn(c.Context(), func() string { return "importing " + from.of(opts.Size) })
			cp, err := client.ImportCheckpoint(c.Context(), from, opts)
			done()
			if err != nil {
				return err
			}
			return cli.PrintNew(a, cp, cp.ID, quiet, func(w io.Writer) error {
				return printImported(w, cp)
			})
		},
	}
	f := c.Flags()
	f.StringVar(&name, "name", "", "`name`, unique among checkpoints")
	f.BoolVarP(&quiet, "quiet", "q", false, "print the id only")
	return c
}

func printImported(w io.Writer, cp coppice.Checkpoint) error {
	was, class := "", ""
	if cp.Imported != nil {
		was = fmt.Sprintf("%s of image %s %s", cp.Imported.CheckpointID, cp.Image.Name, cp.Imported.ImageDigest)
	}
	if r := cp.RunnerClass; r != nil {
		class = strings.Join([]string{r.Arch, r.Accelerator, r.CPUModel, r.VMM + " " + r.VMMVersion, r.MachineType}, ", ")
	}
	return render.Facts(w, "id", cp.ID, "name", cp.Name, "original id (according to its file)", was, "image", cp.Image.Digest,
		"resources", fmt.Sprintf("%d vCPU, %d MiB memory, %d GiB disk", cp.Resources.VCPUs, cp.Resources.MemoryMiB, cp.Resources.DiskGiB),
		"needs", class, "stored", render.Size(cp.StoredBytes))
}
