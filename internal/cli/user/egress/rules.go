package egress

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// AllowFlags say what may be reached.
type AllowFlags struct {
	allow []string
	none  bool
}

// Add adds them to a command.
func (a *AllowFlags) Add(c *cobra.Command) {
	f := c.Flags()
	f.StringArrayVar(&a.allow, "allow", nil, "allow only this destination: `HOST[:PORT]`, *.DOMAIN, tcp://HOST:PORT or bundle:NAME; may be repeated")
	f.BoolVar(&a.none, "allow-none", false, "allow no destination, not even those of the parent workspace")
}

// Read returns the destinations that the flags allow. It returns nil if no flag was given.
func (a *AllowFlags) Read() (*[]string, error) {
	switch {
	case a.none && len(a.allow) > 0:
		return nil, exit.Misuse(errors.New("--allow and --allow-none exclude each other"))
	case a.none:
		return &[]string{}, nil
	case len(a.allow) > 0:
		for _, rule := range a.allow {
			if err := plainRule("--allow", rule); err != nil {
				return nil, err
			}
		}
		return &a.allow, nil
	}
	return nil, nil
}

// plainRule explains what people paste instead of a rule: a rule names a host, not a URL.
func plainRule(flag, rule string) error {
	scheme, rest, ok := strings.Cut(rule, "://")
	if !ok || scheme != "http" && scheme != "https" {
		return nil
	}
	host, _, _ := strings.Cut(rest, "/")
	if scheme == "http" && !strings.Contains(host, ":") {
		host += ":80"
	}
	return exit.Misuse(fmt.Errorf("%[1]s %[2]q is a URL, and a rule names a host: give %[1]s %[3]s", flag, core.Clip(rule), core.Clip(host)))
}

// NewRulesCommand makes the command "coppice ws network".
func NewRulesCommand(a *cli.App) *cobra.Command {
	var flags AllowFlags
	var add, remove []string
	var version int64
	c := &cobra.Command{
		Use:   "network WORKSPACE",
		Short: "Show or change what a workspace may reach",
		Long: `Show what a workspace may reach, change single destinations with --add and --remove, or replace all of them with --allow or --allow-none.
The change also ends open connections that are no longer allowed. A fork never reaches more than its parent workspace: a removed
destination is removed from all forks as well.

With --version, the change is made only if that is still the workspace's version.`,
		Example: "  coppice ws network demo\n  coppice ws network demo --allow bundle:python --allow '*.example.com'\n  coppice ws network demo --add api.example.com --remove bundle:python\n  coppice ws network demo --allow-none",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			change, changes, err := networkPatch(flags, add, remove)
			if err != nil {
				return err
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ws, err := find.Workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			if changes {
				ws, err = client.PatchWorkspace(c.Context(), ws.ID, coppice.PatchWorkspaceRequest{Version: version, Network: &change})
				if err != nil {
					return err
				}
			}
			return a.Print(ws.Network, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s: %s\n", ws.Name, foreign.Visible(Describe(ws.Network)))
				return err
			})
		},
	}
	flags.Add(c)
	c.Flags().StringArrayVar(&add, "add", nil, "allow this `destination` too; may be repeated")
	c.Flags().StringArrayVar(&remove, "remove", nil, "do not allow this `destination` any more; may be repeated")
	c.Flags().Int64Var(&version, "version", 0, "compare-and-set against this `version`")
	return c
}

// networkPatch is the change that the flags ask for, if they ask for one.
func networkPatch(flags AllowFlags, add, remove []string) (patch coppice.NetworkPatch, changes bool, err error) {
	if patch.Allow, err = flags.Read(); err != nil {
		return patch, false, err
	}
	patch.Add, patch.Remove = add, remove
	for flag, list := range map[string][]string{"--add": add, "--remove": remove} {
		for _, rule := range list {
			if err := plainRule(flag, rule); err != nil {
				return patch, false, err
			}
		}
	}
	single := len(add)+len(remove) > 0
	if single && patch.Allow != nil {
		return patch, false, exit.Misuse(errors.New("--add and --remove change single destinations; --allow and --allow-none replace all of them"))
	}
	return patch, single || patch.Allow != nil, nil
}

// Describe says in words what a workspace may reach.
func Describe(n coppice.Network) string {
	text := string(n.EgressPolicy)
	if len(n.Allow) > 0 {
		text += " but " + strings.Join(n.Allow, ", ")
	}
	if n.RulesPending {
		text += " (not in force on its host yet)"
	}
	return text
}
