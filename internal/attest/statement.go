// Package attest makes and verifies signed reseal reports. A report says how a runner gave a fork a
// new identity, as an in-toto statement in a DSSE envelope. The runner signs it. The cluster
// compares it with its own rows and signs it again. Both signatures carry their certificate, so a
// verifier needs only the certificate of the cluster's authority.
package attest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// The types that are named in an envelope.
const (
	StatementType = "https://in-toto.io/Statement/v1"
	PredicateType = "https://coppice.dev/attestations/reseal/v1"
	PayloadType   = "application/vnd.in-toto+json"
)

// The bounds of a statement. A guest chooses nothing in it: steps have the names of the protocol.
const (
	MaxEnvelope = 64 << 10 // bytes
	MaxSteps    = 64
	maxText     = 256 // bytes of a version, a step's name and the like
)

// Statement is an in-toto statement, version 1, about one reseal.
type Statement struct {
	Type          string    `json:"_type"`
	Subject       []Subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     Predicate `json:"predicate"`
}

// Subject names the subject of the statement.
type Subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

// Predicate is the report of the reseal.
type Predicate struct {
	ClusterID   string           `json:"cluster_id"`
	WorkspaceID core.WorkspaceID `json:"workspace_id"`
	Epoch       int64            `json:"epoch"`
	SandboxID   core.SandboxID   `json:"sandbox_id"`
	Generation  string           `json:"generation"`
	Checkpoint  Checkpoint       `json:"checkpoint"`
	Image       core.Digest      `json:"image"`
	Hostname    string           `json:"hostname"`
	MachineID   string           `json:"machine_id"`
	MAC         string           `json:"mac"`
	IP          netip.Addr       `json:"ip"`
	Egress      string           `json:"egress_policy"`
	Steps       []Step           `json:"steps"`
	Runner      Runner           `json:"runner"`
	VMM         VMM              `json:"vmm"`
	StartedAt   time.Time        `json:"started_at"`  // of the fork, by the runner's clock
	FinishedAt  time.Time        `json:"finished_at"` // every step was proven; the workload is released after that
}

// Checkpoint is the origin of the sandbox.
type Checkpoint struct {
	ID core.CheckpointID `json:"id"`
	// Manifest is the digest that the runner verified the bytes against. It is empty where the runner captured the checkpoint itself.
	Manifest core.Digest `json:"manifest,omitempty"`
}

// Step is one step of the reseal, with the digest of its evidence.
type Step struct {
	Name     string            `json:"name"`
	Status   core.ResealStatus `json:"status"`
	Evidence core.Digest       `json:"evidence"`
}

// Runner is who signs.
type Runner struct {
	ID      core.RunnerID `json:"id"`
	Version string        `json:"version"` // of its program
}

// VMM names the sandbox's VMM.
type VMM struct {
	Name        string `json:"name"`
	Version     string `json:"version"`
	MachineType string `json:"machine_type"`
	Accelerator string `json:"accelerator"`
	Arch        string `json:"arch"`
}

// New makes a statement of a predicate.
func New(p Predicate) Statement {
	p.StartedAt, p.FinishedAt = instant(p.StartedAt), instant(p.FinishedAt)
	return Statement{Type: StatementType, PredicateType: PredicateType, Subject: subjects(p), Predicate: p}
}

func instant(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }

// subjects names the workspace's epoch, and the checkpoint where its bytes have a digest. Everybody can compute the first digest.
func subjects(p Predicate) []Subject {
	epoch := strconv.FormatInt(p.Epoch, 10)
	named := strings.Join([]string{string(p.WorkspaceID), epoch, string(p.Checkpoint.ID), string(p.Image), p.Generation}, "\n")
	list := []Subject{{
		Name:   "workspace/" + string(p.WorkspaceID) + "/epoch/" + epoch + "/checkpoint/" + string(p.Checkpoint.ID),
		Digest: map[string]string{"sha256": core.DigestOf([]byte(named)).Hex()},
	}}
	if p.Checkpoint.Manifest != "" {
		list = append(list, Subject{
			Name: "checkpoint/" + string(p.Checkpoint.ID), Digest: map[string]string{"sha256": p.Checkpoint.Manifest.Hex()},
		})
	}
	return list
}

