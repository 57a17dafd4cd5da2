package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newPreviewCommand(a *cli.App) *cobra.Command {
	var public, signed, stop bool
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "preview WORKSPACE PORT",
		Short: "Give a port of a workspace a URL",
		Long: `Give a port of a workspace a URL of its own, for HTTP and WebSockets, and print it. A server in the workspace may listen on its address or on
its loopback.

Without a flag, requests need an API key of the project with the scope workspace:exec in the header Coppice-Key. --signed puts a token into
the URL instead: whoever has the URL gets in, for an hour or --ttl. A fork of the workspace gets a token of its own. A restore or a resume
ends the old token; 'coppice ws previews' prints the present one. --public lets everybody in. A second preview of a port replaces the first.`,
		Example: "  coppice ws preview demo 3000 --signed\n  coppice ws preview demo 3000 --public --ttl 24h\n  coppice ws preview demo 3000 --stop",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			port, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil || port == 0 {
				return exit.Misuse(fmt.Errorf("%q is not a port number", args[1]))
			}
			if public && signed {
				return exit.Misuse(errors.New("--public and --signed exclude each other"))
			}
			if ttl < 0 || ttl%time.Second != 0 {
				return exit.Misuse(errors.New("--ttl must be whole seconds"))
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ws, err := find.Workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			if stop {
				return stopPreview(c.Context(), client, ws, int(port))
			}
			req := coppice.CreatePortRequest{GuestPort: int(port), Visibility: coppice.VisibilityPrivate, TTLSeconds: int64(ttl / time.Second)}
			switch {
			case public:
				req.Visibility = coppice.VisibilityPublic
			case signed:
				req.Visibility = coppice.VisibilitySigned
			}
			p, err := client.CreatePort(c.Context(), ws.ID, req)
			if err != nil {
				return err
			}
			return a.Print(p, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, p.URL)
				return err
			})
		},
	}
	f := c.Flags()
	f.BoolVar(&signed, "signed", false, "let in whoever has the URL, which gets a token")
	f.BoolVar(&public, "public", false, "let everybody in")
	f.BoolVar(&stop, "stop", false, "end the preview of the port")
	f.DurationVar(&ttl, "ttl", 0, "end the preview after this `time` (default: an hour with --signed, otherwise with the workspace)")
	return c
}

func newPreviewsCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "previews WORKSPACE",
		Short:   "List the previews of a workspace, with their present URLs",
		Example: "  coppice ws previews demo",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			ws, err := find.Workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			list, err := previewsOf(c.Context(), client, ws)
			if err != nil {
				return err
			}
			return a.Print(list, func(w io.Writer) error { return printPreviews(w, list) })
		},
	}
}

func previewsOf(ctx context.Context, client *coppice.Client, ws coppice.Workspace) ([]coppice.Port, error) {
	ports, err := client.Ports(ctx, ws.ID)
	list := []coppice.Port{}
	for _, p := range ports {
		if p.Visibility != "" {
			list = append(list, p)
		}
	}
	return list, err
}

func stopPreview(ctx context.Context, client *coppice.Client, ws coppice.Workspace, port int) error {
	list, err := previewsOf(ctx, client, ws)
	if err != nil {
		return err
	}
	for _, p := range list {
		if p.GuestPort == port {
			return client.DeletePort(ctx, ws.ID, p.ID)
		}
	}
	return fmt.Errorf("workspace %s has no preview of port %d; coppice ws previews %s lists them", ws.Name, port, ws.Name)
}

func printPreviews(w io.Writer, list []coppice.Port) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "There are no previews.")
		return err
	}
	rows := make([][]string, 0, len(list))
	for _, p := range list {
		ends := "-"
		if !p.ExpiresAt.IsZero() {
			ends = p.ExpiresAt.UTC().Format(time.RFC3339)
		}
		rows = append(rows, []string{strconv.Itoa(p.GuestPort), string(p.Visibility), ends, p.URL})
	}
	return render.Table(w, "PORT VISIBILITY ENDS URL", rows)
}
