package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newRunnerTokenCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "runner-token",
		Short: "Let runners into the cluster, and remove them",
	}
	c.AddCommand(newRunnerTokenCreateCommand(a), newRunnerTokenEnsureCommand(a), newRunnerTokenRevokeCommand(a))
	return c
}

func newRunnerTokenCreateCommand(a *app) *cobra.Command {
	var runner string
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "create",
		Short: "Print a token with which one runner joins, once and soon",
		Long: `Print a token with which one runner joins, once and soon: 'coppice runner --join-token-file'. It names the cluster, too, so that the runner
knows the controller. Without --runner it is for a new runner.`,
		Example: "  coppice runner-token create > join-token",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			req := coppice.CreateRunnerTokenRequest{RunnerID: runner, TTLSeconds: int64(ttl / time.Second)}
			token, err := client.CreateRunnerToken(c.Context(), req)
			if err != nil {
				return err
			}
			return a.print(token, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, token.Token)
				return err
			})
		},
	}
	c.Flags().StringVar(&runner, "runner", "", "`id` of a runner that joined before and has lost its certificate")
	c.Flags().DurationVar(&ttl, "ttl", 15*time.Minute, "how long it may be used, at most 24h")
	return c
}

func newRunnerTokenEnsureCommand(a *app) *cobra.Command {
	var dataDir, out string
	c := &cobra.Command{
		Use:   "ensure",
		Short: "Make a token for the runner of a data directory, if it needs one to start",
		Long: `Make a token for the runner of a data directory, if it needs one to start: it has not joined yet, or its certificate has expired while it was off
and it is to be the same runner again. Else nothing is asked of the server and nothing written. It is for what starts runners unattended, before the runner.`,
		Example: "  coppice runner-token ensure --data-dir /var/lib/coppice --out /run/coppice-join/token",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if out == "" {
				return usageError{errors.New("--out is needed")}
			}
			needed, id, err := daemon.NeedsToken(dataDir)
			if err != nil {
				return err
			}
			if needed {
				client, err := a.client()
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
			return a.print(map[string]any{"runner_id": id, "token_made": needed}, func(w io.Writer) error {
				said := "is a member; no token was made"
				if needed {
					said = "joins with the token in " + out
				}
				_, err := fmt.Fprintf(w, "Runner %s %s.\n", id, said)
				return err
			})
		},
	}
	c.Flags().StringVar(&dataDir, "data-dir", firstOf(a.getenv("COPPICE_DATA_DIR"), defaultDataDir), "the runner's data `directory`")
	c.Flags().StringVar(&out, "out", "", "`file` for the token, which only its owner may read")
	return c
}

func newRunnerTokenRevokeCommand(a *app) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "revoke RUNNER",
		Short: "Remove a runner for good: its certificate is refused from now on",
		Long: `Remove a runner for good: its certificate is refused from now on, and it kills what it runs as soon as it hears so. What is only
captured on it cannot be forked any more; what is sealed can.`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			if err := client.DeleteRunner(c.Context(), args[0], force); err != nil {
				return err
			}
			return a.print(map[string]string{"id": args[0]}, func(io.Writer) error { return nil })
		},
	}
	c.Flags().BoolVar(&force, "force", false, "although workspaces live on it: they are lost")
	return c
}
