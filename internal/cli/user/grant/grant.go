// Package grant has the commands for grants: secrets that workspaces use without having them.
package grant

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewCommand makes the command "coppice grant".
func NewCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:   "grant",
		Short: "Let workspaces use secrets that never enter them",
		Long: `Let workspaces use secrets that never enter them. Programs in a workspace find a placeholder in an environment variable. The egress proxy of
the host replaces it with the secret, in one header of requests to the hosts of the grant. Forks have the grants of their parent, each with
its own placeholder.`,
	}
	c.AddCommand(newPutCommand(a), newListCommand(a), newShowCommand(a), newRevokeCommand(a))
	return c
}

// target finds the workspace of a grant, and returns the client that did.
func target(ctx context.Context, a *cli.App, ref string) (*coppice.Client, coppice.Workspace, error) {
	client, err := a.Client()
	if err != nil {
		return nil, coppice.Workspace{}, err
	}
	ws, err := find.Workspace(ctx, client, ref)
	return client, ws, err
}

// maxSecretFile is larger than the largest secret.
const maxSecretFile = 64 << 10

// readGrantSecret reads a secret from a file, or from standard input for "-". A line's end is not part of it.
func readGrantSecret(path string, stdin io.Reader) (string, error) {
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return "", exit.Misuse(fmt.Errorf("--secret-file: %w", err))
		}
		defer f.Close()
		stdin = f
	}
	b, err := io.ReadAll(io.LimitReader(stdin, maxSecretFile))
	if err != nil {
		return "", err
	}
	text := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	if text == "" {
		return "", exit.Misuse(errors.New("--secret-file: it is empty"))
	}
	return text, nil
}

func newPutCommand(a *cli.App) *cobra.Command {
	var req coppice.PutGrantRequest
	var mode, file string
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "put WORKSPACE GRANT",
		Short: "Let a workspace use a secret, or change how it may use it",
		Long: `Let a workspace use a secret for certain hosts. The workspace's rules must allow these hosts. For a known provider, its name is enough:
openai, anthropic, mistral, gemini, github, gitlab, huggingface. The command reads the secret from a file or standard input, never from the
command line.

Without --secret-file and --vault-ref, an existing grant keeps its secret. This needs the same or a smaller scope: no further host, method or
path, the same header and mode, and no later end. Otherwise give the secret again. --vault-ref needs a key with the scope secret:reference.
The change also applies to forks that have the grant from this workspace.`,
		Example: `  coppice grant put demo openai --secret-file - < key
  coppice grant put demo openai --vault-ref vault://secret/agents/openai#key --rpm 60
  coppice grant put demo tickets --host tickets.example.com --header X-Api-Key --method GET --path /api/v1 --env TICKETS_KEY --secret-file key`,
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			req.Mode, req.TTLSeconds = coppice.GrantMode(mode), int64(ttl/time.Second)
			if ttl < 0 || ttl%time.Second != 0 {
				return exit.Misuse(fmt.Errorf("--ttl %s is not a whole number of seconds", ttl))
			}
			var err error
			if file != "" {
				if req.Secret, err = readGrantSecret(file, a.Stdin); err != nil {
					return err
				}
			}
			client, ws, err := target(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			g, err := client.PutGrant(c.Context(), ws.ID, args[1], req)
			if err != nil {
				return err
			}
			return a.Print(g, func(w io.Writer) error { return printGrant(w, g) })
		},
	}
	f := c.Flags()
	f.StringVar(&file, "secret-file", "", "`file` with the secret; - for standard input")
	f.StringVar(&req.VaultRef, "vault-ref", "", "`URL` of a secret in the Vault, instead of --secret-file: vault://mount/path#field")
	f.StringVar(&req.Provider, "provider", "", "`provider` of the secret (default: the grant's name, if that is a provider)")
	f.StringVar(&mode, "mode", "", "how the secret gets into requests: header or base_url (default: as usual for the provider)")
	f.StringArrayVar(&req.AllowedHosts, "host", nil, "host that may get the secret, as `HOST[:PORT]`; may be repeated")
	f.StringVar(&req.Header, "header", "", "the `header` that carries the secret (default: the provider's usual one, or Authorization)")
	f.StringArrayVar(&req.Methods, "method", nil, "allowed `method` (default: any); may be repeated")
	f.StringArrayVar(&req.Paths, "path", nil, "allowed `prefix` of paths (default: any); may be repeated")
	f.StringVar(&req.Env, "env", "", "the environment `variable` that has the placeholder")
	f.StringVar(&req.BaseURLEnv, "base-url-env", "", "the environment `variable` that has the base URL, in mode base_url")
	f.StringVar(&req.BaseURLPath, "base-url-path", "", "`path` of the base URL after its host")
	f.DurationVar(&ttl, "ttl", 0, "end the grant after this `duration` from now (default: until it is revoked)")
	f.Int64Var(&req.MaxBytes, "max-bytes", 0, "maximum `bytes` of bodies, in both directions, for each machine (default: no limit)")
	f.IntVar(&req.RequestsPerMinute, "rpm", 0, "maximum `requests` per minute for each machine (default: no limit)")
	return c
}

func newListCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "ls WORKSPACE",
		Aliases: []string{"list"},
		Short:   "List the grants of a workspace",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, ws, err := target(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			list, err := client.Grants(c.Context(), ws.ID)
			if err != nil {
				return err
			}
			return a.Print(list, func(w io.Writer) error {
				rows := make([][]string, 0, len(list))
				for _, g := range list {
					from := "here"
					if g.OwnerID != g.WorkspaceID {
						from = render.Short(g.OwnerID)
					}
					rows = append(rows, []string{g.ID, g.Provider, string(g.Mode), strings.Join(g.AllowedHosts, ","), strings.Join(slices.Sorted(maps.Keys(g.Env)), ","), from, grantState(g)})
				}
				return render.Table(w, "GRANT PROVIDER MODE HOSTS ENV FROM STATE", rows)
			})
		},
	}
}

func grantState(g coppice.Grant) string {
	switch {
	case g.Expired:
		return "expired"
	case g.Pending:
		return "not in force yet"
	}
	return "in force"
}

func newShowCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "show WORKSPACE GRANT",
		Short: "Show a grant, and the variables that programs find",
		Args:  cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			client, ws, err := target(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			g, err := client.Grant(c.Context(), ws.ID, args[1])
			if err != nil {
				return err
			}
			return a.Print(g, func(w io.Writer) error { return printGrant(w, g) })
		},
	}
}

func printGrant(w io.Writer, g coppice.Grant) error {
	line := func(name, value string) {
		if value != "" && value != "0" {
			fmt.Fprintf(w, "%-12s%s\n", name, foreign.Visible(value))
		}
	}
	line("grant", g.ID)
	line("state", grantState(g))
	line("provider", g.Provider)
	line("mode", string(g.Mode))
	line("hosts", strings.Join(g.AllowedHosts, ", "))
	line("header", g.Header)
	line("methods", strings.Join(g.Methods, ", "))
	line("paths", strings.Join(g.Paths, ", "))
	line("vault", g.VaultRef)
	line("per minute", fmt.Sprint(g.RequestsPerMinute))
	line("bytes", fmt.Sprint(g.MaxBytes))
	if !g.ExpiresAt.IsZero() {
		line("expires", g.ExpiresAt.UTC().Format(time.RFC3339))
	}
	for _, name := range slices.Sorted(maps.Keys(g.Env)) {
		line("env", name+"="+g.Env[name])
	}
	return nil
}

func newRevokeCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "revoke WORKSPACE GRANT",
		Aliases: []string{"rm"},
		Short:   "Revoke a grant from a workspace and its forks",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			client, ws, err := target(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			if err := client.RevokeGrant(c.Context(), ws.ID, args[1]); err != nil {
				return err
			}
			return a.Print(struct {
				Revoked string `json:"revoked"`
			}{args[1]}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s: %s is revoked\n", ws.Name, args[1])
				return err
			})
		},
	}
}

// OfFork reads which grants forks get; nil if no flag was given.
func OfFork(s string) coppice.Grants {
	switch s {
	case "":
		return nil
	case "inherit", "none":
		return s
	}
	return strings.Split(s, ",")
}
