// Package checkpoint has the commands for checkpoints and their trees.
package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewCommand makes the command "coppice ckpt".
func NewCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:     "ckpt",
		Aliases: []string{"checkpoint"},
		Short:   "Work with checkpoints: immutable nodes of a tree",
		Long: `Work with checkpoints. A checkpoint is an immutable node of a tree and holds a whole machine: its memory, devices and disk.

CHECKPOINT is a name, an id, or the end of an id.`,
	}
	c.AddCommand(
		newCreateCommand(a), newListCommand(a), newShowCommand(a), newTreeCommand(a), newCatCommand(a),
		newDiffCommand(a), newAnnotateCommand(a), newRenameCommand(a), newLabelCommand(a), newRemoveCommand(a),
		newPinCommand(a, true), newPinCommand(a, false), newPruneCommand(a), newRetainCommand(a),
		newExportCommand(a), newImportCommand(a), newPrepareCommand(a),
	)
	return c
}

func newCreateCommand(a *cli.App) *cobra.Command {
	var name string
	var labels, annotations []string
	var quiet, pinned, sealed bool
	var prepare int
	c := &cobra.Command{
		Use:     "create WORKSPACE",
		Short:   "Capture a running workspace; the workspace goes on",
		Example: "  coppice ckpt create demo --name before-upgrade",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			req := coppice.CreateCheckpointRequest{Name: name, Pinned: pinned, Prepare: prepare}
			var err error
			if req.Labels, err = argument.KeyValues("--label", labels); err != nil {
				return err
			}
			if req.Annotations, err = annotationValues("--annotation", annotations); err != nil {
				return err
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ws, err := find.Workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			done := a.Working(c.Context(), "checkpointing "+ws.Name)
			cp, err := client.CreateCheckpoint(c.Context(), ws.ID, req)
			done()
			if err == nil && sealed {
				done = a.Working(c.Context(), "waiting for the store")
				cp, err = client.WaitSealed(c.Context(), cp.ID)
				done()
			}
			if err != nil {
				return err
			}
			return cli.PrintNew(a, cp, cp.ID, quiet, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s: %s paused for %s, %s of memory changed since the base\n", cp.ID, ws.Name, render.Milliseconds(cp.PauseMS), render.Size(cp.DeltaBytes))
				return err
			})
		},
	}
	f := c.Flags()
	f.StringVar(&name, "name", "", "`name`, unique among checkpoints")
	f.StringArrayVarP(&labels, "label", "l", nil, "label, `KEY=VALUE`; may be repeated")
	f.StringArrayVar(&annotations, "annotation", nil, "annotation, `KEY=VALUE`; a VALUE that is not JSON is a string; may be repeated")
	f.BoolVar(&pinned, "pin", false, "protect it from deletion")
	f.IntVar(&prepare, "prepare", 0, "number of `machines` to keep ready for its forks, for 2 minutes")
	f.BoolVar(&sealed, "sealed", false, "also wait until it is in the store")
	f.BoolVarP(&quiet, "quiet", "q", false, "print the id only")
	return c
}

// annotationValues reads KEY=VALUE words; a value that is JSON is taken as such, anything else as a string.
func annotationValues(flag string, words []string) (coppice.Annotations, error) {
	texts, err := argument.KeyValues(flag, words)
	if err != nil {
		return nil, err
	}
	out := coppice.Annotations{}
	for k, v := range texts {
		var value any
		if json.Unmarshal([]byte(v), &value) != nil {
			value = v
		}
		out[k] = value
	}
	return out, nil
}

func newListCommand(a *cli.App) *cobra.Command {
	var of string
	var labels []string
	var everything, quiet bool
	c := &cobra.Command{
		Use:     "ls [CHECKPOINT:PATH]",
		Aliases: []string{"list"},
		Short:   "List checkpoints, newest first, or the files of one",
		Long: `List checkpoints, newest first. With CHECKPOINT:PATH, list a directory of a checkpoint, as its guest saw it when it was captured; no machine
is started for it.`,
		Example: "  coppice ckpt ls --workspace demo\n  coppice ckpt ls before-upgrade:/etc",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 1 {
				if of != "" || len(labels) > 0 || everything || quiet {
					return exit.Misuse(errors.New("the flags choose checkpoints; they do not go with CHECKPOINT:PATH"))
				}
				return listFiles(a, c, args[0])
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			filter := coppice.CheckpointFilter{Labels: labels}
			if of != "" {
				ws, err := find.Workspace(c.Context(), client, of)
				if err != nil {
					return err
				}
				filter.WorkspaceID = ws.ID
			}
			if everything {
				filter.States = []coppice.CheckpointState{
					coppice.CheckpointCapturing, coppice.CheckpointCaptured, coppice.CheckpointSealed, coppice.CheckpointFailed, coppice.CheckpointDeleted,
				}
			}
			list, err := coppice.Collect(client.Checkpoints(c.Context(), filter))
			if err != nil {
				return err
			}
			return a.Print(list, func(w io.Writer) error {
				if quiet {
					for _, cp := range list {
						fmt.Fprintln(w, cp.ID)
					}
					return nil
				}
				return printCheckpoints(w, time.Now(), list)
			})
		},
	}
	f := c.Flags()
	f.StringVarP(&of, "workspace", "w", "", "only checkpoints of this `workspace`")
	f.StringArrayVarP(&labels, "label", "l", nil, "only with this label, `KEY[=VALUE]`; may be repeated")
	f.BoolVarP(&everything, "all", "a", false, "also failed and deleted checkpoints, and those being captured")
	f.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	return c
}

