package tenant

import (
	"context"
	"fmt"
	"io"
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

// NewKeyCommand makes the command "coppice key".
func NewKeyCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:   "key",
		Short: "Work with API keys",
		Long: `Work with API keys. A key belongs to one project, may do what its scopes allow, and expires.

KEY is an id, or the name of a valid key of the project.`,
	}
	c.AddCommand(newKeyCreateCommand(a), newKeyListCommand(a), newKeyShowCommand(a), newKeyRevokeCommand(a))
	return c
}

// key finds the key that a person means. Without an argument, it is the key in use.
func key(ctx context.Context, c *coppice.Client, projectRef, ref string) (coppice.APIKey, error) {
	if ref == "" {
		return c.Self(ctx)
	}
	if strings.HasPrefix(ref, "key_") {
		return c.Key(ctx, ref)
	}
	p, err := project(ctx, c, projectRef)
	if err != nil {
		return coppice.APIKey{}, err
	}
	var found []coppice.APIKey
	for k, err := range c.Keys(ctx, p.ID) {
		if err != nil {
			return k, err
		}
		if k.Name == ref && keyState(time.Now(), k) == "valid" {
			found = append(found, k)
		}
	}
	switch len(found) {
	case 0:
		return coppice.APIKey{}, core.Errorf(core.NotFound, core.CodeKeyNotFound, "there is no valid key %q; list the keys with coppice key ls", core.Clip(ref))
	case 1:
		return found[0], nil
	}
	return coppice.APIKey{}, core.Errorf(core.Invalid, core.CodeInvalidID, "%q names %d keys; give the id: coppice key ls", core.Clip(ref), len(found))
}

func keyState(now time.Time, k coppice.APIKey) string {
	switch {
	case !k.RevokedAt.IsZero():
		return "revoked"
	case !k.ExpiresAt.IsZero() && now.After(k.ExpiresAt):
		return "expired"
	}
	return "valid"
}

func newKeyCreateCommand(a *cli.App) *cobra.Command {
	var of string
	var scopes []string
	var ttl time.Duration
	var quiet bool
	c := &cobra.Command{
		Use:   "create NAME",
		Short: "Create an API key and print its secret, once",
		Long: `Create an API key and print its secret once; the secret is stored nowhere. The new key has at most the scopes of the key in use and ends no
later. It is revoked together with that key.

Scopes: workspace:read workspace:create workspace:exec workspace:delete checkpoint:read checkpoint:create checkpoint:delete checkpoint:import
grant:read grant:write secret:reference fleet:read project:read key:read key:write audit:read runner:join, and admin for everything and
all projects. Without --scope a key gets all of them except four: admin; checkpoint:import, which loads a file into a VMM; secret:reference,
which lets grants name any secret that the project may read in Vault; and runner:join, which makes tokens for new runners.`,
		Example: "  coppice key create ci --scope workspace:read --scope workspace:create --ttl 24h\n  COPPICE_TOKEN=$(coppice key create agent --project blue -q) coppice ws ls",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if ttl < 0 || ttl%time.Second != 0 {
				return exit.Misuse(fmt.Errorf("--ttl %s is not a whole number of seconds", ttl))
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			p, err := ownerOf(c.Context(), client, of)
			if err != nil {
				return err
			}
			req := coppice.CreateKeyRequest{Name: args[0], TTLSeconds: int64(ttl / time.Second)}
			for _, s := range scopes {
				req.Scopes = append(req.Scopes, coppice.KeyScope(s))
			}
			made, err := client.CreateKey(c.Context(), p, req)
			if err != nil {
				return err
			}
			return a.Print(made, func(w io.Writer) error {
				if quiet {
					_, err := fmt.Fprintln(w, made.Secret)
					return err
				}
				_, err := fmt.Fprintf(w, "%s\n%s (%s) is valid until %s. The line above is its secret. It is not shown again.\n",
					made.Secret, made.Key.Name, made.Key.ID, render.Moment(made.Key.ExpiresAt))
				return err
			})
		},
	}
	f := c.Flags()
	f.StringVarP(&of, "project", "p", "", "`project` of the new key (default: that of the key in use)")
	f.StringSliceVar(&scopes, "scope", nil, "`scope` of the new key; may be repeated")
	f.DurationVar(&ttl, "ttl", 0, "how long it is valid (default 2160h: 90 days)")
	f.BoolVarP(&quiet, "quiet", "q", false, "print the secret only")
	return c
}

