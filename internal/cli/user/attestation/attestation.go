// Package attestation has the commands that print signed reports of reseals and check them without a server.
package attestation

import (
	"bufio"
	"bytes"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewWorkspaceCommand makes the command "coppice ws attest".
func NewWorkspaceCommand(a *cli.App) *cobra.Command {
	var epoch int64
	var all bool
	c := &cobra.Command{
		Use:   "attest WORKSPACE",
		Short: "Print the signed report of a workspace's reseal",
		Long: `Print the signed report of the workspace's latest create, fork, restore or resume, as one line of JSON. The runner and the cluster have
signed it. Do not change it: every byte counts. "coppice attest verify" checks it without a server. docs/ATTESTATION.md says what it
proves.`,
		Example: "  coppice ws attest demo > demo.attestation\n  coppice ws attest demo --all",
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
			if !all {
				return printAttestation(c, a, client, ws.ID, epoch)
			}
			found := false
			for e := int64(1); e <= ws.Epoch; e++ {
				err := printAttestation(c, a, client, ws.ID, e)
				if errors.Is(err, coppice.CodeAttestationNotFound) { // a restore that failed, or too old
					continue
				}
				if err != nil {
					return err
				}
				found = true
			}
			if !found {
				return core.Errorf(core.NotFound, core.CodeAttestationNotFound, "workspace %s has no attestation", ws.ID)
			}
			return nil
		},
	}
	c.Flags().Int64Var(&epoch, "epoch", 0, "print the attestation of this `epoch` instead of the present one")
	c.Flags().BoolVar(&all, "all", false, "print the attestations of all epochs, one per line")
	c.MarkFlagsMutuallyExclusive("epoch", "all")
	return c
}

func printAttestation(c *cobra.Command, a *cli.App, client *coppice.Client, id coppice.WorkspaceID, epoch int64) error {
	b, err := client.Attestation(c.Context(), id, epoch)
	if err != nil {
		return err
	}
	// An attestation is verified byte by byte, so it is printed as it comes or not at all.
	if foreign.Escape(string(b), "") != string(b) {
		return fmt.Errorf("the server's answer about workspace %s is not an attestation: it has unprintable characters", id)
	}
	_, err = fmt.Fprintf(a.Stdout, "%s\n", b)
	return err
}

// NewAuthorityCommand makes the command "coppice authority".
func NewAuthorityCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "authority",
		Short: "Print the certificate of the cluster's authority",
		Long: `Print the certificate of the cluster's authority, in PEM. It is public. "coppice attest verify" needs it. Get it once, over a channel that
you trust, and keep it.`,
		Example: "  coppice authority > authority.pem",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			got, err := client.Authority(c.Context())
			if err != nil {
				return err
			}
			return a.Print(got, func(w io.Writer) error {
				_, err := io.WriteString(w, got.Certificate)
				return err
			})
		},
	}
}

// NewCommand makes the command "coppice attest".
func NewCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{Use: "attest", Short: "Check signed reports of reseals"}
	c.AddCommand(newVerifyCommand(a))
	return c
}

// attestCheck is what an attestation must be, besides being genuine.
type attestCheck struct {
	authority string
	workspace string
	epoch     int64
	at        string
	maxAge    time.Duration
}

func newVerifyCommand(a *cli.App) *cobra.Command {
	var check attestCheck
	c := &cobra.Command{
		Use:   "verify FILE...",
		Short: "Check attestations without a server",
		Long: `Check attestations, one per line in each file, with only the certificate of the cluster's authority. The check needs no server, and uses the
clock of this machine only with --max-age. The output names each bad attestation with the reason. The exit status is 1 if any is bad.

A genuine attestation can be about another workspace or epoch. Name yours with --workspace and --epoch.`,
		Example: "  coppice attest verify demo.attestation --authority authority.pem --workspace ws_06e5bqv7z0f3m8k2h1t9r4w6xc",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return check.run(a, args)
		},
	}
	f := c.Flags()
	f.StringVar(&check.authority, "authority", "", "`file` with the certificate of the cluster's authority in PEM, as \"coppice authority\" prints it")
	f.StringVar(&check.workspace, "workspace", "", "require the workspace with this `id`")
	f.Int64Var(&check.epoch, "epoch", 0, "require this `epoch`")
	f.StringVar(&check.at, "at", "", "refuse attestations that are newer than this `time`, such as 2026-11-24T12:00:00Z; --max-age counts back from it")
	f.DurationVar(&check.maxAge, "max-age", 0, "refuse attestations that are older than this `duration`, by this machine's clock or --at")
	cobra.CheckErr(c.MarkFlagRequired("authority"))
	return c
}

// attested is the result for one attestation.
type attested struct {
	File      string            `json:"file"`
	Line      int               `json:"line"`
	Good      bool              `json:"good"`
	Reason    string            `json:"reason,omitempty"`
	Digest    core.Digest       `json:"digest,omitempty"`
	Statement *attest.Statement `json:"statement,omitempty"`
}