func printCheckpoints(w io.Writer, now time.Time, list []coppice.Checkpoint) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No checkpoints. Take one: coppice ckpt create WORKSPACE")
		return err
	}
	rows := make([][]string, 0, len(list))
	for _, cp := range list {
		rows = append(rows, []string{
			render.Short(cp.ID), cp.Name, string(cp.State), string(cp.Kind), render.Short(cp.ParentID), render.Short(cp.WorkspaceID),
			render.Size(cp.DeltaBytes), stored(cp), render.Age(now, cp.CreatedAt),
		})
	}
	return render.Table(w, "ID NAME STATE KIND PARENT WORKSPACE DELTA STORED AGE", rows)
}

// stored is the size of a checkpoint in the store, or the progress of its upload.
func stored(cp coppice.Checkpoint) string {
	switch {
	case cp.Seal != nil:
		return string(cp.Seal.State)
	case cp.State == coppice.CheckpointSealed:
		return render.Size(cp.StoredBytes)
	}
	return ""
}

// sealing is stored with what there is to say about it.
func sealing(cp coppice.Checkpoint) string {
	text := stored(cp)
	if cp.State == coppice.CheckpointSealed {
		return text + ", " + render.Moment(cp.SealedAt)
	}
	if cp.Seal != nil && cp.Seal.Problem != nil {
		text += fmt.Sprintf("; attempt %d; the last failed attempt: %s (%s)", cp.Seal.Attempt, cp.Seal.Problem.Message, cp.Seal.Problem.Code)
	}
	return text
}

func newShowCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "show CHECKPOINT",
		Aliases: []string{"get"},
		Short:   "Show a checkpoint",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			_, cp, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			return a.Print(cp, func(w io.Writer) error { return printCheckpoint(w, cp) })
		},
	}
}

func printCheckpoint(w io.Writer, cp coppice.Checkpoint) error {
	failure, class, was := "", "", ""
	if im := cp.Imported; im != nil {
		was = fmt.Sprintf("as %s of image %s, captured %s (according to its file)", im.CheckpointID, im.ImageDigest, render.Moment(im.CapturedAt))
	}
	if cp.Failure != nil {
		failure = cp.Failure.Message + " (" + cp.Failure.Code + ")"
	}
	if r := cp.RunnerClass; r != nil {
		class = strings.Join([]string{r.Arch, r.Accelerator, r.CPUModel, r.VMM + " " + r.VMMVersion, r.MachineType}, ", ")
	}
	annotations, err := json.Marshal(cp.Annotations)
	if err != nil {
		return err
	}
	stale := make([]string, 0, len(cp.StalePRNGProcesses))
	for _, p := range cp.StalePRNGProcesses {
		stale = append(stale, fmt.Sprintf("%d %s (%s)", p.PID, p.Command, p.Runtime))
	}
	return render.Facts(w,
		"id", cp.ID, "name", cp.Name, "state", string(cp.State), "failure", failure, "kind", string(cp.Kind),
		"parent", cp.ParentID, "children", fmt.Sprint(cp.ChildrenCount), "taken of", cp.WorkspaceID, "imported", was,
		"labels", render.Pairs(cp.Labels), "annotations", string(annotations), "version", fmt.Sprint(cp.Version), "pinned", yes(cp.Pinned),
		"image", strings.TrimSpace(cp.Image.Name+" "+cp.Image.Digest),
		"resources", fmt.Sprintf("%d vCPU, %d MiB memory, %d GiB disk", cp.Resources.VCPUs, cp.Resources.MemoryMiB, cp.Resources.DiskGiB),
		"base", cp.BaseID, "delta", render.Size(cp.DeltaBytes), "devices", render.Size(cp.DeviceStateBytes), "disk", render.Size(cp.DiskBytes), "stored", sealing(cp),
		"pause", render.Milliseconds(cp.PauseMS), "timings", render.Timings(cp.Timings),
		"own generators", strings.Join(stale, ", "), "needs", class, "runner", cp.RunnerID, "created", render.Moment(cp.CreatedAt),
	)
}

func newAnnotateCommand(a *cli.App) *cobra.Command {
	var version int64
	c := &cobra.Command{
		Use:   "annotate CHECKPOINT KEY=VALUE... [KEY-...]",
		Short: "Set annotations, or remove them with KEY-",
		Long: `Set annotations of a checkpoint, or remove them with KEY-. A VALUE that is not JSON is a string.

With --version, the change is made only if that is still the checkpoint's version.`,
		Example: "  coppice ckpt annotate 9r4w6xcv score=0.75 visits=12",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			var setting []string
			removed := coppice.Annotations{}
			for _, word := range args[1:] {
				if key, ok := strings.CutSuffix(word, "-"); ok && !strings.Contains(word, "=") {
					removed[key] = nil
				} else {
					setting = append(setting, word)
				}
			}
			annotations, err := annotationValues("annotation", setting)
			if err != nil {
				return err
			}
			for k := range removed {
				annotations[k] = nil
			}
			client, cp, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			cp, err = client.PatchCheckpoint(c.Context(), cp.ID, coppice.PatchCheckpointRequest{Version: version, Annotations: annotations})
			if err != nil {
				return err
			}
			return a.Print(cp, func(w io.Writer) error {
				b, err := json.Marshal(cp.Annotations)
				fmt.Fprintf(w, "version %d: %s\n", cp.Version, foreign.Visible(string(b)))
				return err
			})
		},
	}
	c.Flags().Int64Var(&version, "version", 0, "compare-and-set against this `version`")
	return c
}

// yes shows a fact that is worth a line only when it holds.
func yes(b bool) string {
	if b {
		return "yes"
	}
	return ""
}
