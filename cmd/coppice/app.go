package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"slices"

	"github.com/spf13/cobra"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// app is what every command works with: the streams, the environment and the global flags. Tests make their own.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string

	json   bool   // --json
	server string // --server, else COPPICE_SERVER, else the connection file
	token  string // --token, else COPPICE_TOKEN, else the connection file

	began bool // the command line was understood
}

// run executes a command line of the given commands and returns the exit status.
func (a *app) run(ctx context.Context, args []string, commands ...func(*app) *cobra.Command) int {
	root := a.root(commands...)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && !a.began {
		a.json = a.json || slices.Contains(args, "--json") // the error may have come before that flag was reached
		err = misuse(err)
	}
	return a.report(err)
}

// root makes the command that the given commands are below, with the flags that all have.
func (a *app) root(commands ...func(*app) *cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use:           "coppice",
		Short:         "Checkpoint running microVMs and fork them from any checkpoint",
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	flags := root.PersistentFlags()
	flags.BoolVar(&a.json, "json", false, "print JSON instead of text")
	flags.StringVar(&a.server, "server", "", "server `address`: unix:///path or http(s)://host:port (default: $COPPICE_SERVER, else that of coppice dev)")
	flags.StringVar(&a.token, "token", "", "API `key` (default: $COPPICE_TOKEN or the file $COPPICE_TOKEN_FILE, else that of coppice dev)")
	for _, c := range commands {
		root.AddCommand(c(a))
	}
	a.markBegin(root)
	return root
}

// markBegin makes every command note that its flags and arguments were accepted, so that whatever fails before is a
// mistake in the command line.
func (a *app) markBegin(c *cobra.Command) {
	switch run := c.RunE; {
	case run != nil:
		c.RunE = func(c *cobra.Command, args []string) error {
			a.began = true
			return run(c, args)
		}
	case c.HasParent(): // a group: cobra itself would answer an unknown word with help and success
		c.RunE = func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return misuse(fmt.Errorf("unknown command %q for %q", args[0], c.CommandPath()))
			}
			return c.Help()
		}
	}
	for _, sub := range c.Commands() {
		a.markBegin(sub)
	}
}

// client connects to the server that the flags, the environment or the connection file name.
func (a *app) client() (*coppice.Client, error) {
	conn, err := a.connection()
	if err != nil {
		return nil, err
	}
	return coppice.New(coppice.Config{Server: conn.Server, Token: conn.Token, UserAgent: "coppice-cli/" + version()})
}

// print writes a result: as JSON with --json, else by human.
func (a *app) print(v any, human func(io.Writer) error) error {
	if !a.json {
		w := &foreignWriter{w: a.stdout}
		return errors.Join(human(w), w.Close())
	}
	return encodeJSON(a.stdout, v, "  ")
}

// printNew prints what was made: only its id, if that is all that is wanted.
func printNew[ID ~string](a *app, v any, id ID, quiet bool, human func(io.Writer) error) error {
	return a.print(v, func(w io.Writer) error {
		if quiet {
			_, err := fmt.Fprintln(w, id)
			return err
		}
		return human(w)
	})
}

// report prints an error, if there is one to print, and returns the exit status.
func (a *app) report(err error) int {
	status := exitStatus(err)
	if err == nil || errors.As(err, new(statusError)) {
		return status
	}
	code, message := describe(err)
	if a.json {
		_ = encodeJSON(a.stderr, map[string]any{"error": map[string]any{"code": code, "message": message, "exit_status": status}}, "")
		return status
	}
	fmt.Fprintf(a.stderr, "coppice: %s\n", escape(message, "\n\t"))
	if isMisuse(err) {
		fmt.Fprintln(a.stderr, "Try 'coppice --help'.")
	}
	return status
}

// version is what the build recorded: a tag, a pseudo-version of the commit, or (devel).
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(unknown)"
}
