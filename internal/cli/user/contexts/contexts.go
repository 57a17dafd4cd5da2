// Package contexts has the commands for the servers that the client commands know by name.
package contexts

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/connections"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/render"
)

// NewCommand makes the command "coppice context".
func NewCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:     "context",
		Aliases: []string{"ctx"},
		Short:   "Choose among the servers that this user knows",
		Long: `Choose among the servers that this user knows. A context is a name for a server and a key. They are in ~/.config/coppice/connection.json, or in
the file that COPPICE_CONNECTION names.

'coppice dev' enters its own context and takes it away when it ends. It becomes the current one unless the server of the current one
still runs. --context and COPPICE_CONTEXT choose another context for one command; --server and COPPICE_SERVER win over the current one.

The key of a context goes to its server only. COPPICE_TOKEN goes to COPPICE_SERVER; where that is not set, to --server, or to the current
context if 'coppice dev' entered it. Other contexts use their own key.`,
	}
	c.AddCommand(newListCommand(a), newUseCommand(a), newAddCommand(a), newRemoveCommand(a))
	return c
}

// listed is a context as --json prints it. It has no key.
type listed struct {
	Name    string `json:"name"`
	Server  string `json:"server"`
	Current bool   `json:"current"`
	DataDir string `json:"data_dir,omitempty"`
}

func newListCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List contexts",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			file, _, err := a.Contexts()
			if err != nil {
				return err
			}
			list := []listed{}
			for _, name := range file.Names() {
				e := file.Contexts[name]
				list = append(list, listed{Name: name, Server: cli.ShownAddress(e.Server), Current: name == file.Current, DataDir: e.DataDir})
			}
			return a.Print(list, func(w io.Writer) error { return printContexts(w, list) })
		},
	}
}

func printContexts(w io.Writer, list []listed) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No contexts. Start a server with coppice dev, or add one with coppice context add.")
		return err
	}
	rows := make([][]string, 0, len(list))
	for _, c := range list {
		current := ""
		if c.Current {
			current = "*"
		}
		rows = append(rows, []string{current, c.Name, c.Server, c.DataDir})
	}
	return render.Table(w, "CURRENT NAME SERVER DATA", rows)
}

func newUseCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "use CONTEXT",
		Short: "Make a context the current one",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			var chosen listed
			err := a.ChangeContexts(func(f *connections.File) error {
				e, ok := f.Contexts[args[0]]
				if !ok {
					return unknown(args[0])
				}
				f.Current = args[0]
				chosen = listed{Name: args[0], Server: cli.ShownAddress(e.Server), Current: true, DataDir: e.DataDir}
				return nil
			})
			if err != nil {
				return err
			}
			return a.Print(chosen, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "commands now use %s at %s\n", chosen.Name, chosen.Server)
				return err
			})
		},
	}
}

func newAddCommand(a *cli.App) *cobra.Command {
	var tokenFile string
	var use bool
	c := &cobra.Command{
		Use:   "add NAME ADDRESS",
		Short: "Add a context: a server and a key for it",
		Long: `Add a context: a server and a key for it. ADDRESS is unix:///path or http(s)://host:port. A context of that name is replaced, unless 'coppice
dev' entered it.`,
		Example: "  coppice context add lab https://ctl-1:7070 --token-file agent.key --use",
		Args:    cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := core.ValidateName("NAME", args[0]); err != nil {
				return exit.Misuse(err)
			}
			if tokenFile == "" {
				return exit.Misuse(errors.New("a context needs a key: give --token-file"))
			}
			server, err := cli.CompleteAddress(args[1])
			if err != nil {
				return exit.Misuse(err)
			}
			token, err := secret(a, tokenFile)
			if err != nil {
				return err
			}
			added := listed{Name: args[0], Server: cli.ShownAddress(server)}
			err = a.ChangeContexts(func(f *connections.File) error {
				if e, ok := f.Contexts[args[0]]; ok && e.DataDir != "" {
					return core.Errorf(core.Conflict, core.CodeNameTaken, "the context %s is that of coppice dev on %s; choose another name", args[0], e.DataDir)
				}
				f.Contexts[args[0]] = connections.Entry{Server: server, Token: token}
				if use || len(f.Contexts) == 1 {
					f.Current = args[0]
				}
				added.Current = f.Current == args[0]
				return nil
			})
			if err != nil {
				return err
			}
			return a.Print(added, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s is %s\n", added.Name, added.Server)
				return err
			})
		},
	}
	f := c.Flags()
	f.StringVar(&tokenFile, "token-file", "", "`file` with the API key; - for standard input")
	f.BoolVar(&use, "use", false, "make it the current context")
	return c
}

// secret reads a key from a file or from standard input.
func secret(a *cli.App, file string) (string, error) {
	token, err := argument.SecretFrom(file, a.Stdin)
	if err == nil && token == "" {
		err = core.Errorf(core.Invalid, core.CodeInvalidField, "--token-file %s has no key in it", file)
	}
	return token, err
}

func newRemoveCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "rm CONTEXT...",
		Short: "Forget contexts; their servers go on",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			err := a.ChangeContexts(func(f *connections.File) error {
				for _, name := range args { // all or none: an error changes nothing
					if !f.Drop(name) {
						return unknown(name)
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
			return a.Print(args, func(w io.Writer) error {
				for _, name := range args {
					fmt.Fprintf(w, "%s is forgotten\n", name)
				}
				return nil
			})
		},
	}
}

func unknown(name string) error {
	return core.Errorf(core.Invalid, core.CodeInvalidName, "there is no context %q; list the contexts with coppice context ls", core.Clip(name))
}
