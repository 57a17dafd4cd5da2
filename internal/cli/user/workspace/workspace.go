// Package workspace has the commands that start, show, change and end workspaces.
package workspace

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/cli/user/egress"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewCommand makes the command "coppice ws" with the commands for whole workspaces.
func NewCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:     "ws",
		Aliases: []string{"workspace"},
		Short:   "Work with workspaces: running machines",
		Long: `Work with workspaces. A workspace is a running machine.

WORKSPACE is a name, an id, or the end of an id.`,
	}
	c.AddCommand(
		newCreateCommand(a), newListCommand(a), newShowCommand(a), newRemoveCommand(a),
		newCopyCommand(a), newForwardCommand(a), newPreviewCommand(a), newPreviewsCommand(a), newSuspendCommand(a), newResumeCommand(a),
		newRenameCommand(a), newLabelCommand(a),
		newMakeDirCommand(a), newMoveCommand(a), newStatCommand(a), newWatchCommand(a),
	)
	return c
}

// startFlags are shared by the commands that start workspaces.
type startFlags struct {
	env, labels []string
	egress      string
	rules       egress.AllowFlags
	ttl, idle   time.Duration
	onIdle      string
	onTTL       string
	autoResume  bool
	quiet       bool
}

func (s *startFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringArrayVarP(&s.env, "env", "e", nil, "environment of sessions, `KEY=VALUE`; may be repeated")
	f.StringArrayVarP(&s.labels, "label", "l", nil, "label, `KEY=VALUE`; may be repeated")
	f.StringVar(&s.egress, "egress", "", "egress `policy`: deny-all (default) or allow-all, which is for development only")
	s.rules.Add(c)
	f.DurationVar(&s.ttl, "ttl", 0, "terminate after this `duration`, such as 30m; 0: never")
	f.StringVar(&s.onTTL, "on-ttl", "", "what to `do` after --ttl: terminate (default) or suspend")
	f.DurationVar(&s.idle, "idle", 0, "suspend after nobody has used it for this `duration`; 0: never")
	f.StringVar(&s.onIdle, "on-idle", "", "what to `do` after --idle: suspend (default) or terminate")
	f.BoolVar(&s.autoResume, "auto-resume", false, "resume it as soon as it is used while suspended")
	f.BoolVarP(&s.quiet, "quiet", "q", false, "print ids only")
}

// started has the values of startFlags in the form of the API.
type started struct {
	env     coppice.Env
	labels  coppice.Labels
	network coppice.NetworkRequest
	ttl     int64

	idle       int64
	onIdle     coppice.OnIdle
	onTTL      coppice.OnTTL
	autoResume bool
}

func (s *startFlags) read() (out started, err error) {
	if out.env, err = argument.KeyValues("--env", s.env); err != nil {
		return out, err
	}
	if out.labels, err = argument.KeyValues("--label", s.labels); err != nil {
		return out, err
	}
	for flag, d := range map[string]time.Duration{"--ttl": s.ttl, "--idle": s.idle} {
		if d < 0 {
			return out, exit.Misuse(fmt.Errorf("%s %s is negative; give the time from now on, such as 30m", flag, d))
		}
		if d%time.Second != 0 {
			return out, exit.Misuse(fmt.Errorf("%s %s is not a whole number of seconds", flag, d))
		}
	}
	if s.onIdle != "" && s.idle == 0 {
		return out, exit.Misuse(errors.New("--on-idle needs --idle"))
	}
	if s.onTTL != "" && s.ttl == 0 {
		return out, exit.Misuse(errors.New("--on-ttl needs --ttl"))
	}
	out.onTTL = coppice.OnTTL(s.onTTL)
	out.idle, out.onIdle, out.autoResume = int64(s.idle/time.Second), coppice.OnIdle(s.onIdle), s.autoResume
	out.network.EgressPolicy = coppice.EgressPolicy(s.egress)
	if out.network.Allow, err = s.rules.Read(); err != nil {
		return out, err
	}
	out.ttl = int64(s.ttl / time.Second)
	return out, nil
}

