package fleet

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/operator/host"
	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewTokenCommand makes the command "coppice runner-token".
func NewTokenCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:   "runner-token",
		Short: "Create tokens for runners to join the cluster, and remove runners",
	}
	c.AddCommand(newTokenCreateCommand(a), newTokenEnsureCommand(a), newTokenRevokeCommand(a))
	return c
}

func newTokenCreateCommand(a *cli.App) *cobra.Command {
	var runner string
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "create",
		Short: "Print a short-lived token for one runner to join",
		Long: `Print a token for one runner to join: 'coppice runner --join-token-file'. The token works once and expires soon. It also identifies the
cluster, so that the runner recognizes the controller. Without --runner the token is for a new runner.`,
		Example: "  coppice runner-token create > join-token",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			req := coppice.CreateRunnerTokenRequest{RunnerID: runner, TTLSeconds: int64(ttl / time.Second)}
			token, err := client.CreateRunnerToken(c.Context(), req)
			if err != nil {
				return err
			}
			return a.Print(token, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, token.Token)
				return err
			})
		},
	}
	c.Flags().StringVar(&runner, "runner", "", "`id` of a runner that joined before and has lost its certificate")
	c.Flags().DurationVar(&ttl, "ttl", 15*time.Minute, "lifetime of the token, at most 24h")
	return c
}

func newTokenEnsureCommand(a *cli.App) *cobra.Command {
	var dataDir, out string
	c := &cobra.Command{
		Use:   "ensure",
		Short: "Create a token for the runner of a data directory, if it needs one to start",
		Long: `Create a token for the runner of a data directory, if it needs one to start. It needs one if it has not joined yet, or if its certificate
expired while it was off and it shall be the same runner again. Otherwise the command asks the server nothing and writes nothing. Scripts that
start runners unattended call it before the runner.`,
		Example: "  coppice runner-token ensure --data-dir /var/lib/coppice --out /run/coppice-join/token",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if out == "" {
				return exit.Misuse(errors.New("--out is needed"))
			}
			needed, id, err := daemon.NeedsToken(dataDir)
			if err != nil {
				return err
			}
			if needed {
				client, err := a.Client()
				if err != nil {
					return err
				}
				token, err := client.CreateRunnerToken(c.Context(), coppice.CreateRunnerTokenRequest{RunnerID: coppice.RunnerID(id)})
				if err != nil {
					return err
				}
				if err := atomicfile.Write(out, []byte(token.Token+"\n"), 0o600); err != nil {
					return err
				}
				id = core.RunnerID(token.RunnerID)
			}
			return a.Print(map[string]any{"runner_id": id, "token_made": needed}, func(w io.Writer) error {
				said := "is a member; no token was made"
				if needed {
					said = "joins with the token in " + out
				}
				_, err := fmt.Fprintf(w, "Runner %s %s.\n", id, said)
				return err
			})
		},
	}
	c.Flags().StringVar(&dataDir, "data-dir", cmp.Or(a.Getenv("COPPICE_DATA_DIR"), host.DefaultDataDir), "the runner's data `directory`")
	c.Flags().StringVar(&out, "out", "", "`file` for the token; only its owner may read it")
	return c
}

func newTokenRevokeCommand(a *cli.App) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "revoke RUNNER",
		Short: "Remove a runner for good: its certificate is refused from now on",
		Long: `Remove a runner for good. Its certificate is refused from now on, and it kills its VMs as soon as it learns this. A checkpoint that is only
captured there can no longer be forked; a sealed one can.`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			if err := client.DeleteRunner(c.Context(), args[0], force); err != nil {
				return err
			}
			return a.Print(map[string]string{"id": args[0]}, func(io.Writer) error { return nil })
		},
	}
	c.Flags().BoolVar(&force, "force", false, "remove it although workspaces live on it; they are lost")
	return c
}