// ownerOf finds a project's id. If no project is named, it does not need the right to read projects.
func ownerOf(ctx context.Context, c *coppice.Client, ref string) (coppice.ProjectID, error) {
	if ref == "" {
		self, err := c.Self(ctx)
		return self.ProjectID, err
	}
	if strings.HasPrefix(ref, "prj_") {
		return ref, nil
	}
	p, err := project(ctx, c, ref)
	return p.ID, err
}

func newKeyListCommand(a *cli.App) *cobra.Command {
	var of string
	var everything bool
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the API keys of a project, newest first",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			p, err := ownerOf(c.Context(), client, of)
			if err != nil {
				return err
			}
			list, now := []coppice.APIKey{}, time.Now()
			for k, err := range client.Keys(c.Context(), p) {
				if err != nil {
					return err
				}
				if everything || keyState(now, k) == "valid" {
					list = append(list, k)
				}
			}
			return a.Print(list, func(w io.Writer) error { return printKeys(w, now, list) })
		},
	}
	c.Flags().StringVarP(&of, "project", "p", "", "`project` whose keys to list (default: that of the key in use)")
	c.Flags().BoolVarP(&everything, "all", "a", false, "also revoked and expired keys")
	return c
}

func printKeys(w io.Writer, now time.Time, list []coppice.APIKey) error {
	rows, below := make([][]string, 0, len(list)), make([]string, 0, len(list))
	for _, k := range list {
		rows = append(rows, []string{k.ID, k.Name, keyState(now, k), render.Age(now, k.LastUsedAt), render.Left(now, k.ExpiresAt), render.Age(now, k.CreatedAt)})
		below = append(below, k.Prefix+"…  "+scopesOf(k))
	}
	return render.TableWithNotes(w, "ID NAME STATE USED LEFT AGE", rows, below)
}

func scopesOf(k coppice.APIKey) string {
	words := make([]string, len(k.Scopes))
	for i, s := range k.Scopes {
		words[i] = string(s)
	}
	return strings.Join(words, " ")
}

func newKeyShowCommand(a *cli.App) *cobra.Command {
	var of string
	c := &cobra.Command{
		Use:     "show [KEY]",
		Aliases: []string{"get"},
		Short:   "Show an API key without its secret (default: the key in use)",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			k, err := key(c.Context(), client, of, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return a.Print(k, func(w io.Writer) error {
				return render.Facts(w,
					"id", k.ID, "name", k.Name, "state", keyState(time.Now(), k), "project", k.ProjectID, "secret", k.Prefix+"…", "scopes", scopesOf(k),
					"made with", k.ParentID, "created", render.Moment(k.CreatedAt), "last used", render.Moment(k.LastUsedAt), "expires", render.Moment(k.ExpiresAt), "revoked", render.Moment(k.RevokedAt))
			})
		},
	}
	c.Flags().StringVarP(&of, "project", "p", "", "`project` to look in (default: that of the key in use)")
	return c
}

func newKeyRevokeCommand(a *cli.App) *cobra.Command {
	var of string
	c := &cobra.Command{
		Use:     "revoke KEY...",
		Aliases: []string{"rm"},
		Short:   "Revoke API keys and the keys that were made with them",
		Long:    `Revoke API keys and the keys that were made with them. Within five seconds the server refuses them, and their open streams have ended.`,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			found, err := argument.All(args, func(ref string) (coppice.APIKey, error) { return key(c.Context(), client, of, ref) }, func(k coppice.APIKey) string { return k.ID })
			if err != nil {
				return err
			}
			ids := []string{}
			failed := argument.EachOf(found, func(k coppice.APIKey) error {
				if err := client.RevokeKey(c.Context(), k.ID); err != nil {
					return fmt.Errorf("%s is not revoked: %w", k.ID, err)
				}
				ids = append(ids, k.ID)
				return nil
			})
			if err := a.Print(ids, func(w io.Writer) error {
				for _, id := range ids {
					fmt.Fprintf(w, "%s is revoked\n", id)
				}
				return nil
			}); err != nil {
				return err
			}
			return failed
		},
	}
	c.Flags().StringVarP(&of, "project", "p", "", "`project` to look in (default: that of the key in use)")
	return c
}
