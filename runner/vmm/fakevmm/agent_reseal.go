package fakevmm

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// resealSteps are all the steps, in order.
var resealSteps = []string{
	guestapi.StepEntropy, guestapi.StepClock, guestapi.StepBootID, guestapi.StepMachineID, guestapi.StepHostname,
	guestapi.StepNetwork, guestapi.StepSockets, guestapi.StepTCPMetrics, guestapi.StepConntrack, guestapi.StepTFOKey,
	guestapi.StepWireGuard, guestapi.StepSSHKeys, guestapi.StepDHCP, guestapi.StepRandomSeed, guestapi.StepCA, guestapi.StepDisk,
	guestapi.StepTimers, guestapi.StepJournal, guestapi.StepState, guestapi.StepGeneration, guestapi.StepHooks,
}

// stepFault returns the fault that is armed at a step of the reseal.
func (a *agent) stepFault(r *http.Request, name string) (Kind, error) {
	kind, err := a.c.Reach(r.Context(), ResealStep(name))
	if kind != "" {
		return kind, nil
	}
	return "", err
}

// entropyStep reseeds the random generator and shows draws from it. A lie shows draws from a generator that was not
// reseeded: each clone shows the same.
func (s *agentState) entropyStep(entropy []byte, fault Kind) core.ResealStep {
	step := core.ResealStep{Name: guestapi.StepEntropy, Status: core.ResealOK, Evidence: map[string]string{}}
	if fault == Fail {
		return failedStep(step.Name)
	}
	if fault != Lie {
		s.reseedRandom(entropy)
	}
	for i := range guestapi.EvidenceDraws {
		sum := sha256.Sum256(s.draw())
		step.Evidence[fmt.Sprintf(guestapi.EvidenceDrawKey, i)] = hex.EncodeToString(sum[:16])
	}
	return step
}

func failedStep(name string) core.ResealStep {
	return core.ResealStep{Name: name, Status: core.ResealFailed, Error: "fault injected at " + string(ResealStep(name))}
}

// resealed gives the guest the requested identity and reports the steps. It stops at the first step that fails.
func (s *agentState) resealed(req guestapi.ResealRequest, faults map[string]Kind, received time.Time) core.ResealReport {
	report := core.ResealReport{Generation: req.Identity.Generation, Complete: true, StaleProcesses: []core.StaleProcess{}}
	for _, name := range resealSteps {
		start := time.Now()
		var step core.ResealStep
		switch fault := faults[name]; {
		case name == guestapi.StepEntropy:
			step = s.entropyStep(req.Entropy, fault)
		case fault == Fail:
			step = failedStep(name)
		default:
			step = s.resealStep(name, req)
			if fault == Lie {
				for key := range step.Evidence {
					step.Evidence[key] = "a lie"
				}
			}
		}
		step.DurationMS = core.Milliseconds(time.Since(start))
		report.Steps = append(report.Steps, step)
		if step.Status == core.ResealFailed {
			report.Complete = false
			break
		}
	}
	report.DurationMS = core.Milliseconds(time.Since(received))
	return report
}

func (s *agentState) resealStep(name string, req guestapi.ResealRequest) core.ResealStep {
	step := core.ResealStep{Name: name, Status: core.ResealOK, Evidence: map[string]string{}}
	skip := func(reason string) {
		step.Status = core.ResealSkipped
		step.Evidence[guestapi.EvidenceReason] = reason
	}
	value := func(v string) { step.Evidence[guestapi.EvidenceValue] = v }
	switch name {
	case guestapi.StepClock:
		step.Evidence[guestapi.EvidenceTimeNS] = strconv.FormatInt(req.HostTimeNS, 10)
	case guestapi.StepBootID:
		b := s.draw()
		value(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:16]))
	case guestapi.StepMachineID:
		s.Identity.MachineID = req.Identity.MachineID
		value(s.Identity.MachineID)
	case guestapi.StepHostname:
		s.Identity.Hostname = req.Identity.Hostname
		value(s.Identity.Hostname)
	case guestapi.StepNetwork:
		if req.Identity.MAC == "" && !req.Identity.IP.IsValid() {
			skip("no network was requested")
			break
		}
		s.networkStep(&step, req)
	case guestapi.StepSockets:
		step.Evidence[guestapi.EvidenceDestroyed], step.Evidence[guestapi.EvidenceRemaining] = "0", "0"
	case guestapi.StepTCPMetrics:
	case guestapi.StepTFOKey:
		sum := sha256.Sum256(s.draw())
		step.Evidence[guestapi.EvidenceKeyHash] = hex.EncodeToString(sum[:8])
	case guestapi.StepCA:
		if req.CA == "" {
			skip("none was sent")
			break
		}
		s.Files["/etc/ssl/certs/coppice.pem"] = file{Data: []byte(req.CA), Mode: "0644"}
	case guestapi.StepDisk:
		if !req.GrowDisk {
			skip("not asked for")
			break
		}
		step.Evidence[guestapi.EvidenceDevice] = strconv.FormatInt(req.DiskBytes, 10)
	case guestapi.StepState:
		step.Evidence[guestapi.EvidenceTokenHash] = tokenHash(req.Token)
	case guestapi.StepGeneration:
		s.Identity.Generation = req.Identity.Generation
		value(s.Identity.Generation)
	default:
		skip("a fake guest has none")
	}
	return step
}

func (s *agentState) networkStep(step *core.ResealStep, req guestapi.ResealRequest) {
	mac, err := net.ParseMAC(req.Identity.MAC)
	if err != nil || !req.Identity.IP.IsValid() {
		step.Status, step.Error = core.ResealFailed, "the address is not valid"
		return
	}
	s.Identity.MAC, s.Identity.IP = mac.String(), req.Identity.IP
	gateway, routes := "", "0"
	if req.Network.Gateway.IsValid() {
		gateway, routes = req.Network.Gateway.String(), "1"
	}
	step.Evidence = map[string]string{
		guestapi.EvidenceMAC: mac.String(), guestapi.EvidenceAddresses: netip.PrefixFrom(req.Identity.IP, req.Network.Prefix).String(),
		guestapi.EvidenceGateway: gateway, guestapi.EvidenceRoutes: routes,
	}
}

func tokenHash(token string) string {
	if token == "" {
		return "none"
	}
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:8])
}
