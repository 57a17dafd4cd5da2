// Package tenant has the commands for projects, their keys and their audit log.
package tenant

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewProjectCommand makes the command "coppice project".
func NewProjectCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:   "project",
		Short: "Work with projects: tenants with their own quotas and keys",
		Long: `Work with projects. A project is a tenant with its own quotas and keys. It does not see the objects of other projects.

PROJECT is a name or an id. A key with the scope admin sees all projects, any other key only its own.`,
	}
	c.AddCommand(newProjectCreateCommand(a), newProjectListCommand(a), newProjectShowCommand(a), newProjectQuotaCommand(a), newProjectEncryptCommand(a), newProjectRemoveCommand(a))
	return c
}

// project finds the project that a person means. Without an argument, it is the project of the key.
func project(ctx context.Context, c *coppice.Client, ref string) (coppice.Project, error) {
	if ref == "" {
		self, err := c.Self(ctx)
		if err != nil {
			return coppice.Project{}, err
		}
		ref = self.ProjectID
	}
	if strings.HasPrefix(ref, "prj_") { // no name has an underscore
		return c.Project(ctx, ref)
	}
	for p, err := range c.Projects(ctx) {
		switch {
		case err != nil:
			return p, err
		case p.Name == ref:
			return c.Project(ctx, p.ID)
		}
	}
	return coppice.Project{}, core.Errorf(core.NotFound, core.CodeProjectNotFound, "there is no project %q; list the projects with coppice project ls", core.Clip(ref))
}

// quotaFields are the quotas by the names that the API has for them.
func quotaFields(q *coppice.QuotasPatch) map[string]**int64 {
	return map[string]**int64{
		"workspaces": &q.Workspaces, "forks_in_flight": &q.ForksInFlight, "checkpoints": &q.Checkpoints, "checkpoint_bytes": &q.CheckpointBytes,
		"depth": &q.Depth, "children": &q.Children, "keys": &q.Keys, "ports": &q.Ports,
	}
}

func quotaValues(flag string, words []string) (coppice.QuotasPatch, error) {
	var out coppice.QuotasPatch
	texts, err := argument.KeyValues(flag, words)
	if err != nil {
		return out, err
	}
	fields := quotaFields(&out)
	for name, text := range texts {
		field, ok := fields[name]
		if !ok {
			return out, exit.Misuse(fmt.Errorf("there is no quota %q; the quotas are %s", name, strings.Join(slices.Sorted(maps.Keys(fields)), ", ")))
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 {
			return out, exit.Misuse(fmt.Errorf("%s=%s is not a number from 0 up", name, text))
		}
		*field = &n
	}
	return out, nil
}

func newProjectCreateCommand(a *cli.App) *cobra.Command {
	var quotas []string
	var quiet, encrypt bool
	c := &cobra.Command{
		Use:     "create NAME",
		Short:   "Create a project",
		Example: "  coppice project create blue --quota workspaces=100 --quota checkpoint_bytes=1000000000000",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			q, err := quotaValues("--quota", quotas)
			if err != nil {
				return err
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			req := coppice.CreateProjectRequest{Name: args[0], Quotas: q}
			if encrypt {
				req.Encryption = coppice.EncryptionEnvelope
			}
			p, err := client.CreateProject(c.Context(), req)
			if err != nil {
				return err
			}
			return cli.PrintNew(a, p, p.ID, quiet, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s is created: %s\nCreate a key for it: coppice key create NAME --project %s\n", p.Name, p.ID, p.Name)
				return err
			})
		},
	}
	c.Flags().StringArrayVar(&quotas, "quota", nil, "quota that differs from the default, `NAME=NUMBER`; may be repeated")
	c.Flags().BoolVar(&encrypt, "encrypt", false, "encrypt its checkpoints in the store")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print the id only")
	return c
}

func newProjectListCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List projects, newest first",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			list, err := coppice.Collect(client.Projects(c.Context()))
			if err != nil {
				return err
			}
			return a.Print(list, func(w io.Writer) error {
				rows := make([][]string, 0, len(list))
				for _, p := range list {
					rows = append(rows, []string{p.Name, p.ID, fmt.Sprint(p.Quotas.Workspaces), fmt.Sprint(p.Quotas.Checkpoints), render.Age(time.Now(), p.CreatedAt)})
				}
				return render.Table(w, "NAME ID MAX-WORKSPACES MAX-CHECKPOINTS AGE", rows)
			})
		},
	}
}

func newProjectShowCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "show [PROJECT]",
		Aliases: []string{"get"},
		Short:   "Show a project, its quotas and their use (default: the key's own project)",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			p, err := project(c.Context(), client, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return a.Print(p, func(w io.Writer) error { return printProject(w, p) })
		},
	}
}

