package draws

import (
	"fmt"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

func TestDraws(t *testing.T) {
	t.Parallel()
	shown := func(fork, from int) []core.ResealStep {
		e := map[string]string{}
		for i := range guestapi.EvidenceDraws {
			e[fmt.Sprintf(guestapi.EvidenceDrawKey, i)] = fmt.Sprintf("%d/%d", fork, from+i)
		}
		return []core.ResealStep{{Name: guestapi.StepClock}, {Name: guestapi.StepEntropy, Evidence: e}}
	}
	var d Draws
	const forks = 5000 // more than are kept
	for fork := range forks {
		if err := d.Add(shown(fork, 0)); err != nil {
			t.Fatalf("fork %d: %v", fork, err)
		}
		if err := d.Add(shown(fork, guestapi.EvidenceDraws-1)); core.CodeOf(err) != core.CodeResealFailed {
			t.Fatalf("a fork that shows one number of fork %d: %v", fork, err)
		}
	}
	if len(d.seen) > kept {
		t.Errorf("%d draws are kept, want at most %d", len(d.seen), kept)
	}
	if err := d.Add(shown(0, 0)); err != nil {
		t.Errorf("what was long forgotten: %v", err)
	}
}
