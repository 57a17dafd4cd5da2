package hostcheck

import (
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// The checks of what keeps guests apart from each other and from the host. Their names are the values of --allow-weak-host.
const (
	checkCgroups = "cgroup-v2"
	checkSwap    = "swap"
	checkKSM     = "ksm"
	checkCPU     = "cpu"
	checkSMT     = "smt"
)

// IsolationNames are the names of all checks of isolation.
func IsolationNames() []string {
	return []string{checkCgroups, checkSwap, checkKSM, checkCPU, checkSMT}
}

// Judge sorts the findings of Isolation that are not good into those that the operator allows by name and an error about the others:
// a runner must not start with them.
func Judge(results []Result, allowed []string) (weak []Result, err error) {
	for _, name := range allowed {
		if !slices.Contains(IsolationNames(), name) {
			return nil, core.Errorf(core.Invalid, core.CodeInvalidField,
				"--allow-weak-host: there is no check %q; the checks are %s", core.Clip(name), strings.Join(IsolationNames(), ", "))
		}
	}
	var refused, names []string
	for _, r := range results {
		switch {
		case r.Status == OK:
		case slices.Contains(allowed, r.Name):
			weak = append(weak, r)
		default:
			names = append(names, r.Name)
			refused = append(refused, r.Name+": "+r.Detail+" (cure: "+r.Cure+")")
		}
	}
	if len(refused) > 0 {
		return weak, core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost,
			"this host isolates guests weakly: %s; apply the cures, or start with --allow-weak-host=%s if all guests trust each other",
			strings.Join(refused, "; "), strings.Join(names, ","))
	}
	return weak, nil
}
