package vmmproc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// ProbeWord on the kernel's command line makes a guest print ProbeOK on its console and then power off.
const ProbeWord = "coppice.probe=1"

// ProbeOK is the text that such a guest prints.
const ProbeOK = "COPPICE_PROBE_OK"

// Probe starts a VMM whose guest should print ProbeOK on the VMM's standard output, waits for that, and ends the VMM.
// It takes at most the timeout, and leaves no process. Its error is for people.
func Probe(ctx context.Context, c Command, timeout time.Duration) (err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	c.Log = write
	proc, err := Start(c)
	_ = write.Close() // the VMM has its own copy
	if err != nil {
		return err
	}
	console := &probeConsole{Tail: vmm.NewTail(logBytes), seen: make(chan struct{})}
	var reader sync.WaitGroup
	reader.Go(func() { console.follow(read) })
	defer reader.Wait()
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), CommandTime)
		defer cancel()
		err = errors.Join(err, proc.Kill(clean))
		_ = read.SetReadDeadline(time.Now().Add(logDrain)) // a process that cannot be killed must not hold the reader
	}()
	select {
	case <-console.seen:
		return nil
	case <-proc.Done():
		_ = read.SetReadDeadline(time.Now().Add(logDrain)) // see above
		reader.Wait()
		if console.ok() {
			return nil
		}
		status, _ := proc.Status()
		return fmt.Errorf("%s ended with %s before a guest kernel had booted; %s", filepath.Base(c.Path), status, console.end())
	case <-ctx.Done():
		if context.Cause(ctx) != context.DeadlineExceeded { //nolint:errorlint // ours, not wrapped
			return fmt.Errorf("given up: %w", context.Cause(ctx))
		}
		return fmt.Errorf("a guest kernel did not boot within %s; %s", timeout, console.end())
	}
}

// probeConsole searches the output for ProbeOK.
type probeConsole struct {
	*vmm.Tail
	seen chan struct{} // closed when it was said
}

func (c *probeConsole) ok() bool { return strings.Contains(c.String(), ProbeOK) }

func (c *probeConsole) follow(r *os.File) {
	buf := make([]byte, 4096)
	for said := false; ; {
		n, err := r.Read(buf)
		_, _ = c.Write(buf[:n]) // never fails
		if !said && c.ok() {
			said = true
			close(c.seen)
		}
		if err != nil {
			return
		}
	}
}

// end returns the last output of the VMM and of the guest's console, for people.
func (c *probeConsole) end() string {
	said := strings.TrimSpace(c.String())
	if said == "" {
		return "it said nothing"
	}
	lines := strings.Split(said, "\n")
	return fmt.Sprintf("it said last: %q", core.Clip(strings.Join(lines[max(0, len(lines)-2):], " / ")))
}
