package attestation

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// notary makes attestations and files of them.
type notary struct {
	t               *testing.T
	dir, pem        string
	ca              *mtls.Authority
	id              core.RunnerID
	runner, cluster *attest.Signer
}

func newNotary(t *testing.T) *notary {
	t.Helper()
	n := &notary{t: t, dir: t.TempDir(), id: core.NewID[core.RunnerID]()}
	var err error
	if n.ca, err = mtls.NewAuthority("test"); err != nil {
		t.Fatal(err)
	}
	n.pem = n.write("authority.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: n.ca.Certificate()}))
	n.runner, n.cluster = n.signer(attest.RunnerName(n.id)), n.signer(attest.ClusterName)
	return n
}

func (n *notary) signer(name string) *attest.Signer {
	n.t.Helper()
	key, err := attest.NewKey()
	if err != nil {
		n.t.Fatal(err)
	}
	der, err := n.ca.IssueAttestation(attest.PublicOf(key), name, 48*time.Hour, time.Hour)
	if err != nil {
		n.t.Fatal(err)
	}
	s, err := attest.NewSigner(key, der)
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

func (n *notary) write(name string, b []byte) string {
	n.t.Helper()
	path := filepath.Join(n.dir, name)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		n.t.Fatal(err)
	}
	return path
}

// attestation is a line of a file.
func (n *notary) attestation(ws core.WorkspaceID, epoch int64, age time.Duration) []byte {
	n.t.Helper()
	at := time.Now().Add(-age)
	b, err := n.runner.Sign(attest.New(attest.Predicate{
		ClusterID: "test", WorkspaceID: ws, Epoch: epoch, SandboxID: core.NewID[core.SandboxID](), Generation: "g", Checkpoint: attest.Checkpoint{ID: core.NewID[core.CheckpointID]()},
		IP: netip.MustParseAddr("10.0.0.1"), Steps: []attest.Step{{Name: "entropy", Status: core.ResealOK}}, Runner: attest.Runner{ID: n.id}, StartedAt: at, FinishedAt: at,
	}))
	if err == nil {
		b, err = n.cluster.Countersign(b)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return append(b, '\n')
}

// offline runs a command that has no server.
func offline(args ...string) (status int, stdout, stderr string) {
	a, out, errs := clitest.App(nil)
	status = a.Run(context.Background(), args, NewCommand)
	return status, out.String(), errs.String()
}

// TestVerifyNamesTheAltered: of 1,000 files with an attestation each, 50 are altered in one byte. Those 50 are named, and no other.
func TestVerifyNamesTheAltered(t *testing.T) {
	t.Parallel()
	n := newNotary(t)
	r := rand.New(rand.NewPCG(7, 11))
	altered := map[string]bool{}
	args := []string{"attest", "verify", "--authority", n.pem}
	files := make([][]byte, 1000)
	for i := range files {
		files[i] = n.attestation(core.NewID[core.WorkspaceID](), 1, 0)
	}
	for _, i := range r.Perm(1000)[:50] {
		files[i][r.IntN(len(files[i])-1)] ^= byte(1 + r.IntN(255)) // any byte of the envelope; the line's end is not one
		altered[filepath.Join(n.dir, fmt.Sprintf("%04d", i))] = true
	}
	for i, b := range files {
		args = append(args, n.write(fmt.Sprintf("%04d", i), b))
	}
	status, stdout, stderr := offline(append(args, "--json")...)
	if status != exit.Failure {
		t.Fatalf("status %d: %s", status, stderr)
	}
	var list []attested
	if err := json.Unmarshal([]byte(stdout), &list); err != nil {
		t.Fatal(err)
	}
	bad := map[string]bool{}
	for _, a := range list {
		if !a.Good {
			bad[a.File] = true
			if a.Reason == "" {
				t.Errorf("%s: no reason", a.File)
			}
		}
	}
	if len(list) < 1000 || len(bad) != 50 {
		t.Errorf("%d attestations, %d bad", len(list), len(bad))
	}
	for f := range bad {
		if !altered[f] {
			t.Errorf("%s is named and was not altered", f)
		}
	}
	_, stdout, _ = offline(args...)
	if lines := strings.Count(stdout, ": BAD: "); lines < 50 || !strings.Contains(stdout, "good, ") {
		t.Errorf("%d lines name a bad one:\n%s", lines, stdout)
	}
}

func TestVerify(t *testing.T) {
	t.Parallel()
	n, other := newNotary(t), newNotary(t)
	ws := core.NewID[core.WorkspaceID]()
	one, two := n.attestation(ws, 1, 0), n.attestation(ws, 2, 4*time.Minute)
	good, both := n.write("good", one), n.write("both", append(bytes.Clone(one), two...))
	removed, err := n.runner.Sign(func() attest.Statement {
		trust, err := attest.NewAuthority(n.ca.Certificate())
		if err != nil {
			t.Fatal(err)
		}
		v, err := trust.Verify(bytes.TrimSuffix(one, []byte("\n")))
		if err != nil {
			t.Fatal(err)
		}
		return v.Statement
	}())
	if err != nil {
		t.Fatal(err)
	}
	status := func(want int, text string, args ...string) {
		t.Helper()
		got, stdout, stderr := offline(append([]string{"attest", "verify", "--authority", n.pem}, args...)...)
		if got != want || !strings.Contains(stdout+stderr, text) {
			t.Errorf("%v: status %d, want %d and %q:\n%s%s", args, got, want, text, stdout, stderr)
		}
	}
	status(exit.OK, string(ws), good)
	status(exit.OK, "2 attestations: 2 good, 0 bad", both)
	status(exit.OK, "good", good, "--workspace", string(ws), "--epoch", "1", "--max-age", "1h")
	status(exit.Failure, "it is of workspace", good, "--workspace", string(core.NewID[core.WorkspaceID]()))
	status(exit.Failure, "both:1: BAD: it is of epoch 1", both, "--epoch", "2")
	status(exit.Failure, "both:2: BAD: it was made at", both, "--max-age", "1m")
	status(exit.OK, "2 good", both, "--at", time.Now().Add(time.Minute).UTC().Format(time.RFC3339), "--max-age", "6m")
	status(exit.Failure, "after the requested time", good, "--at", "2020-01-01T00:00:00Z")
	status(exit.Usage, "--at", good, "--at", "yesterday")
	status(exit.Failure, "has not issued the certificate", other.write("theirs", other.attestation(ws, 1, 0)))
	status(exit.Failure, "the cluster has not countersigned it", n.write("removed", removed))
	status(exit.Failure, "it is empty", n.write("empty", nil))
	status(exit.Failure, "more than 65536 bytes", n.write("long", bytes.Repeat([]byte("x"), 70_000)))
	status(exit.Failure, "not in the form", n.write("spaced", bytes.ReplaceAll(one, []byte(","), []byte(", "))))
	status(exit.Failure, "no such file", filepath.Join(n.dir, "absent"))
	if got, _, stderr := offline("attest", "verify", good, "--authority", good); got != exit.BadInput || !strings.Contains(stderr, "one certificate in PEM") {
		t.Errorf("an authority that is none: %d, %s", got, stderr)
	}
	if got, _, _ := offline("attest", "verify", good); got != exit.Usage {
		t.Errorf("without an authority: %d", got)
	}
}
