// Package draws remembers the random numbers that guests have drawn and reported. If two guests report the same numbers, one of them was not
// reseeded, whatever its kernel answered. Each guest looks right by itself, so only this comparison finds the fault before the release.
package draws

import (
	"fmt"
	"sync"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// Draws are the numbers, as hashes. The zero value is ready for use. It is safe for concurrent use.
type Draws struct {
	mu   sync.Mutex // guards what follows
	seen map[string]bool
	ring [kept]string
	next int
}

// kept bounds the memory: the draws of the last 4096 forks, some 6 MB.
const kept = 4096 * guestapi.EvidenceDraws

// Add checks the entropy step of a reseal and remembers it.
func (d *Draws) Add(steps []core.ResealStep) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.seen == nil {
		d.seen = make(map[string]bool)
	}
	var twice bool
	for _, s := range steps {
		if s.Name != guestapi.StepEntropy {
			continue
		}
		for i := range guestapi.EvidenceDraws {
			draw := s.Evidence[fmt.Sprintf(guestapi.EvidenceDrawKey, i)]
			if twice = twice || d.seen[draw]; d.seen[draw] {
				continue
			}
			delete(d.seen, d.ring[d.next])
			d.ring[d.next], d.seen[draw] = draw, true
			d.next = (d.next + 1) % kept
		}
	}
	if twice {
		return core.Errorf(core.FailedPrecondition, core.CodeResealFailed,
			"the sandbox was not resealed: step %s: it has the same random numbers as another sandbox: the guest's kernel does not reseed itself", guestapi.StepEntropy)
	}
	return nil
}
