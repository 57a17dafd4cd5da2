// Package mcp has the command that serves Coppice's tools to agents.
package mcp

import (
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/version"
	server "github.com/coppice-dev/coppice/mcp"
)

// NewCommand makes the command "coppice mcp".
func NewCommand(a *cli.App) *cobra.Command {
	var listen string
	var cfg server.HTTPConfig
	c := &cobra.Command{
		Use:   "mcp",
		Short: "Serve workspaces, checkpoints and forks as tools for agents (MCP)",
		Long: `Serve the Model Context Protocol on standard input and output, for the host of an agent that starts this command. The agent can do what
the API key can do, so give it a key of a project of its own. docs/MCP.md has configurations for the usual hosts.

With --listen, serve streamable HTTP for several users: each request brings an API key as its bearer token, and gets what that key may do.`,
		Example: "  coppice key create agent --project blue --scope workspace:read,workspace:create,workspace:exec,checkpoint:read,checkpoint:create\n  COPPICE_TOKEN_FILE=agent.key coppice mcp\n  coppice mcp --listen 127.0.0.1:7080",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.Connection()
			if err != nil {
				return err
			}
			cfg.Server, cfg.Version, cfg.Log = conn.Server, version.String(), slog.New(slog.NewTextHandler(a.Stderr, nil))
			if listen != "" {
				return server.ServeHTTP(c.Context(), cfg, listen)
			}
			return server.ServeStdio(c.Context(), cfg.Config, conn.Token, io.NopCloser(a.Stdin), unclosed{a.Stdout})
		},
	}
	c.Flags().BoolVar(&cfg.ReadOnly, "read-only", false, "serve only the tools that change nothing")
	c.Flags().StringVar(&listen, "listen", "", "serve HTTP at this `address` of loopback, such as 127.0.0.1:7080, instead of standard input and output; every request brings its own API key")
	c.Flags().StringVar(&cfg.PublicURL, "public-url", "", "`URL` of the proxy with TLS before the server, such as https://mcp.example.com; for --listen")
	c.Flags().StringSliceVar(&cfg.Origins, "allow-origin", nil, "web `origin` whose pages may use the server, such as https://app.example.com; for --listen")
	c.Flags().StringSliceVar(&cfg.AuthorizationServers, "authorization-server", nil, "`URL` of an OAuth server that issues API keys of this Coppice, named in the metadata; for --listen")
	return c
}

// unclosed is a stream that belongs to the process.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }
