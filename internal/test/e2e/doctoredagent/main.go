//go:build linux

// Command doctoredagent is the guest agent of a test image: the real one, under a kernel or in a mouth that lies. It does what
// coppice-guest does until a reseal asks for the environment variable COPPICE_FAULT; then it does that fault:
//
//	deaf-kernel         the ioctls that reseed the kernel's generator succeed and do nothing
//	forged-draws        the same, and the evidence is made up from the host's entropy, so that no two forks show the same
//	no-reseed           RNDRESEEDCRNG is not permitted, as without CAP_SYS_ADMIN
//	deaf-hostname       sethostname succeeds and does nothing
//	killed              the process is killed at RNDRESEEDCRNG
//	exit                it ends instead of answering
//	hang                it never answers
//	replay              it asks itself for the same reseal once more, and answers what came of that
//	silent:STEP         STEP is reported without evidence
//	missing:STEP        STEP is not reported
//	skipped:STEP        STEP is reported as skipped
//	same-draws          every draw of the evidence is the same
//	other-generation    the report is for another generation
//	error               it answers with a problem
//	flood               it answers without end
//	no-release          the reseal is fine and the release is refused
//	answers:KIND:STAGE  from then on the answers of a stage are bad: see badAnswers
//
// Faults of the kernel are seccomp filters, so the agent's own code runs as it is.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/coppice-dev/coppice/guestagent"
	"github.com/coppice-dev/coppice/guestagent/boot"
	"github.com/coppice-dev/coppice/guestagent/workload"
)

const agentMode = "agent"

func init() {
	// The workload's init must do its work on the main thread.
	runtime.LockOSThread()
}

// main is that of coppice-guest.
func main() {
	mode := ""
	if len(os.Args) > 1 {
		mode = os.Args[1]
	}
	var err error
	switch {
	case mode == workload.InitMode:
		err = workload.RunInit()
	case os.Getpid() == 1:
		runtime.UnlockOSThread()
		boot.Main([]string{"doctoredagent", agentMode})
	case mode == agentMode:
		runtime.UnlockOSThread()
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		err = guestagent.Run(ctx, guestagent.Config{Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)), Wrap: wrap})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "doctoredagent:", err)
		os.Exit(1)
	}
}
