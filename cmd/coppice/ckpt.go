package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newCkptCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:     "ckpt",
		Aliases: []string{"checkpoint"},
		Short:   "Work with checkpoints: immutable nodes of a tree",
		Long: `Work with checkpoints. A checkpoint is an immutable node of a tree and holds a whole machine: its memory, devices and disk.

CHECKPOINT is a name, an id, or the end of an id.`,
	}
	c.AddCommand(
		newCkptCreateCommand(a), newCkptListCommand(a), newCkptShowCommand(a), newCkptTreeCommand(a),
		newCkptDiffCommand(a), newCkptAnnotateCommand(a), newCkptRemoveCommand(a),
		newCkptPinCommand(a, true), newCkptPinCommand(a, false), newCkptPruneCommand(a), newCkptRetainCommand(a),
		newCkptExportCommand(a), newCkptImportCommand(a),
	)
	return c
}

func newCkptCreateCommand(a *app) *cobra.Command {
	var name string
	var labels, annotations []string
	var quiet, pinned, sealed bool
	c := &cobra.Command{
		Use:     "create WORKSPACE",
		Short:   "Capture a running workspace; the workspace goes on",
		Example: "  coppice ckpt create demo --name before-upgrade",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			req := coppice.CreateCheckpointRequest{Name: name, Pinned: pinned}
			var err error
			if req.Labels, err = keyValues("--label", labels); err != nil {
				return err
			}
			if req.Annotations, err = annotationValues("--annotation", annotations); err != nil {
				return err
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			ws, err := workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			done := a.working(c.Context(), "checkpointing "+ws.Name)
			cp, err := client.CreateCheckpoint(c.Context(), ws.ID, req)
			done()
			if err == nil && sealed {
				done = a.working(c.Context(), "waiting for the store")
				cp, err = client.WaitSealed(c.Context(), cp.ID)
				done()
			}
			if err != nil {
				return err
			}
			return printNew(a, cp, cp.ID, quiet, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s: %s paused for %s, %s of memory changed since the base\n", cp.ID, ws.Name, milliseconds(cp.PauseMS), size(cp.DeltaBytes))
				return err
			})
		},
	}
	f := c.Flags()
	f.StringVar(&name, "name", "", "`name`, unique among checkpoints")
	f.StringArrayVarP(&labels, "label", "l", nil, "label, `KEY=VALUE`; may be repeated")
	f.StringArrayVar(&annotations, "annotation", nil, "annotation, `KEY=VALUE`; a VALUE that is not JSON is a string; may be repeated")
	f.BoolVar(&pinned, "pin", false, "protect it from deletion")
	f.BoolVar(&sealed, "sealed", false, "also wait until it is in the store")
	f.BoolVarP(&quiet, "quiet", "q", false, "print the id only")
	return c
}

// annotationValues reads KEY=VALUE words; a value that is JSON is taken as such, anything else as a string.
func annotationValues(flag string, words []string) (coppice.Annotations, error) {
	texts, err := keyValues(flag, words)
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

func newCkptListCommand(a *app) *cobra.Command {
	var of string
	var labels []string
	var everything, quiet bool
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List checkpoints, newest first",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			filter := coppice.CheckpointFilter{Labels: labels}
			if of != "" {
				ws, err := workspace(c.Context(), client, of)
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
			return a.print(list, func(w io.Writer) error {
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
			short(cp.ID), cp.Name, string(cp.State), string(cp.Kind), short(cp.ParentID), short(cp.WorkspaceID), fmt.Sprint(cp.ChildrenCount),
			size(cp.DeltaBytes), size(cp.DiskBytes), stored(cp), milliseconds(cp.PauseMS), age(now, cp.CreatedAt),
		})
	}
	return table(w, "ID NAME STATE KIND PARENT WORKSPACE CHILDREN DELTA DISK STORED PAUSE AGE", rows)
}

// stored is what a checkpoint takes in the store, or how far it is on its way there.
func stored(cp coppice.Checkpoint) string {
	switch {
	case cp.Seal != nil:
		return string(cp.Seal.State)
	case cp.State == coppice.CheckpointSealed:
		return size(cp.StoredBytes)
	}
	return ""
}

// sealing is stored with what there is to say about it.
func sealing(cp coppice.Checkpoint) string {
	text := stored(cp)
	if cp.State == coppice.CheckpointSealed {
		return text + ", " + moment(cp.SealedAt)
	}
	if cp.Seal != nil && cp.Seal.Problem != nil {
		text += fmt.Sprintf("; attempt %d; the last failed attempt: %s (%s)", cp.Seal.Attempt, cp.Seal.Problem.Message, cp.Seal.Problem.Code)
	}
	return text
}

func newCkptShowCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "show CHECKPOINT",
		Aliases: []string{"get"},
		Short:   "Show a checkpoint",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			cp, err := checkpoint(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			return a.print(cp, func(w io.Writer) error { return printCheckpoint(w, cp) })
		},
	}
}

func printCheckpoint(w io.Writer, cp coppice.Checkpoint) error {
	failure, class, was := "", "", ""
	if im := cp.Imported; im != nil {
		was = fmt.Sprintf("as %s of image %s, captured %s (according to its file)", im.CheckpointID, im.ImageDigest, moment(im.CapturedAt))
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
	return facts(w,
		"id", cp.ID, "name", cp.Name, "state", string(cp.State), "failure", failure, "kind", string(cp.Kind),
		"parent", cp.ParentID, "children", fmt.Sprint(cp.ChildrenCount), "taken of", cp.WorkspaceID, "imported", was,
		"labels", pairs(cp.Labels), "annotations", string(annotations), "version", fmt.Sprint(cp.Version), "pinned", yes(cp.Pinned),
		"image", strings.TrimSpace(cp.Image.Name+" "+cp.Image.Digest),
		"resources", fmt.Sprintf("%d vCPU, %d MiB memory, %d GiB disk", cp.Resources.VCPUs, cp.Resources.MemoryMiB, cp.Resources.DiskGiB),
		"base", cp.BaseID, "delta", size(cp.DeltaBytes), "devices", size(cp.DeviceStateBytes), "disk", size(cp.DiskBytes), "stored", sealing(cp),
		"pause", milliseconds(cp.PauseMS), "timings", timings(cp.Timings),
		"own generators", strings.Join(stale, ", "), "needs", class, "runner", cp.RunnerID, "created", moment(cp.CreatedAt),
	)
}

func newCkptAnnotateCommand(a *app) *cobra.Command {
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
			client, err := a.client()
			if err != nil {
				return err
			}
			cp, err := checkpoint(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			cp, err = client.PatchCheckpoint(c.Context(), cp.ID, coppice.PatchCheckpointRequest{Version: version, Annotations: annotations})
			if err != nil {
				return err
			}
			return a.print(cp, func(w io.Writer) error {
				b, err := json.Marshal(cp.Annotations)
				fmt.Fprintf(w, "version %d: %s\n", cp.Version, visible(string(b)))
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
