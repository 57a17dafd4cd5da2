package e2e

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/daemon"
)

var long = flag.Bool("long", false, "run the long sweeps: the 64-generation tree, every runtime, every fault at every place, several hosts, a second cluster")

// What the servers of most tests are told. Empty leaves it to them.
var (
	accel   = flag.String("accel", "", "the accelerator: tcg or kvm")
	vmmName = flag.String("vmm", "", "the VMM: qemu or cloud-hypervisor")
)

func TestMain(m *testing.M) {
	daemon.EnterConfined()
	flag.Parse()
	status := m.Run()
	for _, fault := range closeShared() {
		fmt.Fprintln(os.Stderr, "e2e: after the last test:", fault)
		status = 1
	}
	os.Exit(status)
}

// closeShared stops the shared server and returns what was wrong with that.
func closeShared() []string {
	defer cleanBuilds()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.stack == nil {
		return nil
	}
	defer func() { _ = os.RemoveAll(shared.stack.dir) }()
	var faults []string
	if err := shared.stack.interrupt(); err != nil {
		faults = append(faults, err.Error())
	}
	return append(faults, shared.stack.remains()...)
}
