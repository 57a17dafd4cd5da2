//go:build linux

package reseal

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

func TestResealSkips(t *testing.T) {
	t.Parallel()
	var ran []string
	record := func(s Step) Step {
		do := s.Do
		s.Do = func(ctx context.Context, r *Run) (Evidence, error) {
			ran = append(ran, s.Name)
			if do == nil {
				return Evidence{"k": "v"}, nil
			}
			return do(ctx, r)
		}
		return s
	}
	r := New(&guesttest.Workload{}, []Step{
		record(Step{Name: "idle", Nothing: func() string { return "not here" }}), record(Step{Name: "busy", Nothing: func() string { return "" }}),
		record(Step{Name: "skips", Do: func(context.Context, *Run) (Evidence, error) { return nil, skipError("no need") }}),
	})
	report := r.Run(t.Context(), guesttest.ResealRequest("g"), time.Now())
	want := []core.ResealStep{
		{Name: "idle", Status: core.ResealSkipped, Evidence: Evidence{guestapi.EvidenceReason: "not here"}},
		{Name: "busy", Status: core.ResealOK, Evidence: Evidence{"k": "v"}},
		{Name: "skips", Status: core.ResealSkipped, Evidence: Evidence{guestapi.EvidenceReason: "no need"}},
	}
	for i := range report.Steps {
		report.Steps[i].DurationMS = 0
	}
	if diff := cmp.Diff(want, report.Steps); diff != "" || !report.Complete || len(ran) != 2 {
		t.Errorf("complete %t, ran %v\n%s", report.Complete, ran, diff)
	}
}

func TestCheckReseal(t *testing.T) {
	t.Parallel()
	if err := CheckRequest(guesttest.ResealRequest("g")); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*guestapi.ResealRequest){
		"no entropy":       func(r *guestapi.ResealRequest) { r.Entropy = nil },
		"zero entropy":     func(r *guestapi.ResealRequest) { r.Entropy = make([]byte, guestapi.EntropySize) },
		"no generation":    func(r *guestapi.ResealRequest) { r.Identity.Generation = "" },
		"a line feed":      func(r *guestapi.ResealRequest) { r.Identity.Generation = "a\nb" },
		"machine id":       func(r *guestapi.ResealRequest) { r.Identity.MachineID = "../../etc" },
		"upper case":       func(r *guestapi.ResealRequest) { r.Identity.MachineID = strings.Repeat("A", 32) },
		"hostname":         func(r *guestapi.ResealRequest) { r.Identity.Hostname = "a b" },
		"hyphen":           func(r *guestapi.ResealRequest) { r.Identity.Hostname = "-a" },
		"no time":          func(r *guestapi.ResealRequest) { r.HostTimeNS = 0 },
		"multicast MAC":    func(r *guestapi.ResealRequest) { r.Identity.MAC = "01:00:00:00:00:01" },
		"no MAC":           func(r *guestapi.ResealRequest) { r.Identity.MAC = "" },
		"IPv6":             func(r *guestapi.ResealRequest) { r.Identity.IP = netip.MustParseAddr("fe80::1") },
		"no prefix":        func(r *guestapi.ResealRequest) { r.Network.Prefix = 0 },
		"IPv6 gateway":     func(r *guestapi.ResealRequest) { r.Network.Gateway = netip.MustParseAddr("::1") },
		"gateway's MAC":    func(r *guestapi.ResealRequest) { r.Network.GatewayMAC = "x" },
		"MTU":              func(r *guestapi.ResealRequest) { r.Network.MTU = 1 },
		"token":            func(r *guestapi.ResealRequest) { r.Token = "a b" },
		"long token":       func(r *guestapi.ResealRequest) { r.Token = strings.Repeat("a", 5000) },
		"environment name": func(r *guestapi.ResealRequest) { r.Env = map[string]string{"": "x"} },
	} {
		r := guesttest.ResealRequest("g")
		spoil(&r)
		if err := CheckRequest(r); core.CategoryOf(err) != core.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := guesttest.ResealRequest("g")
	r.Identity.MAC, r.Identity.IP, r.Network = "", netip.Addr{}, guestapi.Network{}
	if err := CheckRequest(r); err != nil {
		t.Errorf("without a network: %v", err)
	}
}

// TestReseed: a reseed does the first step of a guest alone, with the given entropy. Without such a step it fails.
func TestReseed(t *testing.T) {
	t.Parallel()
	steps := Steps()
	if steps[0].Name != guestapi.StepEntropy {
		t.Errorf("the first step is %s: later steps would use the randomness of the parent", steps[0].Name)
	}
	r := New(&guesttest.Workload{}, steps)
	var got []byte
	r.sys.reseed = func(_ string, entropy []byte) error {
		got = entropy
		return nil
	}
	step := r.Reseed(guesttest.Entropy())
	if step.Status != core.ResealOK || !bytes.Equal(got, guesttest.Entropy()) || len(step.Evidence) != guestapi.EvidenceDraws+1 {
		t.Errorf("%+v, with the entropy %x", step, got)
	}
	r.sys.reseed = func(string, []byte) error { return os.ErrPermission }
	if step := r.Reseed(guesttest.Entropy()); step.Status != core.ResealFailed || step.Error == "" {
		t.Errorf("a kernel that takes no entropy: %+v", step)
	}
	if step := New(&guesttest.Workload{}, steps[1:]).Reseed(guesttest.Entropy()); step.Status != core.ResealFailed || step.Name != guestapi.StepEntropy {
		t.Errorf("without the step: %+v", step)
	}
}
