// Package vmmtest is the suite that every implementation of the contract in package vmm passes, the real ones and the
// fake.
//
// It boots one machine, captures it, and makes all its machines from that capture, like a runner: with a private
// mapping of a base, a delta that is written from outside, and device state. The guest keeps its state in its memory
// and on its disk, and answers over the agent's channel in the protocol of package line.
package vmmtest

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/runner/vmm"
)

// Fixture is a driver to test.
type Fixture struct {
	Driver vmm.Driver

	// The paths of the files for a cold boot. The machine must run package line as its guest program. Empty for a
	// driver that boots without them.
	Kernel, Initrd string
	CommandLine    string

	MemoryMiB int
	UID       uint32 // of the VMMs; 0 for the test's own
	// Crash ends a machine's VMM from outside, as an out-of-memory kill would. nil kills the process of its handle.
	Crash func(t *testing.T, m vmm.Machine)
}

// Patience is the time for anything that is not measured here: the machine may be emulated on a busy host.
const Patience = time.Minute

// prompt is the time for a call that must not wait for the guest.
const prompt = 10 * time.Second

// Run runs the suite. It calls fixture once.
func Run(t *testing.T, fixture func(t *testing.T) Fixture) {
	t.Helper()
	f := fixture(t)
	if f.Crash == nil {
		f.Crash = killProcess
	}
	w := newWorld(t, f)
	t.Run("contract", func(t *testing.T) {
		for _, c := range []struct {
			name string
			test func(t *testing.T, w *world)
		}{
			{"Fingerprint", testFingerprint},
			{"SpawnedStates", testSpawnedStates},
			{"WaitingStates", testWaitingStates},
			{"FailedInjection", testFailedInjection},
			{"DamagedState", testDamagedState},
			{"SpawnRefused", testSpawnRefused},
			{"SpawnCancelled", testSpawnCancelled},
			{"OutlivesContext", testOutlivesContext},
			{"CommandCancelled", testCommandCancelled},
			{"PauseStops", testPauseStops},
			{"Stop", testStop},
			{"SaveStateFails", testSaveStateFails},
			{"Region", testRegion},
			{"ForkEquals", testForkEquals},
			{"Isolation", testIsolation},
			{"ClockGoesOn", testClockGoesOn},
			{"Generations", testGenerations},
			{"ForksAtOnce", testForksAtOnce},
			{"ResizeDisk", testResizeDisk},
			{"Reconnect", testReconnect},
			{"OneConnection", testOneConnection},
			{"Babble", testBabble},
			{"HangUpWhilePaused", testHangUpWhilePaused},
			{"ConsoleFlood", testConsoleFlood},
			{"Kill", testKill},
			{"Crash", testCrash},
			{"PowerOff", testPowerOff},
			{"GuestPanic", testGuestPanic},
			{"RecoverRunning", testRecoverRunning},
			{"RecoverPaused", testRecoverPaused},
			{"RecoverWaiting", testRecoverWaiting},
			{"RecoverGone", testRecoverGone},
			{"EndAndReap", testEndAndReap},
		} {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				c.test(t, w)
			})
		}
	})
	t.Run("BaseUnchanged", func(t *testing.T) { //nolint:paralleltest // after all the others
		if got := digest(t, w.template.base.File()); got != w.baseDigest {
			t.Errorf("the base has the digest %s after the tests, and had %s", got, w.baseDigest)
		}
	})
}

// killProcess is Crash for a VMM that is a process.
func killProcess(t *testing.T, m vmm.Machine) {
	t.Helper()
	pid := m.Handle().PID
	if pid <= 1 || pid == os.Getpid() {
		t.Fatalf("the handle has the pid %d", pid)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}
