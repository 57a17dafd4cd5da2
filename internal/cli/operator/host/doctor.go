package host

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/hostcheck"
)

// NewDoctorCommand makes the command "coppice doctor".
func NewDoctorCommand(a *cli.App) *cobra.Command {
	var dataDir string
	var runner bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Check what this host can do, by trying it",
		Long: `Check what this host can do, by trying it. Each failed check says how to fix the host.

The exit status is 0 if coppice dev can run here, with or without KVM, and 1 if not. With --runner, the exit status says whether coppice
runner can run here. It does not check PostgreSQL and the image tools.
The command looks at the programs that COPPICE_QEMU and COPPICE_CLOUD_HYPERVISOR name. It says which VMM a runner would choose, and why.
A check leaves nothing behind. Most checks need root.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg := vmmChecks(a)
			cfg.DataDir, cfg.PGBin, cfg.RunnerOnly = dataDir, a.Getenv("PGBIN"), runner
			report, err := hostcheck.Run(c.Context(), hostcheck.Checks(cfg))
			if err != nil {
				return err
			}
			if err := a.Print(report, func(w io.Writer) error { return printReport(w, report, runner) }); err != nil {
				return err
			}
			if !report.OK {
				return exit.StatusError(exit.Failure)
			}
			return nil
		},
	}
	c.Flags().StringVar(&dataDir, "data-dir", cmp.Or(a.Getenv("COPPICE_DATA_DIR"), DefaultDataDir), "`directory` that will hold sandboxes and checkpoints (COPPICE_DATA_DIR)")
	c.Flags().BoolVar(&runner, "runner", false, "check what coppice runner needs, and not what only coppice dev needs")
	return c
}

// vmmChecks are the results that a start with this environment would have for VMMs. If there is no image to boot, it is not known whether the
// VMMs work: these checks are nil then.
func vmmChecks(a *cli.App) hostcheck.Config {
	host := Config(a)
	host.ImagesDir = imagesDir(a)
	d := daemon.NewDoctor(host)
	cfg := hostcheck.Config{QEMU: host.Binary, FindCloudHypervisor: d.FindCloudHypervisor, Choice: d.Choice}
	if d.HasImage() {
		cfg.KVM, cfg.BootCloudHypervisor = d.KVM, d.BootCloudHypervisor
	}
	return cfg
}

func printReport(w io.Writer, report hostcheck.Report, runner bool) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range report.Checks {
		lines := wrap(r.Detail, 90)
		if r.Cure != "" {
			lines = append(lines, wrap("cure: "+r.Cure, 90)...)
		}
		for i, line := range lines {
			if i == 0 {
				fmt.Fprintf(table, "%s\t%s\t%s\n", r.Status, r.Name, line)
			} else {
				fmt.Fprintf(table, "\t\t%s\n", line)
			}
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	server := "dev"
	if runner {
		server = "runner"
	}
	verdict := "can run on this host."
	if !report.OK {
		verdict = `cannot run on this host yet: see the lines that begin with "fail".`
	}
	_, err := fmt.Fprintf(w, "\ncoppice %s %s\n", server, verdict)
	return err
}

// wrap breaks a text at spaces into lines of at most width bytes. A longer word gets a line of its own.
func wrap(text string, width int) []string {
	var lines []string
	var line strings.Builder
	for word := range strings.FieldsSeq(text) {
		if line.Len() > 0 && line.Len()+1+len(word) > width {
			lines = append(lines, line.String())
			line.Reset()
		}
		if line.Len() > 0 {
			line.WriteByte(' ')
		}
		line.WriteString(word)
	}
	return append(lines, line.String())
}
