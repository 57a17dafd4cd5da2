//go:build linux

// Command coppice-guest is our only program inside a guest. As PID 1 it is the /init of the initrd
// (package boot). It starts itself again as the agent (package guestagent) and, for the workload,
// as a small init in its own namespaces.
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

const (
	name      = "coppice-guest"
	agentMode = "agent"
)

func init() {
	// The workload's init must do its work on the main thread.
	runtime.LockOSThread()
}

func main() {
	mode := ""
	if len(os.Args) > 1 {
		mode = os.Args[1]
	}
	switch {
	case mode == workload.NothingMode:
	case mode == workload.InitMode:
		exit(workload.RunInit())
	case os.Getpid() == 1:
		runtime.UnlockOSThread()
		boot.Main([]string{name, agentMode})
	case mode == agentMode:
		// The main thread stays locked to this goroutine, which only waits: others join the workload's namespaces, and the main
		// thread's are what the whole process is seen in.
		done := make(chan error)
		go func() { done <- agent() }()
		exit(<-done)
	default:
		fmt.Fprintf(os.Stderr, "%s runs inside a Coppice guest: as its PID 1, or as %q\n", name, name+" "+agentMode)
		os.Exit(2)
	}
}

func agent() error {
	// One processor is enough, and each further one has caches of its own, which are pages of every fork.
	runtime.GOMAXPROCS(min(2, runtime.NumCPU()))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	return guestagent.Run(ctx, guestagent.Config{Logger: log})
}

func exit(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
	os.Exit(0)
}