func newCreateCommand(a *cli.App) *cobra.Command {
	var flags startFlags
	var name, image string
	var vcpus, memory, disk int
	c := &cobra.Command{
		Use:   "create",
		Short: "Create a workspace from an image",
		Long: `Create a workspace from an image.

The first workspace of an image and shape boots the image once, which takes a while. Later ones are forks of that template.`,
		Example: "  coppice ws create --name demo\n  coppice ws create --image demo --vcpus 2 --memory 1024 --env DEBUG=1\n  coppice ws create --allow bundle:python --allow api.example.com",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := flags.read()
			if err != nil {
				return err
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			req := coppice.CreateWorkspaceRequest{
				Name: name, Image: image, Env: s.env, Labels: s.labels, Network: s.network, TTLSeconds: s.ttl,
				IdleSeconds: s.idle, OnIdle: s.onIdle, AutoResume: s.autoResume, OnTTL: s.onTTL,
			}
			for flag, field := range map[string]**int{"vcpus": &req.Resources.VCPUs, "memory": &req.Resources.MemoryMiB, "disk": &req.Resources.DiskGiB} {
				if c.Flags().Changed(flag) {
					*field = map[string]*int{"vcpus": &vcpus, "memory": &memory, "disk": &disk}[flag]
				}
			}
			began := time.Now()
			done := a.Working(c.Context(), "creating a workspace")
			ws, err := client.CreateWorkspace(c.Context(), req)
			done()
			if err != nil {
				return err
			}
			return cli.PrintNew(a, ws, ws.ID, flags.quiet, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s is ready after %.1f s: %s, %s\n", ws.Name, time.Since(began).Seconds(), ws.ID, ws.Network.IP)
				return err
			})
		},
	}
	f := c.Flags()
	f.StringVar(&name, "name", "", "`name`, unique among live workspaces (default: a generated one)")
	f.StringVar(&image, "image", "", "`image` by name or digest (default: base)")
	f.IntVar(&vcpus, "vcpus", 0, "virtual CPUs (default: the server's)")
	f.IntVar(&memory, "memory", 0, "memory in `MiB` (default: the server's)")
	f.IntVar(&disk, "disk", 0, "writable disk in `GiB` (default: the server's)")
	flags.add(c)
	return c
}

func newListCommand(a *cli.App) *cobra.Command {
	var everything, quiet bool
	var labels []string
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List workspaces, newest first",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			filter := coppice.WorkspaceFilter{Labels: labels}
			if everything {
				filter.States = []coppice.WorkspaceState{
					coppice.WorkspaceCreating, coppice.WorkspaceRestoring, coppice.WorkspaceQuarantined, coppice.WorkspaceReady,
					coppice.WorkspaceCheckpointing, coppice.WorkspaceSuspended, coppice.WorkspaceTerminating,
					coppice.WorkspaceTerminated, coppice.WorkspaceFailed, coppice.WorkspaceLost,
				}
			}
			list, err := coppice.Collect(client.Workspaces(c.Context(), filter))
			if err != nil {
				return err
			}
			return a.Print(list, func(w io.Writer) error {
				if quiet {
					for _, ws := range list {
						fmt.Fprintln(w, ws.ID)
					}
					return nil
				}
				return printWorkspaces(w, time.Now(), list)
			})
		},
	}
	f := c.Flags()
	f.BoolVarP(&everything, "all", "a", false, "also terminated workspaces")
	f.StringArrayVarP(&labels, "label", "l", nil, "only with this label, `KEY[=VALUE]`; may be repeated")
	f.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	return c
}

func printWorkspaces(w io.Writer, now time.Time, list []coppice.Workspace) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No workspaces. Create one: coppice ws create")
		return err
	}
	rows := make([][]string, 0, len(list))
	for _, ws := range list {
		rows = append(rows, []string{
			ws.Name, render.Short(ws.ID), state(ws), ws.Image.Name, render.Short(ws.CheckpointID), ws.Network.IP, render.Age(now, ws.CreatedAt), render.Left(now, ws.ExpiresAt),
		})
	}
	return render.Table(w, "NAME ID STATE IMAGE HEAD IP AGE EXPIRES", rows)
}

func state(ws coppice.Workspace) string {
	if ws.Condition != "" {
		return string(ws.State) + " (" + string(ws.Condition) + ")"
	}
	return string(ws.State)
}

func newShowCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "show WORKSPACE",
		Aliases: []string{"get"},
		Short:   "Show a workspace",
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
			var ports []coppice.Port
			if ws.State == coppice.WorkspaceReady {
				if ports, err = client.Ports(c.Context(), ws.ID); err != nil {
					return err
				}
			}
			return a.Print(ws, func(w io.Writer) error { return printWorkspace(w, ws, ports) })
		},
	}
}

// shownLines is how many lines of the output of a machine that has ended "ws show" prints.
const shownLines = 12

