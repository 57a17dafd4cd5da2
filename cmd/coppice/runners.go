package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newRunnerTokenCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "runner-token",
		Short: "Let runners into the cluster, and remove them",
	}
	c.AddCommand(newRunnerTokenCreateCommand(a), newRunnerTokenRevokeCommand(a))
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

func newRunnerTokenRevokeCommand(a *app) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "revoke RUNNER",
		Short: "Remove a runner for good: its certificate is refused from now on",
		Long: `Remove a runner for good: its certificate is refused from now on, and it kills what it runs as soon as it hears so. Its checkpoints cannot be
forked any more.`,
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
