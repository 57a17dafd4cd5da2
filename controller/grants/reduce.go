package grants

import (
	"encoding/json"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// shrink bounds the rules of each workspace by the bytes that can be sent to a host. Admitted rules are within the bound (grant.MaxBundle,
// policy.MaxBytes); older rows may exceed it. With lenient set it reduces these, if need be to no rules at all: removed entries must not stay
// in force because the other entries are too large.
func shrink(list []Workspace, out []Bundle, lenient bool) error {
	for i, w := range list {
		for _, less := range append([]runnerapi.EgressRules{out[i].Rules}, out[i].Rules.Lesser()...) {
			text, err := json.Marshal(less)
			if err != nil {
				return err
			}
			if len(text) <= runnerapi.MaxEgressRules {
				out[i].Rules = less
				break
			}
			err = core.Errorf(core.FailedPrecondition, core.CodeGrantsTooLarge,
				"the rules of workspace %s take %d bytes with its grants, and at most %d can be sent to its host; revoke a grant, or allow less", w.ID, len(text), runnerapi.MaxEgressRules)
			if !lenient {
				return err
			}
			out[i].less = err
		}
	}
	return nil
}
