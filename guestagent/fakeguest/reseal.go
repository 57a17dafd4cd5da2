package fakeguest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
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

// resealed gives the guest the requested identity and reports the steps. It stops at the first step that fails.
func (s *State) resealed(req guestapi.ResealRequest, faults map[string]error) core.ResealReport {
	report := core.ResealReport{Generation: req.Identity.Generation, Complete: true, StaleProcesses: []core.StaleProcess{}}
	for _, name := range resealSteps {
		step := s.step(name, req, faults[name])
		report.Steps = append(report.Steps, step)
		if step.Status == core.ResealFailed {
			report.Complete = false
			break
		}
	}
	return report
}

// step does one step of a reseal, unless it has a fault.
func (s *State) step(name string, req guestapi.ResealRequest, fault error) core.ResealStep {
	start := time.Now()
	step := core.ResealStep{Name: name, Status: core.ResealOK, Evidence: map[string]string{}}
	lie := errors.Is(fault, ErrLie)
	switch {
	case fault != nil && !lie:
		return core.ResealStep{Name: name, Status: core.ResealFailed, Error: fault.Error()}
	case name == guestapi.StepEntropy:
		if !lie { // a lie shows draws from a generator that was not reseeded: each clone shows the same
			s.reseedRandom(req.Entropy)
		}
		for i := range guestapi.EvidenceDraws {
			sum := sha256.Sum256(s.draw())
			step.Evidence[fmt.Sprintf(guestapi.EvidenceDrawKey, i)] = hex.EncodeToString(sum[:16])
		}
	default:
		s.change(&step, req)
		for key := range step.Evidence {
			if lie {
				step.Evidence[key] = "a lie"
			}
		}
	}
	step.DurationMS = core.Milliseconds(time.Since(start))
	return step
}

const hosts = "/etc/hosts"

// identityFiles reports the files with the identity. A file that no program has written is the reseal's own, and not among the files.
func (s *State) identityFiles() []guestapi.IdentityFile {
	if slices.Contains(s.Lacks, LacksIdentityFiles) {
		return nil
	}
	out := []guestapi.IdentityFile{}
	for _, path := range guestapi.IdentityPaths() {
		f, written := s.Files[path]
		one := guestapi.IdentityFile{Path: path, Size: int64(len(f.Data)), Own: !written}
		if written {
			data := f.Data
			if path == hosts && s.Hostname != "" {
				data = bytes.ReplaceAll(data, []byte(s.Hostname), []byte("this-machine"))
			}
			sum := sha256.Sum256(data)
			one.SHA256 = hex.EncodeToString(sum[:])
		}
		out = append(out, one)
	}
	return out
}

// change does the work of a step other than that with the entropy.
func (s *State) change(step *core.ResealStep, req guestapi.ResealRequest) {
	skip := func(reason string) {
		step.Status = core.ResealSkipped
		step.Evidence[guestapi.EvidenceReason] = reason
	}
	value := func(v string) { step.Evidence[guestapi.EvidenceValue] = v }
	switch step.Name {
	case guestapi.StepClock:
		step.Evidence[guestapi.EvidenceTimeNS] = strconv.FormatInt(req.HostTimeNS, 10)
	case guestapi.StepBootID:
		b := s.draw()
		value(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:16]))
	case guestapi.StepMachineID:
		value(req.Identity.MachineID)
		delete(s.Files, "/etc/machine-id")
	case guestapi.StepHostname:
		value(req.Identity.Hostname)
		delete(s.Files, "/etc/hostname")
		if f, ok := s.Files[hosts]; ok && s.Hostname != "" {
			f.Data = bytes.ReplaceAll(f.Data, []byte(s.Hostname), []byte(req.Identity.Hostname))
			s.Files[hosts] = f
		}
		s.Hostname = req.Identity.Hostname
	case guestapi.StepNetwork:
		if req.Identity.MAC == "" && !req.Identity.IP.IsValid() {
			skip("no network was requested")
			break
		}
		setNetwork(step, req)
		if len(req.Network.DNS) > 0 {
			delete(s.Files, "/etc/resolv.conf")
		}
	case guestapi.StepSockets:
		step.Evidence[guestapi.EvidenceDestroyed], step.Evidence[guestapi.EvidenceRemaining] = "0", "0"
	case guestapi.StepTCPMetrics:
	case guestapi.StepTFOKey:
		step.Evidence[guestapi.EvidenceKeyHash] = shortHash(s.draw())
	case guestapi.StepCA:
		if req.CA == "" {
			skip("none was sent")
			break
		}
		s.Files["/etc/ssl/certs/coppice.pem"] = File{Data: []byte(req.CA)}
	case guestapi.StepDisk:
		if !req.GrowDisk {
			skip("not asked for")
			break
		}
		step.Evidence[guestapi.EvidenceDevice] = strconv.FormatInt(req.DiskBytes, 10)
	case guestapi.StepState:
		step.Evidence[guestapi.EvidenceTokenHash] = "none"
		if req.Token != "" {
			step.Evidence[guestapi.EvidenceTokenHash] = shortHash([]byte(req.Token))
		}
	case guestapi.StepGeneration:
		value(s.Generation)
	default:
		skip("a fake guest has none")
	}
}

func setNetwork(step *core.ResealStep, req guestapi.ResealRequest) {
	mac, err := net.ParseMAC(req.Identity.MAC)
	if err != nil || !req.Identity.IP.IsValid() {
		step.Status, step.Error = core.ResealFailed, "the address is not valid"
		return
	}
	gateway, routes := "", "0"
	if req.Network.Gateway.IsValid() {
		gateway, routes = req.Network.Gateway.String(), "1"
	}
	step.Evidence = map[string]string{
		guestapi.EvidenceMAC: mac.String(), guestapi.EvidenceAddresses: netip.PrefixFrom(req.Identity.IP, req.Network.Prefix).String(),
		guestapi.EvidenceGateway: gateway, guestapi.EvidenceRoutes: routes,
	}
}

func shortHash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}
