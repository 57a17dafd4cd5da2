package guest

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// wantAll is a request in which every step is asked for.
func wantAll() guestapi.ResealRequest {
	e := make([]byte, guestapi.EntropySize)
	for i := range e {
		e[i] = byte(i)
	}
	return guestapi.ResealRequest{
		Identity: core.Identity{
			Generation: "g1", Hostname: "fork", MachineID: strings.Repeat("ab", 16), MAC: "02:00:00:00:00:01", IP: netip.MustParseAddr("10.0.0.1"),
		},
		HostTimeNS: time.Now().UnixNano(), Entropy: e, Token: "secret", GrowDisk: true, DiskBytes: 5 << 30, CA: "pem",
		Network: guestapi.Network{Prefix: 32, Gateway: netip.MustParseAddr("10.0.0.254")},
	}
}

// goodReport is what an honest agent answers.
func goodReport(want guestapi.ResealRequest) core.ResealReport {
	r := core.ResealReport{Generation: want.Identity.Generation, Complete: true}
	for _, rule := range rules {
		s := core.ResealStep{Name: rule.step, Status: core.ResealOK, Evidence: map[string]string{}}
		switch rule.step {
		case guestapi.StepEntropy:
			for i := range guestapi.EvidenceDraws {
				s.Evidence[fmt.Sprintf(guestapi.EvidenceDrawKey, i)] = fmt.Sprintf("%032x", i+1)
			}
		case guestapi.StepClock:
			s.Evidence[guestapi.EvidenceTimeNS] = fmt.Sprint(want.HostTimeNS + 1e6)
		case guestapi.StepDisk:
			s.Evidence[guestapi.EvidenceDevice] = fmt.Sprint(want.DiskBytes)
		case guestapi.StepBootID:
			s.Evidence[guestapi.EvidenceValue] = "01234567-89ab-4def-8123-456789abcdef"
		case guestapi.StepMachineID:
			s.Evidence[guestapi.EvidenceValue] = want.Identity.MachineID
		case guestapi.StepHostname:
			s.Evidence[guestapi.EvidenceValue] = want.Identity.Hostname
		case guestapi.StepGeneration:
			s.Evidence[guestapi.EvidenceValue] = want.Identity.Generation
		case guestapi.StepSockets:
			s.Evidence[guestapi.EvidenceRemaining] = "0"
		case guestapi.StepTFOKey:
			s.Evidence[guestapi.EvidenceKeyHash] = "aa"
		case guestapi.StepState:
			s.Evidence[guestapi.EvidenceTokenHash] = tokenHash(want.Token)
		case guestapi.StepNetwork:
			s.Evidence = map[string]string{
				guestapi.EvidenceMAC: want.Identity.MAC, guestapi.EvidenceAddresses: want.Identity.IP.String() + "/32",
				guestapi.EvidenceGateway: want.Network.Gateway.String(), guestapi.EvidenceRoutes: "1",
			}
		}
		r.Steps = append(r.Steps, s)
	}
	return r
}

func TestVerifyAcceptsAWholeReport(t *testing.T) {
	t.Parallel()
	want := wantAll()
	if err := Verify(goodReport(want), want); err != nil {
		t.Fatal(err)
	}
	// A guest without a network, a token, a gateway.
	want.Identity.MAC, want.Identity.IP, want.Network, want.Token = "", netip.Addr{}, guestapi.Network{}, ""
	r := goodReport(want)
	for i := range r.Steps {
		if r.Steps[i].Name == guestapi.StepNetwork {
			r.Steps[i] = core.ResealStep{Name: guestapi.StepNetwork, Status: core.ResealSkipped}
		}
	}
	if err := Verify(r, want); err != nil {
		t.Error(err)
	}
}

