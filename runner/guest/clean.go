package guest

import (
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// Bounds on what is kept of an answer.
const (
	maxSteps     = 64
	maxEvidence  = 48
	maxProcesses = 256
	maxWorkload  = 1024
	maxFeatures  = 64
)

func cleanHealth(h guestapi.Health) guestapi.Health {
	h.BootNonce, h.Generation, h.CaptureID, h.Kernel = core.Clip(h.BootNonce), core.Clip(h.Generation), core.Clip(h.CaptureID), core.Clip(h.Kernel)
	h.Features = h.Features[:min(len(h.Features), maxFeatures)]
	for i, f := range h.Features {
		h.Features[i] = core.Clip(f)
	}
	h.State = guestapi.State(core.Clip(string(h.State)))
	return h
}

func cleanSteps(steps []core.ResealStep) []core.ResealStep {
	steps = steps[:min(len(steps), maxSteps)]
	for i := range steps {
		s := &steps[i]
		s.Name, s.Error, s.Status = core.Clip(s.Name), core.Clip(s.Error), core.ResealStatus(core.Clip(string(s.Status)))
		clean := make(map[string]string, min(len(s.Evidence), maxEvidence))
		for k, v := range s.Evidence {
			if len(clean) == maxEvidence {
				break
			}
			clean[core.Clip(k)] = core.Clip(v)
		}
		s.Evidence = clean
	}
	return steps
}

func cleanProcesses(list []core.StaleProcess) []core.StaleProcess {
	list = list[:min(len(list), maxProcesses)]
	for i := range list {
		list[i].Command, list[i].Runtime = core.Clip(list[i].Command), core.Clip(list[i].Runtime)
	}
	return list
}

func cleanWorkload(list []core.WorkloadProcess) []core.WorkloadProcess {
	list = list[:min(len(list), maxWorkload)]
	for i := range list {
		list[i].Command, list[i].Args = core.Clip(list[i].Command), core.Clip(list[i].Args)
	}
	return list
}
