package attest_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

var long = flag.Bool("long", false, "alter every byte in every way, and not in one of them")

func TestMain(m *testing.M) { testleak.Main(m) }

// cluster is an authority with a runner and the key that countersigns.
type cluster struct {
	t       testing.TB
	ca      *mtls.Authority
	trust   *attest.Authority
	runner  core.RunnerID
	signer  *attest.Signer
	counter *attest.Signer
}

func newCluster(t testing.TB) *cluster {
	t.Helper()
	ca, err := mtls.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, ca: ca, runner: core.NewID[core.RunnerID]()}
	if c.trust, err = attest.NewAuthority(ca.Certificate()); err != nil {
		t.Fatal(err)
	}
	c.signer = c.issue(attest.RunnerName(c.runner), time.Hour)
	c.counter = c.issue(attest.ClusterName, time.Hour)
	return c
}

func (c *cluster) issue(name string, life time.Duration) *attest.Signer {
	c.t.Helper()
	key, err := attest.NewKey()
	if err != nil {
		c.t.Fatal(err)
	}
	der, err := c.ca.IssueAttestation(attest.PublicOf(key), name, 0, life)
	if err != nil {
		c.t.Fatal(err)
	}
	s, err := attest.NewSigner(key, der)
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

func (c *cluster) predicate() attest.Predicate {
	steps, err := attest.StepsOf([]core.ResealStep{
		{Name: "entropy", Status: core.ResealOK, Evidence: map[string]string{"draw_00": "a<b>&c", "draw_01": "x"}},
		{Name: "ssh", Status: core.ResealSkipped},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	now := time.Now()
	return attest.Predicate{
		ClusterID: "test", WorkspaceID: core.NewID[core.WorkspaceID](), Epoch: 3, SandboxID: core.NewID[core.SandboxID](), Generation: "g-1",
		Checkpoint: attest.Checkpoint{ID: core.NewID[core.CheckpointID](), Manifest: core.DigestOf([]byte("m"))}, Image: core.DigestOf([]byte("i")),
		Hostname: "h", MachineID: strings.Repeat("a", 32), MAC: "02:00:00:00:00:01", IP: netip.MustParseAddr("10.1.0.1"), Egress: "deny-all", Steps: steps,
		Runner: attest.Runner{ID: c.runner, Version: "v1"}, VMM: attest.VMM{Name: "qemu", Version: "10.0", MachineType: "q35", Accelerator: "tcg", Arch: "amd64"},
		StartedAt: now.Add(-time.Second), FinishedAt: now,
	}
}

func (c *cluster) sign(p attest.Predicate) []byte {
	c.t.Helper()
	b, err := c.signer.Sign(attest.New(p))
	if err != nil {
		c.t.Fatal(err)
	}
	return b
}

func (c *cluster) full(p attest.Predicate) []byte {
	c.t.Helper()
	b, err := c.counter.Countersign(c.sign(p))
	if err != nil {
		c.t.Fatal(err)
	}
	return b
}

func TestSignAndVerify(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	p := c.predicate()
	b := c.full(p)
	t.Logf("an envelope has %d bytes", len(b))
	got, err := c.trust.Verify(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := attest.Difference(attest.New(p).Predicate, got.Statement.Predicate); diff != "" {
		t.Error(diff)
	}
	if got.Digest != core.DigestOf(b) || len(got.Statement.Subject) != 2 || got.Statement.Subject[1].Digest["sha256"] != p.Checkpoint.Manifest.Hex() {
		t.Errorf("%+v", got)
	}
	if _, err := c.trust.VerifyRunner(c.sign(p)); err != nil {
		t.Error(err)
	}
}

// TestEveryByteCounts changes each byte of an envelope in several ways.
func TestEveryByteCounts(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.full(c.predicate())
	for i := range b {
		flips := []byte{0x01, 0x20, b[i] ^ '\n'}
		if !*long { // each byte in one way, in turn
			flips = flips[i%3 : i%3+1]
		}
		for _, flip := range flips {
			if flip == 0 {
				continue
			}
			altered := bytes.Clone(b)
			altered[i] ^= flip
			if _, err := c.trust.Verify(altered); core.CodeOf(err) != core.CodeAttestationRefused {
				t.Fatalf("byte %d, %q for %q: %v", i, altered[i], b[i], err)
			}
		}
		if i%10 != 0 {
			continue
		}
		if _, err := c.trust.Verify(b[:i]); err == nil {
			t.Fatalf("the first %d bytes pass", i)
		}
		if _, err := c.trust.Verify(slices.Insert(bytes.Clone(b), i, ' ')); err == nil {
			t.Fatalf("a space before byte %d passes", i)
		}
	}
}

// TestFiftyOfAThousand: of 1,000 attestations 50 are altered in one byte each, and those 50 are found, and no other.
func TestFiftyOfAThousand(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	r := rand.New(rand.NewPCG(1, 2))
	altered := map[int]bool{}
	for len(altered) < 50 {
		altered[r.IntN(1000)] = true
	}
	for i := range 1000 {
		b := c.full(c.predicate())
		if altered[i] {
			b[r.IntN(len(b))] ^= byte(1 + r.IntN(255))
		}
		if _, err := c.trust.Verify(b); (err != nil) != altered[i] {
			t.Errorf("attestation %d, altered: %v: %v", i, altered[i], err)
		}
	}
}

// remake lets a test change what is in an envelope, as one can who has no key.
func remake(t *testing.T, b []byte, change func(e map[string]any)) []byte {
	t.Helper()
	var e struct {
		PayloadType string           `json:"payloadType"`
		Payload     string           `json:"payload"`
		Signatures  []map[string]any `json:"signatures"`
	}
	if err := json.Unmarshal(b, &e); err != nil {
		t.Fatal(err)
	}
	m := map[string]any{"payloadType": e.PayloadType, "payload": e.Payload, "signatures": e.Signatures}
	change(m)
	sigs, err := json.Marshal(m["signatures"])
	if err != nil {
		t.Fatal(err)
	}
	var list []struct {
		KeyID       string `json:"keyid"`
		Sig         string `json:"sig"`
		Certificate string `json:"certificate"`
	}
	if err := json.Unmarshal(sigs, &list); err != nil {
		t.Fatal(err)
	}
	if sigs, err = json.Marshal(list); err != nil {
		t.Fatal(err)
	}
	return fmt.Appendf(nil, `{"payloadType":%q,"payload":%q,"signatures":%s}`, m["payloadType"], m["payload"], sigs)
}

func sigs(e map[string]any) []map[string]any {
	list, _ := e["signatures"].([]map[string]any)
	return list
}

// TestRefusals: what is signed by the wrong key, at the wrong time, for another purpose, or not by both.
func TestRefusals(t *testing.T) {
	t.Parallel()
	c, other := newCluster(t), newCluster(t)
	p := c.predicate()
	good := c.full(p)
	if same := remake(t, good, func(map[string]any) {}); !bytes.Equal(same, good) {
		t.Fatalf("the test's own form differs:\n%s\n%s", same, good)
	}
	by := func(first, second *attest.Signer, p attest.Predicate) []byte {
		b, err := first.Sign(attest.New(p))
		if err == nil {
			b, err = second.Countersign(b)
		}
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	later, earlier := c.predicate(), c.predicate()
	later.FinishedAt = later.FinishedAt.Add(30 * time.Minute)
	earlier.StartedAt, earlier.FinishedAt = earlier.StartedAt.Add(-2*time.Minute), earlier.FinishedAt.Add(-2*time.Minute)
	short := c.issue(attest.ClusterName, 10*time.Minute)
	impostor := c.issue(attest.RunnerName(core.NewID[core.RunnerID]()), time.Hour)
	for name, b := range map[string][]byte{
		"not countersigned":                 c.sign(p),
		"countersigned by the runner":       by(c.signer, c.signer, p),
		"signed by the cluster alone":       by(c.counter, c.counter, p),
		"by another runner":                 by(impostor, c.counter, p),
		"of another cluster":                other.full(p),
		"countersigned in another cluster":  by(c.signer, other.counter, p),
		"by a key that another vouches for": by(other.signer, c.counter, p),
		"when a certificate was over":       by(c.signer, short, later),
		"three signatures":                  by(c.signer, c.counter, p)[:0],
		"nothing":                           nil,
		"too long":                          bytes.Repeat([]byte("a"), attest.MaxEnvelope+1),
		"with the other's countersignature": remake(t, c.sign(earlier), func(e map[string]any) {
			var full map[string]any
			remake(t, good, func(e map[string]any) { full = e })
			e["signatures"] = append(sigs(e), sigs(full)[1])
		}),
		"in the other order":      remake(t, good, func(e map[string]any) { slices.Reverse(sigs(e)) }),
		"another type of payload": remake(t, good, func(e map[string]any) { e["payloadType"] = "application/json" }),
		"another payload": remake(t, good, func(e map[string]any) {
			raw, err := base64.StdEncoding.DecodeString(e["payload"].(string))
			if err != nil {
				t.Error(err)
			}
			e["payload"] = base64.StdEncoding.EncodeToString(bytes.Replace(raw, []byte(`"epoch":3`), []byte(`"epoch":4`), 1))
		}),
	} {
		if _, err := c.trust.Verify(b); core.CodeOf(err) != core.CodeAttestationRefused {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.trust.Verify(by(c.signer, c.counter, earlier)); err != nil {
		t.Errorf("within the life of both certificates: %v", err)
	}
}

// TestTLSKeysAreOthers: a certificate of TLS does not vouch for attestations, nor the other way around.
func TestTLSKeysAreOthers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	key, err := attest.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	der, err := c.ca.Issue(attest.PublicOf(key), attest.RunnerName(c.runner), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	s, err := attest.NewSigner(key, der)
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Sign(attest.New(c.predicate()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.trust.VerifyRunner(b); core.CodeOf(err) != core.CodeAttestationRefused {
		t.Errorf("a certificate for TLS vouches for an attestation: %v", err)
	}
	if _, err := attest.NewSigner(key, c.counter.Certificate().Raw); err == nil {
		t.Error("a certificate of another key is taken")
	}
	if _, err := attest.NewAuthority(c.counter.Certificate().Raw); err == nil {
		t.Error("a certificate that is no authority's is taken as one")
	}
}

// TestSignRefuses what is beyond the bounds, or of a time at which the key is not vouched for.
func TestSignRefuses(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for name, change := range map[string]func(p *attest.Predicate){
		"no steps":            func(p *attest.Predicate) { p.Steps = nil },
		"many steps":          func(p *attest.Predicate) { p.Steps = slices.Repeat(p.Steps, attest.MaxSteps) },
		"a long field":        func(p *attest.Predicate) { p.Runner.Version = strings.Repeat("v", 300) },
		"an escape":           func(p *attest.Predicate) { p.Runner.Version = "v1\x1b[2J" },
		"a letter beyond":     func(p *attest.Predicate) { p.VMM.Version = "1\u202e0" },
		"a failed step":       func(p *attest.Predicate) { p.Steps[0].Status = core.ResealFailed },
		"no epoch":            func(p *attest.Predicate) { p.Epoch = 0 },
		"an end before start": func(p *attest.Predicate) { p.StartedAt = p.FinishedAt.Add(time.Second) },
		"a time to come":      func(p *attest.Predicate) { p.FinishedAt = p.FinishedAt.Add(2 * time.Hour) },
		"a time long ago":     func(p *attest.Predicate) { p.StartedAt, p.FinishedAt = time.Unix(1, 0), time.Unix(2, 0) },
	} {
		p := c.predicate()
		change(&p)
		if _, err := c.signer.Sign(attest.New(p)); core.CodeOf(err) != core.CodeAttestationRefused {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDifference(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	want := c.predicate()
	for field, change := range map[string]func(p *attest.Predicate){
		"cluster_id":    func(p *attest.Predicate) { p.ClusterID = "x" },
		"workspace_id":  func(p *attest.Predicate) { p.WorkspaceID = "x" },
		"epoch":         func(p *attest.Predicate) { p.Epoch++ },
		"sandbox_id":    func(p *attest.Predicate) { p.SandboxID = "x" },
		"generation":    func(p *attest.Predicate) { p.Generation = "x" },
		"checkpoint":    func(p *attest.Predicate) { p.Checkpoint.ID = "x" },
		"image":         func(p *attest.Predicate) { p.Image = "x" },
		"hostname":      func(p *attest.Predicate) { p.Hostname = "x" },
		"machine_id":    func(p *attest.Predicate) { p.MachineID = "x" },
		"mac":           func(p *attest.Predicate) { p.MAC = "x" },
		"ip":            func(p *attest.Predicate) { p.IP = netip.MustParseAddr("10.1.0.2") },
		"egress_policy": func(p *attest.Predicate) { p.Egress = "allow-all" },
		"runner.id":     func(p *attest.Predicate) { p.Runner.ID = "x" },
		"vmm":           func(p *attest.Predicate) { p.VMM.Version = "x" },
		"steps":         func(p *attest.Predicate) { p.Steps = p.Steps[:1] },
		"step 2":        func(p *attest.Predicate) { p.Steps = slices.Clone(p.Steps); p.Steps[1].Evidence = "x" },
	} {
		got := want
		change(&got)
		if diff := attest.Difference(want, got); !strings.Contains(diff, field) {
			t.Errorf("%s: %q", field, diff)
		}
	}
}

func FuzzVerify(f *testing.F) {
	c := newCluster(f)
	f.Add(c.full(c.predicate()))
	f.Add(c.sign(c.predicate()))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := c.trust.Verify(b)
		if err == nil && v.Digest != core.DigestOf(b) || err != nil && core.CodeOf(err) != core.CodeAttestationRefused {
			t.Error(v, err)
		}
	})
}

func BenchmarkSign(b *testing.B) {
	c := newCluster(b)
	p := c.predicate()
	for b.Loop() {
		c.sign(p)
	}
}

// BenchmarkAccept is what a controller does with an envelope.
func BenchmarkAccept(b *testing.B) {
	c := newCluster(b)
	e := c.sign(c.predicate())
	for b.Loop() {
		if _, err := c.trust.VerifyRunner(e); err != nil {
			b.Fatal(err)
		}
		if _, err := c.counter.Countersign(e); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkVerify(b *testing.B) {
	c := newCluster(b)
	e := c.full(c.predicate())
	for b.Loop() {
		if _, err := c.trust.Verify(e); err != nil {
			b.Fatal(err)
		}
	}
}
