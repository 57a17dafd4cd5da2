package workspace

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewStepCommand makes the command "coppice step".
func NewStepCommand(a *cli.App) *cobra.Command {
	var prepared int
	c := &cobra.Command{
		Use:   "step CHECKPOINT FILE",
		Short: "Try several actions from a checkpoint, each in a fork of its own",
		Long: `Try several actions from a checkpoint, each in a fork of its own. FILE, or - for standard input, is the request as JSON:
{"actions": [{"command": ["make", "test"], "only_if": {"exit_code": 0}}, ...]}. Each action forks the checkpoint, writes its "files", runs its
"command", and keeps a "checkpoint" (the default), the "workspace" or "nothing". The API's contract lists all fields under StepRequest.

The results come as the actions end; the table is in the order of the file. An action that failed does not end the others.`,
		Example: "  coppice step 9r4w6xcv actions.json\n  coppice step 9r4w6xcv - --json < actions.json",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			var req coppice.StepRequest
			if err := readStep(c.InOrStdin(), args[1], &req); err != nil {
				return exit.Misuse(err)
			}
			for i := range req.Actions {
				if one := &req.Actions[i]; (one.Keep == "" || one.Keep == coppice.KeepCheckpoint) && one.Checkpoint.Prepare == 0 {
					one.Checkpoint.Prepare = prepared
				}
			}
			client, cp, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			list := []coppice.StepActionResult{}
			working := func() func() {
				return a.Working(c.Context(), fmt.Sprintf("%d of %d actions have ended", len(list), len(req.Actions)))
			}
			done := working()
			for e, streamErr := range client.StreamStep(c.Context(), cp.ID, req) {
				if err = streamErr; e.Action != nil {
					list = append(list, *e.Action)
					done()
					done = working()
				}
			}
			done()
			slices.SortFunc(list, func(x, y coppice.StepActionResult) int { return x.Index - y.Index })
			return errors.Join(err, a.Print(list, func(w io.Writer) error { return printStep(w, list) }))
		},
	}
	c.Flags().IntVar(&prepared, "prepare", 0, "number of `machines` to keep ready for forks of each checkpoint that is kept, for 2 minutes")
	return c
}

func readStep(stdin io.Reader, file string, req *coppice.StepRequest) error {
	in := stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	d := json.NewDecoder(in)
	d.DisallowUnknownFields()
	if err := d.Decode(req); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: more follows after the request", file)
	}
	return nil
}

func printStep(w io.Writer, list []coppice.StepActionResult) error {
	rows := make([][]string, len(list))
	for i, r := range list {
		code, score, id, problem := "-", "-", "-", ""
		if r.ExitCode != nil {
			code = strconv.Itoa(*r.ExitCode)
		}
		if r.Score != nil {
			score = strconv.FormatFloat(*r.Score, 'g', -1, 64)
		}
		switch r.Kept {
		case coppice.KeepCheckpoint:
			id = r.CheckpointID
		case coppice.KeepWorkspace:
			id = r.WorkspaceID
		case coppice.KeepNothing:
		}
		if r.Problem != nil {
			problem = r.Problem.Code
		}
		rows[i] = []string{strconv.Itoa(r.Index), code, score, string(r.Kept), id, problem}
	}
	return render.Table(w, "ACTION EXIT SCORE KEPT ID PROBLEM", rows)
}
