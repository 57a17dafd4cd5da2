package countersign_test

import (
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller/countersign"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// TestAccept: a fork of hours ago, about which a restarted controller asks again, is countersigned by a key that was made since, and
// verifies. One of days ago is not, and neither is what differs.
func TestAccept(t *testing.T) {
	t.Parallel()
	ca, err := mtls.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	c, err := countersign.New(ca, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	trust, err := attest.NewAuthority(c.Authority())
	if err != nil {
		t.Fatal(err)
	}
	id := core.NewID[core.RunnerID]()
	key, err := attest.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	request, err := mtls.Request(key)
	if err != nil {
		t.Fatal(err)
	}
	der, err := c.Certify(id, request)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Certify(id, []byte("x")); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("a request that is none: %v", err)
	}
	signer, err := attest.NewSigner(key, der)
	if err != nil {
		t.Fatal(err)
	}
	predicate := func(began, ended time.Duration) attest.Predicate {
		now := time.Now()
		return attest.Predicate{
			Epoch: 1, Checkpoint: attest.Checkpoint{ID: "c", Manifest: core.DigestOf(nil)}, Steps: []attest.Step{{Name: "entropy", Status: core.ResealOK}},
			Runner: attest.Runner{ID: id}, StartedAt: now.Add(-began), FinishedAt: now.Add(-ended),
		}
	}
	sign := func(p attest.Predicate) []byte {
		t.Helper()
		b, err := signer.Sign(attest.New(p))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	p := predicate(2*time.Hour, 4*time.Minute) // the authority is 5 minutes old
	got, err := c.Accept(sign(p), p, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := trust.Verify(got); err != nil {
		t.Error(err)
	}
	bare := p
	bare.Checkpoint.Manifest = ""
	if _, err := c.Accept(sign(bare), p, true); err != nil {
		t.Errorf("by one that captured it: %v", err)
	}
	other, late := p, predicate(48*time.Hour, 0)
	other.Epoch = 2
	for name, err := range map[string]error{
		"no manifest":    func() error { _, err := c.Accept(sign(bare), p, false); return err }(),
		"another epoch":  func() error { _, err := c.Accept(sign(other), p, false); return err }(),
		"begun days ago": func() error { _, err := c.Accept(sign(late), late, false); return err }(),
		"ahead": func() error {
			ahead := predicate(0, -30*time.Minute)
			_, err := c.Accept(sign(ahead), ahead, false)
			return err
		}(),
		"nothing":      func() error { _, err := c.Accept(nil, p, false); return err }(),
		"signed twice": func() error { _, err := c.Accept(got, p, false); return err }(),
	} {
		if core.CodeOf(err) != core.CodeAttestationRefused {
			t.Errorf("%s: %v", name, err)
		}
	}
}
