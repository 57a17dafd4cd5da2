package tenant

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewAuditCommand makes the command "coppice audit".
func NewAuditCommand(a *cli.App) *cobra.Command {
	var f coppice.AuditFilter
	var ref, outcome string
	var last time.Duration
	var limit int
	c := &cobra.Command{
		Use:   "audit",
		Short: "Show who changed what",
		Long: `Show who changed what in the key's project, newest first. A key with the scope admin may ask for another project. "--project system" shows
what operators do to runners and projects. There is one record per change of a state. An accepted request has another record, of the same
operation, when it has ended.`,
		Example: "  coppice audit --last 1h --outcome failed\n  coppice audit --object ws_06e5bqv7z0f3m8k2h1t9r4w6xc --json\n  coppice audit check",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			if f.ProjectID, err = auditedProject(c.Context(), client, ref); err != nil {
				return err
			}
			f.Outcome = coppice.AuditOutcome(outcome)
			if last > 0 {
				f.Since = time.Now().Add(-last)
			}
			list := []coppice.AuditRecord{}
			for r, err := range client.Audit(c.Context(), f) {
				if err != nil {
					return err
				}
				if list = append(list, r); len(list) == limit {
					break
				}
			}
			return a.Print(list, func(w io.Writer) error { return printAudit(w, list) })
		},
	}
	fl := c.Flags()
	fl.StringVar(&f.ObjectID, "object", "", "only changes of the object with this `id`")
	fl.StringVar(&f.Actor, "actor", "", "only changes by the key or runner with this `id`")
	fl.StringVar(&f.Action, "action", "", "only this `action`, such as forkCheckpoint")
	fl.StringVar(&f.RequestID, "request", "", "only changes by the request with this `id`")
	fl.StringVar(&f.OperationID, "operation", "", "only changes by the operation with this `id`")
	fl.StringVar(&outcome, "outcome", "", "only this `outcome`: accepted, succeeded or failed")
	fl.DurationVar(&last, "last", 0, "only the last `duration`, such as 1h")
	fl.IntVar(&limit, "limit", 100, "show at most this `number`; 0 shows all")
	fl.StringVar(&ref, "project", "", auditedProjectHelp)
	c.AddCommand(newAuditCheckCommand(a))
	return c
}

func newAuditCheckCommand(a *cli.App) *cobra.Command {
	var ref string
	c := &cobra.Command{
		Use:   "check",
		Short: "Compare the records with their seals",
		Long: `Compare the records with their seals. The command prints the head of the chain: keep it elsewhere. As long as a later check finds the chain
unbroken and this head in it, nothing before it was changed. The command fails if the chain is broken.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			id, err := auditedProject(c.Context(), client, ref)
			if err != nil {
				return err
			}
			got, err := client.CheckAudit(c.Context(), id)
			if err != nil {
				return err
			}
			err = a.Print(got, func(w io.Writer) error {
				return render.Facts(w, "Intact", fmt.Sprint(got.Intact), "Records", fmt.Sprint(got.Records), "Seals", fmt.Sprint(got.Seals), "Unsealed", fmt.Sprint(got.Unsealed), "Head", got.Head)
			})
			if err == nil && !got.Intact {
				err = core.Errorf(core.DataLoss, core.CodeInternal, "the audit log was tampered with: seal %d does not match its records", got.BrokenSeal)
			}
			return err
		},
	}
	c.Flags().StringVar(&ref, "project", "", auditedProjectHelp)
	return c
}

// auditedProject finds the project whose records a person means: a name, an id or "system". Without any, it is the project of the key.
func auditedProject(ctx context.Context, client *coppice.Client, ref string) (coppice.ProjectID, error) {
	switch ref {
	case "":
		return "", nil
	case "system":
		return coppice.SystemProject, nil
	}
	p, err := project(ctx, client, ref)
	return p.ID, err
}

const auditedProjectHelp = `the records of this ` + "`PROJECT`" + `, or "system" (default: the key's own)`

func printAudit(w io.Writer, list []coppice.AuditRecord) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No records.")
		return err
	}
	rows, changes := make([][]string, len(list)), make([]string, len(list))
	for i, r := range list {
		change := ""
		if r.Before != "" || r.After != "" {
			change = cmp.Or(r.Before, "-") + " > " + cmp.Or(r.After, "-")
		}
		var detail struct{ Path string }
		if change == "" && json.Unmarshal(r.Detail, &detail) == nil && detail.Path != "" {
			change = strconv.QuoteToASCII(detail.Path) // of a file in a guest
		}
		rows[i] = []string{render.Moment(r.CreatedAt), tail(r.Actor), render.Dash(r.Source), r.Action, tail(r.ObjectID), string(r.Outcome)}
		changes[i] = change
	}
	return render.TableWithNotes(w, "TIME ACTOR SOURCE ACTION OBJECT OUTCOME", rows, changes)
}

// tail is the end of an id, by which commands find its object, after what kind of object it is.
func tail(id string) string {
	kind, rest, found := strings.Cut(id, "_")
	if !found || len(rest) != 26 { // not an id
		return id
	}
	return kind + " " + render.Short(id)
}