func printWorkspace(w io.Writer, ws coppice.Workspace, ports []coppice.Port) error {
	failure, said := "", ""
	if ws.Failure != nil {
		failure, said, _ = strings.Cut(ws.Failure.Message, "\n")
		failure += " (" + ws.Failure.Code + ")"
		if from := ws.Failure.RecoverFrom; from != "" {
			failure += "; restore its newest remaining checkpoint: coppice restore " + from
		}
	}
	if lines := strings.Split(said, "\n"); len(lines) > shownLines {
		from := slices.IndexFunc(lines, func(line string) bool { return strings.Contains(line, "Kernel panic - ") })
		if from < 0 {
			from = len(lines) - shownLines
		}
		lines = lines[from:min(from+shownLines, len(lines))]
		said = strings.Join(lines, "\n") + "\nMore: coppice ws logs --console " + ws.Name
	}
	stall := ""
	if ws.Stall != nil {
		stall = ws.Stall.Message + " (" + ws.Stall.Code + ")"
	}
	forwarded := make([]string, 0, len(ports))
	for _, p := range ports {
		from := p.Listen
		if p.Visibility != "" {
			from = string(p.Visibility) + " preview"
		}
		forwarded = append(forwarded, fmt.Sprintf("%s -> %d", from, p.GuestPort))
	}
	return errors.Join(render.Facts(w,
		"name", ws.Name, "id", ws.ID, "state", state(ws), "failure", failure, "stands still", stall,
		"image", strings.TrimSpace(ws.Image.Name+" "+ws.Image.Digest),
		"resources", fmt.Sprintf("%d vCPU, %d MiB memory, %d GiB disk", ws.Resources.VCPUs, ws.Resources.MemoryMiB, ws.Resources.DiskGiB),
		"address", ws.Network.IP, "hostname", ws.Network.Hostname, "MAC", ws.Network.MAC, "machine-id", ws.Network.MachineID,
		"egress", egress.Describe(ws.Network), "ports", strings.Join(forwarded, ", "),
		"env", render.Pairs(ws.Env), "labels", render.Pairs(ws.Labels), "when idle", whenIdle(ws),
		"forked from", ws.ParentCheckpointID, "head", ws.CheckpointID, "runner", ws.RunnerID,
		"epoch", fmt.Sprint(ws.Epoch), "created", render.Moment(ws.CreatedAt), "ready", render.Moment(ws.ReadyAt), "expires", expiry(ws), "ended", render.Moment(ws.EndedAt),
		"timings", render.Timings(ws.Timings),
	), render.Lines(w, "what its machine said last", said))
}

func newRemoveCommand(a *cli.App) *cobra.Command {
	var all bool
	var labels []string
	c := &cobra.Command{
		Use:     "rm WORKSPACE...",
		Aliases: []string{"terminate"},
		Short:   "Terminate workspaces; their checkpoints stay",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 && !all && len(labels) == 0 {
				return exit.Misuse(fmt.Errorf("name a workspace, or give --label or --all"))
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ctx := c.Context()
			var list []coppice.Workspace
			if all || len(labels) > 0 {
				if list, err = coppice.Collect(client.Workspaces(ctx, coppice.WorkspaceFilter{Labels: labels})); err != nil {
					return err
				}
			}
			named, err := find.Workspaces(ctx, client, args)
			if err != nil {
				return err
			}
			for _, ws := range named {
				if !slices.ContainsFunc(list, func(other coppice.Workspace) bool { return other.ID == ws.ID }) {
					list = append(list, ws)
				}
			}
			var failed error
			done := a.Working(ctx, fmt.Sprintf("terminating %d", len(list)))
			gone := []coppice.Workspace{}
			for _, ws := range list {
				name := ws.Name
				ws, err := client.TerminateWorkspace(ctx, ws.ID)
				if err == nil {
					gone = append(gone, ws)
				} else {
					failed = errors.Join(failed, fmt.Errorf("%s is not terminated: %w", name, err))
				}
			}
			done()
			err = a.Print(gone, func(w io.Writer) error {
				for _, ws := range gone {
					fmt.Fprintf(w, "%s (%s) is %s\n", ws.Name, render.Short(ws.ID), ws.State)
				}
				return nil
			})
			return errors.Join(failed, err)
		},
	}
	c.Flags().BoolVar(&all, "all", false, "all workspaces")
	c.Flags().StringArrayVarP(&labels, "label", "l", nil, "all workspaces with this label, `KEY[=VALUE]`")
	return c
}
