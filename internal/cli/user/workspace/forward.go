package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newForwardCommand(a *cli.App) *cobra.Command {
	var detach bool
	var stop []string
	var address string
	c := &cobra.Command{
		Use:   "forward WORKSPACE [[LOCAL:]PORT...]",
		Short: "Forward local TCP ports to ports of a workspace",
		Long: `Forward TCP ports of the runner's host to ports of a workspace, until Ctrl-C. With coppice dev, the runner's host is this machine. A server in
the workspace may listen on its address or on its loopback. If nobody listens on a port yet, the command says so and forwards it anyway.

Without LOCAL the command uses the same number, or a free port for a number below 1024. LOCAL 0 picks a free port. LOCAL must be in the
range that the operator of the host allows ('coppice runner --forward-ports'), by default from 1024 up to the ports of outgoing
connections (usually 32767). Without a PORT, the command lists the forwarded ports.`,
		Example: "  coppice ws forward demo 8080:80\n  coppice ws forward demo 0:5432 --detach\n  coppice ws forward demo --stop 127.0.0.1:8080",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			requests, err := forwards(address, args[1:])
			if err != nil {
				return err
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ctx := c.Context()
			ws, err := find.Workspace(ctx, client, args[0])
			switch {
			case err != nil:
				return err
			case len(stop) > 0:
				return stopForwards(ctx, client, ws, stop)
			case len(requests) == 0:
				ports, err := client.Ports(ctx, ws.ID)
				if err != nil {
					return err
				}
				return a.Print(ports, func(w io.Writer) error { return printPorts(w, ports) })
			}
			return forwardPorts(ctx, a, client, ws, requests, detach)
		},
	}
	f := c.Flags()
	f.BoolVarP(&detach, "detach", "d", false, "return at once; the ports stay until they are stopped or the workspace ends")
	f.StringSliceVar(&stop, "stop", nil, "stop the forwarded port with this `address` or id")
	f.StringVar(&address, "address", "", "`IP` address to listen on, among those that the operator of the runner's host allows (default: the first of them, usually 127.0.0.1)")
	return c
}

// forwards reads [LOCAL:]PORT words.
func forwards(address string, words []string) ([]coppice.CreatePortRequest, error) {
	var out []coppice.CreatePortRequest
	for _, w := range words {
		local, guest, two := strings.Cut(w, ":")
		if !two {
			guest = local
		}
		l, err1 := strconv.ParseUint(local, 10, 16)
		g, err2 := strconv.ParseUint(guest, 10, 16)
		if err1 != nil || err2 != nil || g == 0 {
			return nil, exit.Misuse(fmt.Errorf("%q is not of the form [LOCAL:]PORT with port numbers", w))
		}
		if !two && g < 1024 { // a host forwards none of these
			l = 0
		}
		out = append(out, coppice.CreatePortRequest{GuestPort: int(g), Listen: joinHost(address, l)})
	}
	return out, nil
}

// joinHost joins host and port. Without a host, the runner chooses the address.
func joinHost(address string, port uint64) string {
	if address == "" {
		return ":" + strconv.FormatUint(port, 10)
	}
	return net.JoinHostPort(address, strconv.FormatUint(port, 10))
}

func printPorts(w io.Writer, ports []coppice.Port) error {
	ports = slices.DeleteFunc(slices.Clone(ports), func(p coppice.Port) bool { return p.Visibility != "" }) // 'coppice ws previews' lists these
	if len(ports) == 0 {
		_, err := fmt.Fprintln(w, "No ports are forwarded.")
		return err
	}
	rows := make([][]string, 0, len(ports))
	for _, p := range ports {
		rows = append(rows, []string{p.Listen, strconv.Itoa(p.GuestPort), p.ID})
	}
	return render.Table(w, "LISTEN PORT ID", rows)
}

func stopForwards(ctx context.Context, client *coppice.Client, ws coppice.Workspace, refs []string) error {
	ports, err := client.Ports(ctx, ws.ID)
	if err != nil {
		return err
	}
	found, err := argument.All(refs, func(ref string) (coppice.Port, error) {
		for _, p := range ports {
			if p.ID == ref || p.Listen == ref {
				return p, nil
			}
		}
		return coppice.Port{}, fmt.Errorf("workspace %s forwards no port %q; coppice ws forward %s lists them", ws.Name, ref, ws.Name)
	}, func(p coppice.Port) string { return p.ID })
	if err != nil {
		return err
	}
	return argument.EachOf(found, func(p coppice.Port) error { return client.DeletePort(ctx, ws.ID, p.ID) })
}

// forwardPorts opens the ports and, unless detached, closes them again at the end.
func forwardPorts(ctx context.Context, a *cli.App, client *coppice.Client, ws coppice.Workspace, requests []coppice.CreatePortRequest, detach bool) (err error) {
	ports := []coppice.Port{}
	closeAll := func() error {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		var errs []error
		for _, p := range ports {
			errs = append(errs, client.DeletePort(clean, ws.ID, p.ID))
		}
		return errors.Join(errs...)
	}
	for _, r := range requests {
		p, err := client.CreatePort(ctx, ws.ID, r)
		if err != nil {
			return errors.Join(err, closeAll())
		}
		ports = append(ports, p)
	}
	if err := a.Print(ports, func(w io.Writer) error {
		for _, p := range ports {
			fmt.Fprintf(w, "%s -> %s:%d\n", p.Listen, ws.Name, p.GuestPort)
		}
		return nil
	}); err != nil {
		return errors.Join(err, closeAll())
	}
	for _, p := range ports {
		if p.Problem != nil {
			fmt.Fprintf(a.Stderr, "coppice: %s (%s); connections to %s are closed until one does\n", foreign.Visible(p.Problem.Message), p.Problem.Code, p.Listen)
		}
	}
	if detach {
		return nil
	}
	<-ctx.Done()
	return closeAll()
}
