// Package cli has the parts that every command uses: streams, environment, global flags, the
// connection to a server, results and progress.
//
// The commands are in the packages below it. Package user has the commands for people who use a
// cluster, and package operator those for people who run one. The other packages below it are parts
// that several commands share.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/foreign"
	"github.com/coppice-dev/coppice/internal/version"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// App has the parts that every command uses: the streams, the environment and the global flags. Tests make their own.
type App struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Getenv         func(string) string

	JSON    bool   // --json
	server  string // --server, else COPPICE_SERVER, else the connection file
	token   string // --token, else COPPICE_TOKEN, else the connection file
	context string // --context, else COPPICE_CONTEXT, else the current one of the connection file

	began bool       // the command line was understood
	ran   string     // the command that ran, with the words above it
	tried Connection // the server that the command used
}

// Run executes a command line of the given commands and returns the exit status.
func (a *App) Run(ctx context.Context, args []string, commands ...func(*App) *cobra.Command) int {
	root := a.Root(commands...)
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	if err != nil && !a.began {
		a.JSON = a.JSON || slices.Contains(args, "--json") // the error may have come before that flag was reached
		err = exit.Misuse(err)
	}
	a.ran = c.CommandPath()
	return a.Report(a.explain(ctx, err))
}

// Root makes the root command, with the given commands below it and the global flags.
func (a *App) Root(commands ...func(*App) *cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use:           "coppice",
		Short:         "Checkpoint running microVMs and fork them from any checkpoint",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.SetFlagErrorFunc(badFlag)
	flags := root.PersistentFlags()
	flags.BoolVar(&a.JSON, "json", false, "print JSON instead of text")
	flags.StringVar(&a.server, "server", "", "server `address`: unix:///path or http(s)://host:port (default: $COPPICE_SERVER, else that of coppice dev)")
	flags.StringVar(&a.context, "context", "", "use the server and the key of this `context`, see 'coppice context' (default: $COPPICE_CONTEXT or the current one)")
	flags.StringVar(&a.token, "token", "", "API `key` (default: $COPPICE_TOKEN or the file $COPPICE_TOKEN_FILE, else that of coppice dev)")
	wantsVersion := root.Flags().BoolP("version", "v", false, "show which build this program is, as 'coppice version' does")
	for _, c := range commands {
		root.AddCommand(c(a))
	}
	a.markBegin(root)
	root.Args = cobra.ArbitraryArgs
	root.RunE = func(c *cobra.Command, args []string) error {
		if *wantsVersion && len(args) == 0 {
			a.began = true
			return a.PrintVersion()
		}
		return unlessUnknown(c, args)
	}
	return root
}

// markBegin makes every command note that its flags and arguments were accepted. So every failure before this is a
// mistake in the command line.
func (a *App) markBegin(c *cobra.Command) {
	a.complete(c)
	if c.HasParent() && c.Args != nil {
		c.Args = countArguments(c.Args)
	}
	switch run := c.RunE; {
	case run != nil:
		c.RunE = func(c *cobra.Command, args []string) error {
			a.began = true
			return run(c, args)
		}
	case c.HasParent(): // a group: cobra itself would answer an unknown word with help and success
		c.RunE = unlessUnknown
	}
	for _, sub := range c.Commands() {
		a.markBegin(sub)
	}
}

// unlessUnknown is a group without a command: it shows the help, and refuses a word that is no command of it.
func unlessUnknown(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return exit.Misuse(unknownCommand(c, args[0]))
	}
	return c.Help()
}

// Client connects to the server that the flags, the environment or the connection file name.
func (a *App) Client() (*coppice.Client, error) {
	conn, err := a.connection()
	if err != nil {
		return nil, err
	}
	a.tried = conn
	return coppice.New(coppice.Config{Server: conn.Server, Token: conn.Token, UserAgent: "coppice-cli/" + version.String()})
}

// Print writes a result: as JSON with --json, else by human.
func (a *App) Print(v any, human func(io.Writer) error) error {
	if !a.JSON {
		w := foreign.NewWriter(a.Stdout)
		return errors.Join(human(w), w.Close())
	}
	return foreign.EncodeJSON(a.Stdout, v, "  ")
}

// PrintNew prints a new object, or only its id if the user wants only this.
func PrintNew[ID ~string](a *App, v any, id ID, quiet bool, human func(io.Writer) error) error {
	return a.Print(v, func(w io.Writer) error {
		if quiet {
			_, err := fmt.Fprintln(w, id)
			return err
		}
		return human(w)
	})
}

// Report prints an error, if there is one to print, and returns the exit status.
func (a *App) Report(err error) int {
	status := exit.Status(err)
	if err == nil || errors.As(err, new(exit.StatusError)) {
		return status
	}
	return a.ReportAs(err, status)
}

// ReportAs prints an error for a program that ends with another status than the error has.
func (a *App) ReportAs(err error, status int) int {
	code, message := exit.Describe(err)
	if a.JSON {
		_ = foreign.EncodeJSON(a.Stderr, map[string]any{"error": map[string]any{"code": code, "message": message, "exit_status": status}}, "")
		return status
	}
	fmt.Fprintf(a.Stderr, "coppice: %s\n", foreign.Escape(message, "\n\t"))
	if exit.IsMisuse(err) {
		fmt.Fprintf(a.Stderr, "Try '%s --help'.\n", cmp.Or(a.ran, "coppice"))
	}
	return status
}
