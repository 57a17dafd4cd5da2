//go:build chaos

package e2e

import (
	"testing"
	"time"
)

// TestChaos lets searches grow trees while nemeses kill, stop and cut off the servers, their database, virtual machines and guest agents.
// Each search knows what it was told and what it was not. In the end all heals, within a bounded time, and every acknowledged checkpoint
// and every machine is looked into: it has the state that its history says, in process memory, in an unnamed file and on the disk. What
// the system itself recorded of all changes must be a history that is allowed. Then everything is taken down and nothing is left
// on the host.
func TestChaos(t *testing.T) {
	kinds := map[string]func(*testing.T, *chaos) *deployment{"dev": deployDev, "split": deploySplit}
	names := []string{*chaosDeploy}
	if *chaosDeploy == "all" {
		names = []string{"dev", "split"}
	}
	for _, name := range names {
		deploy, ok := kinds[name]
		if !ok {
			t.Fatalf("there is no deployment %q", name)
		}
		t.Run(name, func(t *testing.T) { runChaos(t, name, *chaosFor/time.Duration(len(names)), deploy) })
	}
}
