package guest

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// clockTolerance is how far the guest's clock may be from the time that was sent, once the reseal itself is allowed for.
const clockTolerance = 5 * time.Second

// check judges the evidence of one step that says it is ok, and returns what is wrong with it.
type check func(e map[string]string, want guestapi.ResealRequest) string

// rule is what is asked of one step.
type rule struct {
	step  string
	must  func(want guestapi.ResealRequest) bool // it may not be skipped
	check check
}

func always(guestapi.ResealRequest) bool { return true }
func never(guestapi.ResealRequest) bool  { return false }

// rules has every step there is, so that an agent that leaves one out is found out.
var rules = []rule{
	{guestapi.StepEntropy, always, checkDraws},
	{guestapi.StepClock, always, checkClock},
	{guestapi.StepBootID, always, checkBootID},
	{guestapi.StepMachineID, always, equals(guestapi.EvidenceValue, func(w guestapi.ResealRequest) string { return w.Identity.MachineID })},
	{guestapi.StepHostname, always, equals(guestapi.EvidenceValue, func(w guestapi.ResealRequest) string { return w.Identity.Hostname })},
	{guestapi.StepNetwork, wantsNetwork, checkNetwork},
	{guestapi.StepSockets, always, equals(guestapi.EvidenceRemaining, func(guestapi.ResealRequest) string { return "0" })},
	{guestapi.StepTCPMetrics, never, nil},
	{guestapi.StepConntrack, never, nil},
	{guestapi.StepTFOKey, always, present(guestapi.EvidenceKeyHash)},
	{guestapi.StepWireGuard, never, nil},
	{guestapi.StepSSHKeys, never, nil},
	{guestapi.StepDHCP, never, nil},
	{guestapi.StepRandomSeed, never, nil},
	{guestapi.StepCA, func(w guestapi.ResealRequest) bool { return w.CA != "" }, nil},
	{guestapi.StepDisk, func(w guestapi.ResealRequest) bool { return w.GrowDisk }, checkDisk},
	{guestapi.StepTimers, never, nil},
	{guestapi.StepJournal, never, nil},
	{guestapi.StepState, always, equals(guestapi.EvidenceTokenHash, func(w guestapi.ResealRequest) string { return tokenHash(w.Token) })},
	{guestapi.StepGeneration, always, equals(guestapi.EvidenceValue, func(w guestapi.ResealRequest) string { return w.Identity.Generation })},
	{guestapi.StepHooks, never, nil},
}

func verify(report core.ResealReport, want guestapi.ResealRequest) error {
	// The steps come first, because the one that failed is what people need to know.
	if err := verifySteps(report.Steps, rules, want); err != nil {
		return err
	}
	switch {
	case report.Generation != want.Identity.Generation:
		return stepFailed("report", fmt.Sprintf("it is for generation %q", core.Clip(report.Generation)))
	case !report.Complete:
		return stepFailed("report", "it is not complete")
	}
	return nil
}

func verifyReseed(res guestapi.ReseedResponse) error {
	return verifySteps(res.Steps, rules[:1], guestapi.ResealRequest{})
}

func verifySteps(steps []core.ResealStep, rules []rule, want guestapi.ResealRequest) error {
	found := make(map[string]core.ResealStep, len(steps))
	for _, s := range steps {
		if _, twice := found[s.Name]; twice {
			return stepFailed(s.Name, "reported twice")
		}
		found[s.Name] = s
		if s.Status == core.ResealFailed {
			return stepFailed(s.Name, "failed: "+s.Error)
		}
	}
	for _, r := range rules {
		s, ok := found[r.step]
		switch {
		case !ok:
			return stepFailed(r.step, "not reported")
		case s.Status == core.ResealSkipped && r.must(want):
			return stepFailed(r.step, "skipped: "+s.Evidence[guestapi.EvidenceReason])
		case s.Status == core.ResealSkipped:
			continue
		case s.Status != core.ResealOK:
			return stepFailed(r.step, fmt.Sprintf("has the unknown status %q", core.Clip(string(s.Status))))
		case r.check == nil:
			continue
		}
		if reason := r.check(s.Evidence, want); reason != "" {
			return stepFailed(r.step, reason)
		}
	}
	return nil
}