// StepsOf are the steps of a report, with the digests of their evidence.
func StepsOf(report []core.ResealStep) ([]Step, error) {
	list := make([]Step, len(report))
	for i, s := range report {
		evidence := s.Evidence
		if evidence == nil {
			evidence = map[string]string{}
		}
		b, err := encode(evidence)
		if err != nil {
			return nil, err
		}
		list[i] = Step{Name: s.Name, Status: s.Status, Evidence: core.DigestOf(b)}
	}
	return list, nil
}

// encode is the only form of a value: JSON in one line, no spaces, keys of maps sorted, no HTML escapes.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// decode reads what encode wrote and nothing else: every byte counts.
func decode(b []byte, v any) error {
	if err := json.Unmarshal(b, v); err != nil {
		return errForm
	}
	again, err := encode(v)
	if err != nil || !bytes.Equal(again, b) {
		return errForm
	}
	return nil
}

// check refuses a statement that is not of this kind or beyond its bounds.
func (s Statement) check() error {
	p := s.Predicate
	switch {
	case s.Type != StatementType || s.PredicateType != PredicateType:
		return bad("it is no reseal report of version 1")
	case len(p.Steps) == 0 || len(p.Steps) > MaxSteps:
		return bad("it has %d steps; it must have 1 to %d", len(p.Steps), MaxSteps)
	case p.Epoch < 1:
		return bad("its epoch is %d", p.Epoch)
	case p.FinishedAt.IsZero() || p.StartedAt.After(p.FinishedAt):
		return bad("its times are out of order")
	}
	for _, text := range append(p.texts(), stepTexts(p.Steps)...) {
		if len(text) > maxText {
			return bad("a field has %d bytes; it may have %d", len(text), maxText)
		}
		if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) {
			return bad("a field has characters other than those of printed ASCII: %q", core.Clip(text))
		}
	}
	for _, st := range p.Steps {
		if st.Status != core.ResealOK && st.Status != core.ResealSkipped {
			return bad("its step %q is %q", core.Clip(st.Name), core.Clip(string(st.Status)))
		}
	}
	want, err := encode(subjects(p))
	if err != nil {
		return err
	}
	if got, err := encode(s.Subject); err != nil || !bytes.Equal(got, want) {
		return bad("its subject does not fit what it says")
	}
	return nil
}

func (p Predicate) texts() []string {
	return []string{
		p.ClusterID, string(p.WorkspaceID), string(p.SandboxID), p.Generation, string(p.Checkpoint.ID), string(p.Checkpoint.Manifest), string(p.Image),
		p.Hostname, p.MachineID, p.MAC, p.Egress, string(p.Runner.ID), p.Runner.Version,
		p.VMM.Name, p.VMM.Version, p.VMM.MachineType, p.VMM.Accelerator, p.VMM.Arch,
	}
}

func stepTexts(steps []Step) []string {
	list := make([]string, 0, 3*len(steps))
	for _, s := range steps {
		list = append(list, s.Name, string(s.Status), string(s.Evidence))
	}
	return list
}

// Difference names the first field that differs between got and want, with both values; "" if there is none. The runner alone knows the
// times and the version of its program: they are not compared.
func Difference(want, got Predicate) string {
	for _, f := range []struct {
		name      string
		want, got any
	}{
		{"cluster_id", want.ClusterID, got.ClusterID},
		{"workspace_id", want.WorkspaceID, got.WorkspaceID},
		{"epoch", want.Epoch, got.Epoch},
		{"sandbox_id", want.SandboxID, got.SandboxID},
		{"generation", want.Generation, got.Generation},
		{"checkpoint", want.Checkpoint, got.Checkpoint},
		{"image", want.Image, got.Image},
		{"hostname", want.Hostname, got.Hostname},
		{"machine_id", want.MachineID, got.MachineID},
		{"mac", want.MAC, got.MAC},
		{"ip", want.IP, got.IP},
		{"egress_policy", want.Egress, got.Egress},
		{"runner.id", want.Runner.ID, got.Runner.ID},
		{"vmm", want.VMM, got.VMM},
	} {
		if f.want != f.got {
			return fmt.Sprintf("its %s is %q, not %q", f.name, core.Clip(fmt.Sprint(f.got)), core.Clip(fmt.Sprint(f.want)))
		}
	}
	if len(want.Steps) != len(got.Steps) {
		return fmt.Sprintf("it has %d steps and the report %d", len(got.Steps), len(want.Steps))
	}
	for i := range want.Steps {
		if want.Steps[i] != got.Steps[i] {
			return fmt.Sprintf("its step %d, %q, is not that of the report", i+1, core.Clip(got.Steps[i].Name))
		}
	}
	return ""
}