func printProject(w io.Writer, p coppice.Project) error {
	used := func(n, of int64) string { return fmt.Sprintf("%d of %d", n, of) }
	var u coppice.QuotaUsage
	if p.Usage != nil {
		u = *p.Usage
	}
	q := p.Quotas
	encryption := string(p.Encryption)
	if p.KeyVersion > 0 {
		encryption += fmt.Sprintf(", the newest key is %d", p.KeyVersion)
	}
	return render.Facts(w,
		"id", p.ID, "name", p.Name, "version", fmt.Sprint(p.Version), "created", render.Moment(p.CreatedAt),
		"workspaces", used(u.Workspaces, q.Workspaces), "forks in flight", used(u.ForksInFlight, q.ForksInFlight),
		"checkpoints", used(u.Checkpoints, q.Checkpoints), "checkpoint bytes", render.Size(u.CheckpointBytes)+" of "+render.Size(q.CheckpointBytes),
		"depth", fmt.Sprintf("at most %d", q.Depth), "children", fmt.Sprintf("at most %d", q.Children), "keys", used(u.Keys, q.Keys), "ports", used(u.Ports, q.Ports),
		"allow-all", string(p.AllowAllEgress),
		"encryption", encryption,
	)
}

func newProjectQuotaCommand(a *cli.App) *cobra.Command {
	var version int64
	var allowAll string
	c := &cobra.Command{
		Use:   "quota PROJECT [NAME=NUMBER...]",
		Short: "Change quotas of a project",
		Long: `Change quotas of a project. A lower quota removes nothing; nothing more is admitted until the use is below it.

--allow-all-egress decides whether its sandboxes may have the egress policy allow-all. After a denial, running sandboxes continue, but no
sandbox is created, forked, restored or resumed under it.

With --version, the change is made only if that is still the project's version.`,
		Example: "  coppice project quota blue workspaces=200 forks_in_flight=64",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) < 2 && allowAll == "" {
				return exit.Misuse(errors.New("nothing to change: give a NAME=NUMBER or --allow-all-egress"))
			}
			q, err := quotaValues("quota", args[1:])
			if err != nil {
				return err
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			p, err := project(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			usage := p.Usage
			if p, err = client.PatchProject(c.Context(), p.ID, coppice.PatchProjectRequest{Version: version, Quotas: q, AllowAllEgress: coppice.AllowAllEgress(allowAll)}); err != nil {
				return err
			}
			p.Usage = usage
			return a.Print(p, func(w io.Writer) error { return printProject(w, p) })
		},
	}
	c.Flags().Int64Var(&version, "version", 0, "compare-and-set against this `version`")
	c.Flags().StringVar(&allowAll, "allow-all-egress", "", "`word`: allowed, denied, or default for the setting of the controllers")
	return c
}

func newProjectEncryptCommand(a *cli.App) *cobra.Command {
	var off, another bool
	c := &cobra.Command{
		Use:   "encrypt PROJECT",
		Short: "Encrypt the checkpoints of a project in the store from now on",
		Long: `Encrypt the checkpoints of a project in the store from now on, with keys of the project, which the controllers' master key wraps.

Checkpoints that are already in the store stay as they are and can still be read. To delete a project destroys its keys.`,
		Example: "  coppice project encrypt blue\n  coppice project encrypt blue --new-key",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			p, err := project(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			req := coppice.PatchProjectRequest{Encryption: coppice.EncryptionEnvelope}
			switch {
			case off:
				req.Encryption = coppice.EncryptionNone
			case another:
				req.KeyVersion = p.KeyVersion + 1
			}
			usage := p.Usage
			if p, err = client.PatchProject(c.Context(), p.ID, req); err != nil {
				return err
			}
			p.Usage = usage
			return a.Print(p, func(w io.Writer) error { return printProject(w, p) })
		},
	}
	c.Flags().BoolVar(&off, "off", false, "store unencrypted from now on")
	c.Flags().BoolVar(&another, "new-key", false, "use another key for what is stored from now on")
	c.MarkFlagsMutuallyExclusive("off", "new-key")
	return c
}

func newProjectRemoveCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "rm PROJECT...",
		Short: "Delete empty projects and revoke their keys",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			found, err := argument.All(args, func(ref string) (coppice.Project, error) { return project(c.Context(), client, ref) }, func(p coppice.Project) string { return p.ID })
			if err != nil {
				return err
			}
			ids := []string{}
			failed := argument.EachOf(found, func(p coppice.Project) error {
				if err := client.DeleteProject(c.Context(), p.ID); err != nil {
					return fmt.Errorf("%s is not deleted: %w", p.Name, err)
				}
				ids = append(ids, p.ID)
				return nil
			})
			if err := a.Print(ids, func(w io.Writer) error {
				for _, id := range ids {
					fmt.Fprintf(w, "%s is deleted\n", id)
				}
				return nil
			}); err != nil {
				return err
			}
			return failed
		},
	}
}