func (c attestCheck) run(a *cli.App, files []string) error {
	trust, err := openAuthority(c.authority)
	if err != nil {
		return err
	}
	now := time.Now()
	if c.at != "" {
		if now, err = time.Parse(time.RFC3339, c.at); err != nil {
			return exit.Misuse(fmt.Errorf("--at: %q is not a time such as 2026-11-24T12:00:00Z", core.Clip(c.at)))
		}
	}
	list := []attested{}
	for _, name := range files {
		list = append(list, c.file(trust, now, name)...)
	}
	bad := 0
	for _, r := range list {
		if !r.Good {
			bad++
		}
	}
	if err := a.Print(list, func(w io.Writer) error { return printAttested(w, list, bad) }); err != nil || bad == 0 {
		return err
	}
	return core.Errorf(core.Unavailable, core.CodeAttestationRefused, "%d of %d attestations are bad", bad, len(list))
}

// maxAttestations bounds the lines read of one file.
const maxAttestations = 100_000

// file checks the lines of a file. A file that cannot be read, or has none, is one bad attestation.
func (c attestCheck) file(trust *attest.Authority, now time.Time, name string) []attested {
	f, err := os.Open(name)
	if err != nil {
		return []attested{{File: name, Line: 1, Reason: err.Error()}}
	}
	defer f.Close()
	var list []attested
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, attest.MaxEnvelope+1)
	lines.Split(splitLines)
	for n := 1; n <= maxAttestations && lines.Scan(); n++ {
		r := attested{File: name, Line: n}
		v, err := trust.Verify(lines.Bytes())
		if err == nil {
			r.Digest, r.Statement = v.Digest, &v.Statement
			err = c.judge(v.Statement.Predicate, now)
		}
		if r.Good = err == nil; err != nil {
			r.Reason = core.MessageOf(err)
		}
		list = append(list, r)
	}
	var reason string
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		reason = fmt.Sprintf("it has more than %d bytes; the rest of the file was not read", attest.MaxEnvelope)
	case err != nil:
		reason = err.Error()
	case len(list) == 0:
		reason = "it is empty"
	case len(list) == maxAttestations && lines.Scan():
		reason = fmt.Sprintf("the file has more than %d lines; split it", maxAttestations)
	default:
		return list
	}
	return append(list, attested{File: name, Line: len(list) + 1, Reason: reason})
}

// splitLines is bufio.ScanLines without its kindness for a carriage return.
func splitLines(data []byte, end bool) (int, []byte, error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i], nil
	}
	if end && len(data) > 0 {
		return len(data), data, nil
	}
	return 0, nil, nil
}

func (c attestCheck) judge(p attest.Predicate, now time.Time) error {
	bad := func(format string, a ...any) error {
		return core.Errorf(core.Unavailable, core.CodeAttestationRefused, format, a...)
	}
	switch {
	case c.workspace != "" && string(p.WorkspaceID) != c.workspace:
		return bad("it is of workspace %s", p.WorkspaceID)
	case c.epoch != 0 && p.Epoch != c.epoch:
		return bad("it is of epoch %d", p.Epoch)
	case c.at != "" && p.FinishedAt.After(now):
		return bad("it was made at %s, after the requested time", p.FinishedAt.Format(time.RFC3339))
	case c.maxAge > 0 && now.Sub(p.FinishedAt) > c.maxAge:
		return bad("it was made at %s, and is older than %s", p.FinishedAt.Format(time.RFC3339), c.maxAge)
	}
	return nil
}

func openAuthority(name string) (*attest.Authority, error) {
	const largest = 64 << 10
	f, err := os.Open(name)
	if err != nil {
		return nil, exit.Misuse(err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, largest))
	if err != nil {
		return nil, err
	}
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "%s does not hold one certificate in PEM; \"coppice authority\" prints that of the cluster", name)
	}
	trust, err := attest.NewAuthority(block.Bytes)
	if err != nil {
		return nil, core.Wrapf(err, core.Invalid, core.CodeInvalidField, "%s is not the certificate of an authority", name)
	}
	return trust, nil
}

func printAttested(w io.Writer, list []attested, bad int) error {
	lines := map[string]int{}
	for _, r := range list {
		lines[r.File]++
	}
	for _, r := range list {
		name := r.File
		if lines[name] > 1 {
			name = fmt.Sprintf("%s:%d", name, r.Line)
		}
		if !r.Good {
			if _, err := fmt.Fprintf(w, "%s: BAD: %s\n", foreign.Visible(name), foreign.Visible(r.Reason)); err != nil {
				return err
			}
		}
	}
	if len(list) == 1 && bad == 0 {
		p := list[0].Statement.Predicate
		return render.Facts(w, "Attestation", "good", "Workspace", string(p.WorkspaceID), "Epoch", fmt.Sprint(p.Epoch), "Checkpoint", string(p.Checkpoint.ID), "Image", string(p.Image),
			"Generation", p.Generation, "Runner", string(p.Runner.ID)+" ("+p.Runner.Version+")", "VMM", p.VMM.Name+" "+p.VMM.Version, "Steps", fmt.Sprint(len(p.Steps)),
			"Finished", p.FinishedAt.Format(time.RFC3339), "Digest", string(list[0].Digest))
	}
	_, err := fmt.Fprintf(w, "%d attestations: %d good, %d bad\n", len(list), len(list)-bad, bad)
	return err
}