func stepFailed(step, reason string) error {
	e := &StepError{Step: core.Clip(step), Reason: core.Clip(reason)}
	return core.Wrapf(e, core.FailedPrecondition, core.CodeResealFailed, "the sandbox was not resealed: step %s: %s", e.Step, e.Reason)
}

func equals(key string, want func(guestapi.ResealRequest) string) check {
	return func(e map[string]string, req guestapi.ResealRequest) string {
		if got, want := e[key], want(req); got != want || want == "" {
			return fmt.Sprintf("evidence %s is %q, want %q", key, got, want)
		}
		return ""
	}
}

func present(key string) check {
	return func(e map[string]string, _ guestapi.ResealRequest) string {
		if e[key] == "" {
			return "no evidence " + key
		}
		return ""
	}
}

// checkDraws wants as many different draws as there should be. Draws that an earlier fork has shown are for the
// controller to find: only it sees all of them.
func checkDraws(e map[string]string, _ guestapi.ResealRequest) string {
	seen := make(map[string]bool, guestapi.EvidenceDraws)
	for i := range guestapi.EvidenceDraws {
		key := fmt.Sprintf(guestapi.EvidenceDrawKey, i)
		draw := e[key]
		if raw, err := hex.DecodeString(draw); err != nil || len(raw) != 16 {
			return "no evidence " + key
		}
		if seen[draw] {
			return "the random generator gave the same value twice"
		}
		seen[draw] = true
	}
	return ""
}

func checkClock(e map[string]string, want guestapi.ResealRequest) string {
	ns, err := strconv.ParseInt(e[guestapi.EvidenceTimeNS], 10, 64)
	if err != nil {
		return "no evidence " + guestapi.EvidenceTimeNS
	}
	// The clock was set somewhere between the request and now, which on a busy host may be a long time.
	early, late := time.Duration(ns-want.HostTimeNS), time.Duration(ns-time.Now().UnixNano())
	if early < -clockTolerance || late > clockTolerance {
		return fmt.Sprintf("the clock is off by %s", max(-early, late))
	}
	return ""
}

func checkBootID(e map[string]string, _ guestapi.ResealRequest) string {
	v := e[guestapi.EvidenceValue]
	if raw, err := hex.DecodeString(strings.ReplaceAll(v, "-", "")); err != nil || len(raw) != 16 || len(v) != 36 {
		return "no evidence " + guestapi.EvidenceValue
	}
	return ""
}

func checkDisk(e map[string]string, want guestapi.ResealRequest) string {
	if n, err := strconv.ParseInt(e[guestapi.EvidenceDevice], 10, 64); want.DiskBytes > 0 && (err != nil || n < want.DiskBytes) {
		return fmt.Sprintf("the device has %q bytes, want %d", e[guestapi.EvidenceDevice], want.DiskBytes)
	}
	return ""
}

func wantsNetwork(want guestapi.ResealRequest) bool {
	return want.Identity.MAC != "" || want.Identity.IP.IsValid()
}

func checkNetwork(e map[string]string, want guestapi.ResealRequest) string {
	mac, err := net.ParseMAC(want.Identity.MAC)
	if err != nil || e[guestapi.EvidenceMAC] != mac.String() {
		return fmt.Sprintf("the MAC is %q, want %q", e[guestapi.EvidenceMAC], want.Identity.MAC)
	}
	addr := netip.PrefixFrom(want.Identity.IP, want.Network.Prefix)
	if got := strings.Split(e[guestapi.EvidenceAddresses], ","); !slices.Equal(got, []string{addr.String()}) {
		return fmt.Sprintf("the addresses are %q, want %q alone", e[guestapi.EvidenceAddresses], addr)
	}
	gateway, routes := "", "0"
	if want.Network.Gateway.IsValid() {
		gateway, routes = want.Network.Gateway.String(), "1"
	}
	if e[guestapi.EvidenceGateway] != gateway || e[guestapi.EvidenceRoutes] != routes {
		return fmt.Sprintf("the gateway is %q (%s default routes), want %q", e[guestapi.EvidenceGateway], e[guestapi.EvidenceRoutes], gateway)
	}
	return ""
}

// tokenHash is how the agent names the token that it holds, without showing it.
func tokenHash(token string) string {
	if token == "" {
		return "none"
	}
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:8])
}