// TestVerifyRefusesEachStep spoils one step at a time.
func TestVerifyRefusesEachStep(t *testing.T) {
	t.Parallel()
	want := wantAll()
	optional := map[string]bool{}
	for _, r := range rules {
		optional[r.step] = !r.must(want)
	}
	if n := len(optional); n != 21 || len(rules) != n {
		t.Errorf("%d rules, want one for each of the 21 steps", len(rules))
	}
	refused := func(what, step string, spoil func(*core.ResealReport, *core.ResealStep)) {
		t.Helper()
		r := goodReport(want)
		for i := range r.Steps {
			if r.Steps[i].Name == step {
				spoil(&r, &r.Steps[i])
				break
			}
		}
		err := Verify(r, want)
		var se *StepError
		if core.CodeOf(err) != core.CodeResealFailed || !errors.As(err, &se) || se.Step != step {
			t.Errorf("%s, %s: %v", step, what, err)
		}
	}
	for step, opt := range optional {
		refused("failed", step, func(_ *core.ResealReport, s *core.ResealStep) { s.Status, s.Error = core.ResealFailed, "why" })
		refused("an unknown status", step, func(_ *core.ResealReport, s *core.ResealStep) { s.Status = "perhaps" })
		refused("twice", step, func(r *core.ResealReport, s *core.ResealStep) { r.Steps = append(r.Steps, *s) })
		refused("missing", step, func(r *core.ResealReport, s *core.ResealStep) { s.Name = "other" })
		if opt {
			r := goodReport(want)
			for i := range r.Steps {
				if r.Steps[i].Name == step {
					r.Steps[i].Status = core.ResealSkipped
				}
			}
			if err := Verify(r, want); err != nil {
				t.Errorf("%s skipped: %v", step, err)
			}
			continue
		}
		refused("skipped", step, func(_ *core.ResealReport, s *core.ResealStep) { s.Status = core.ResealSkipped })
	}
	set := func(key, value string) func(*core.ResealReport, *core.ResealStep) {
		return func(_ *core.ResealReport, s *core.ResealStep) { s.Evidence[key] = value }
	}
	for step, bad := range map[string][]func(*core.ResealReport, *core.ResealStep){
		guestapi.StepEntropy: {
			set("draw_03", ""), set("draw_15", "zz"), set("draw_00", "0102"),
			set("draw_05", fmt.Sprintf("%032x", 1)), // as draw_00: a generator that repeats itself
			func(_ *core.ResealReport, s *core.ResealStep) { s.Evidence = nil },
		},
		guestapi.StepClock: {
			set(guestapi.EvidenceTimeNS, ""), set(guestapi.EvidenceTimeNS, "now"),
			set(guestapi.EvidenceTimeNS, fmt.Sprint(want.HostTimeNS-int64(time.Hour))), set(guestapi.EvidenceTimeNS, fmt.Sprint(want.HostTimeNS+int64(time.Minute))),
		},
		guestapi.StepBootID:     {set(guestapi.EvidenceValue, ""), set(guestapi.EvidenceValue, "0123456789ab4def8123456789abcdef")},
		guestapi.StepMachineID:  {set(guestapi.EvidenceValue, ""), set(guestapi.EvidenceValue, strings.Repeat("cd", 16))},
		guestapi.StepHostname:   {set(guestapi.EvidenceValue, "parent")},
		guestapi.StepGeneration: {set(guestapi.EvidenceValue, "g0")},
		guestapi.StepSockets:    {set(guestapi.EvidenceRemaining, "1"), set(guestapi.EvidenceRemaining, "")},
		guestapi.StepDisk:       {set(guestapi.EvidenceDevice, ""), set(guestapi.EvidenceDevice, fmt.Sprint(4<<30))},
		guestapi.StepTFOKey:     {set(guestapi.EvidenceKeyHash, "")},
		guestapi.StepState:      {set(guestapi.EvidenceTokenHash, "none"), set(guestapi.EvidenceTokenHash, "")},
		guestapi.StepNetwork: {
			set(guestapi.EvidenceMAC, "02:00:00:00:00:02"), set(guestapi.EvidenceAddresses, "10.0.0.1/32,10.0.0.2/32"), set(guestapi.EvidenceAddresses, ""),
			set(guestapi.EvidenceAddresses, "10.0.0.1/24"), set(guestapi.EvidenceGateway, "10.0.0.253"), set(guestapi.EvidenceRoutes, "2"),
		},
	} {
		for i, spoil := range bad {
			refused(fmt.Sprint("evidence ", i), step, spoil)
		}
	}
}

func TestVerifyRefusesTheWholeReport(t *testing.T) {
	t.Parallel()
	want := wantAll()
	for name, spoil := range map[string]func(*core.ResealReport){
		"not complete":       func(r *core.ResealReport) { r.Complete = false },
		"another generation": func(r *core.ResealReport) { r.Generation = "g0" },
		"empty":              func(r *core.ResealReport) { r.Steps = nil },
	} {
		r := goodReport(want)
		spoil(&r)
		if err := Verify(r, want); core.CodeOf(err) != core.CodeResealFailed {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestVerifyReseed(t *testing.T) {
	t.Parallel()
	good := goodReport(wantAll()).Steps[:1]
	if err := VerifyReseed(guestapi.ReseedResponse{Steps: good}); err != nil {
		t.Error(err)
	}
	bad := goodReport(wantAll()).Steps[:1]
	bad[0].Evidence["draw_01"] = bad[0].Evidence["draw_02"]
	for _, steps := range [][]core.ResealStep{nil, bad, append(good, good...)} {
		if err := VerifyReseed(guestapi.ReseedResponse{Steps: steps}); core.CodeOf(err) != core.CodeResealFailed {
			t.Errorf("%+v: %v", steps, err)
		}
	}
}
