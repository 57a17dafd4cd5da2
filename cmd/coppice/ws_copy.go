package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newWSCopyCommand(a *app) *cobra.Command {
	var options coppice.CopyOptions
	c := &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files and directories into or out of a workspace",
		Long: `Copy a file or directory into or out of a workspace. One of SOURCE and DESTINATION is WORKSPACE:PATH with an absolute PATH.

If DESTINATION is a directory, the copy goes into it; otherwise the copy gets that name. "DIRECTORY/." means the content of the directory.
Inside a workspace, root owns the copies; outside, the caller owns them.

The command does not trust the workspace and writes nothing outside of DESTINATION. It follows links in the path that you type. Below
that path it replaces a link that is in the way or has the name of a copied file. It leaves out devices, sockets and pipes. It also leaves out
symbolic links that lead out of the copied tree, unless --outside-links is given.`,
		Example: "  coppice ws cp ./src demo:/workspace\n  coppice ws cp demo:/workspace/out.txt .\n  coppice ws cp demo:/etc/. ./etc",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			from, fromPath, fromRemote := remotePath(args[0])
			to, toPath, toRemote := remotePath(args[1])
			if fromRemote == toRemote {
				return usageError{errors.New("one of SOURCE and DESTINATION must be WORKSPACE:/absolute/path, and the other local (./name if it has a colon)")}
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			ctx := c.Context()
			began := time.Now()
			done := a.working(ctx, "copying")
			var n int64
			var got coppice.Copied
			if toRemote {
				n, err = copyWith(ctx, client, to, func(id string) (int64, error) { return client.CopyTo(ctx, id, args[0], toPath) })
			} else {
				n, err = copyWith(ctx, client, from, func(id string) (int64, error) {
					var err error
					got, err = client.CopyFromWith(ctx, id, fromPath, args[1], options)
					return got.Bytes, err
				})
			}
			done()
			if err != nil {
				return err
			}
			if got.LeftOut > 0 {
				fmt.Fprintf(a.stderr, "%d links and special files were left out: they lead outside or mean nothing here (--outside-links keeps symbolic links)\n", got.LeftOut)
			}
			return a.print(map[string]any{"bytes": n, "left_out": got.LeftOut, "duration_ms": time.Since(began).Milliseconds()}, func(io.Writer) error {
				fmt.Fprintf(a.stderr, "%s in %.1f s\n", size(n), time.Since(began).Seconds())
				return nil
			})
		},
	}
	f := c.Flags()
	f.Int64Var(&options.MaxBytes, "max-bytes", coppice.DefaultCopyBytes, "copy at most this many `bytes` out of a workspace")
	f.IntVar(&options.MaxEntries, "max-entries", coppice.DefaultCopyEntries, "copy at most this `number` of files, directories and links out of a workspace")
	f.BoolVar(&options.OutsideLinks, "outside-links", false, "keep symbolic links that lead out of the copied tree")
	return c
}

func copyWith(ctx context.Context, client *coppice.Client, ref string, f func(id string) (int64, error)) (int64, error) {
	ws, err := workspace(ctx, client, ref)
	if err != nil {
		return 0, err
	}
	return f(ws.ID)
}

// remotePath takes WORKSPACE:/path apart.
func remotePath(arg string) (ref, path string, ok bool) {
	ref, path, found := strings.Cut(arg, ":")
	if !found || ref == "" || strings.ContainsAny(ref, "/.") || !strings.HasPrefix(path, "/") {
		return "", "", false
	}
	return ref, path, true
}

func newWSForwardCommand(a *app) *cobra.Command {
	var detach bool
	var stop []string
	var address string
	c := &cobra.Command{
		Use:   "forward WORKSPACE [[LOCAL:]PORT...]",
		Short: "Forward local TCP ports to ports of a workspace",
		Long: `Forward TCP ports of the runner's host to ports of a workspace, until Ctrl-C. With coppice dev, the runner's host is this machine.

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
			client, err := a.client()
			if err != nil {
				return err
			}
			ctx := c.Context()
			ws, err := workspace(ctx, client, args[0])
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
				return a.print(ports, func(w io.Writer) error { return printPorts(w, ports) })
			}
			return a.forward(ctx, client, ws, requests, detach)
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
			return nil, usageError{fmt.Errorf("%q is not of the form [LOCAL:]PORT with port numbers", w)}
		}
		if !two && g < 1024 { // a host forwards none of these
			l = 0
		}
		out = append(out, coppice.CreatePortRequest{GuestPort: int(g), Listen: joinHost(address, l)})
	}
	return out, nil
}

// joinHost leaves the address to the runner where there is none.
func joinHost(address string, port uint64) string {
	if address == "" {
		return ":" + strconv.FormatUint(port, 10)
	}
	return net.JoinHostPort(address, strconv.FormatUint(port, 10))
}

func printPorts(w io.Writer, ports []coppice.Port) error {
	if len(ports) == 0 {
		_, err := fmt.Fprintln(w, "No ports are forwarded.")
		return err
	}
	rows := make([][]string, 0, len(ports))
	for _, p := range ports {
		rows = append(rows, []string{p.Listen, strconv.Itoa(p.GuestPort), p.ID})
	}
	return table(w, "LISTEN PORT ID", rows)
}

func stopForwards(ctx context.Context, client *coppice.Client, ws coppice.Workspace, refs []string) error {
	ports, err := client.Ports(ctx, ws.ID)
	if err != nil {
		return err
	}
	return each(refs, func(ref string) error {
		for _, p := range ports {
			if p.ID == ref || p.Listen == ref {
				return client.DeletePort(ctx, ws.ID, p.ID)
			}
		}
		return fmt.Errorf("workspace %s forwards no port %q; coppice ws forward %s lists them", ws.Name, ref, ws.Name)
	})
}

// forward opens the ports and, unless detached, closes them again at the end.
func (a *app) forward(ctx context.Context, client *coppice.Client, ws coppice.Workspace, requests []coppice.CreatePortRequest, detach bool) (err error) {
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
	if err := a.print(ports, func(w io.Writer) error {
		for _, p := range ports {
			fmt.Fprintf(w, "%s -> %s:%d\n", p.Listen, ws.Name, p.GuestPort)
		}
		return nil
	}); err != nil {
		return errors.Join(err, closeAll())
	}
	if detach {
		return nil
	}
	<-ctx.Done()
	return closeAll()
}
