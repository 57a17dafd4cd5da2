package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newWSUsageCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "usage WORKSPACE",
		Short: "Show the usage of a workspace",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			ws, err := workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			u, err := client.WorkspaceUsage(c.Context(), ws.ID)
			if err != nil {
				return err
			}
			return a.print(u, func(w io.Writer) error { return printUsage(w, u) })
		},
	}
}

func newCkptUsageCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "usage CHECKPOINT",
		Short: "Show the usage of all descendants of a checkpoint",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			cp, err := checkpoint(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			u, err := client.CheckpointUsage(c.Context(), cp.ID)
			if err != nil {
				return err
			}
			return a.print(u, func(w io.Writer) error { return printUsage(w, u) })
		},
	}
}

func printUsage(w io.Writer, u coppice.Usage) error {
	return facts(w,
		"workspaces", fmt.Sprint(u.Workspaces), "checkpoints", fmt.Sprint(u.Checkpoints),
		"CPU", fmt.Sprintf("%.1f s", u.CPUSeconds), "memory", fmt.Sprintf("%.1f GiB s", u.GibSeconds), "stored", size(u.StoredBytes),
		"sent", size(u.SentBytes), "received", size(u.ReceivedBytes), "sampled", moment(u.SampledAt),
	)
}
