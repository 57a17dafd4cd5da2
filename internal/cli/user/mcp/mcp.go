// Package mcp has the command that serves Coppice's tools to agents.
package mcp

import (
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	server "github.com/coppice-dev/coppice/mcp"
)

// NewCommand makes the command "coppice mcp".
func NewCommand(a *cli.App) *cobra.Command {
	var readOnly bool
	c := &cobra.Command{
		Use:   "mcp",
		Short: "Serve workspaces, checkpoints and forks as tools for agents (MCP)",
		Long: `Serve the Model Context Protocol on standard input and output, for the host of an agent that starts this command. The agent can do what
the API key can do, so give it a key of a project of its own. docs/MCP.md has configurations for the usual hosts.`,
		Example: "  coppice key create agent --project blue --scope workspace:read,workspace:create,workspace:exec,checkpoint:read,checkpoint:create\n  COPPICE_TOKEN_FILE=agent.key coppice mcp",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.Connection()
			if err != nil {
				return err
			}
			cfg := server.Config{Server: conn.Server, ReadOnly: readOnly, Version: cli.Version(), Log: slog.New(slog.NewTextHandler(a.Stderr, nil))}
			return server.ServeStdio(c.Context(), cfg, conn.Token, io.NopCloser(a.Stdin), unclosed{a.Stdout})
		},
	}
	c.Flags().BoolVar(&readOnly, "read-only", false, "serve only the tools that change nothing")
	return c
}

// unclosed is a stream that belongs to the process.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }
