//go:build linux

package reseal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/account"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

const (
	hooksDir    = "/etc/coppice/reseal.d"
	hookTimeout = 5 * time.Second
	hookOutput  = 4 << 10
	resealWrite = 5 * time.Second
)

func noHooks() string {
	if list, err := smallfile.List(hooksDir); err != nil || len(list) > 0 {
		return ""
	}
	return "no hooks in " + hooksDir
}

// stepHooks runs the image's own hooks, in the order of their names, while everything else is frozen. A hook that
// fails, or does not end in time, fails the reseal.
func stepHooks(ctx context.Context, r *Run) (Evidence, error) {
	list, err := smallfile.List(r.sys.hooksDir)
	if err != nil {
		return nil, err
	}
	slices.Sort(list)
	ev := Evidence{}
	for _, name := range list {
		path := filepath.Join(r.sys.hooksDir, name)
		fi, err := os.Stat(path)
		if err != nil || !fi.Mode().IsRegular() || fi.Mode()&0o111 == 0 || strings.HasPrefix(name, ".") {
			continue
		}
		start := time.Now()
		if err := r.hook(ctx, path); err != nil {
			return ev, errors.Join(fmt.Errorf("%s: %w", core.Clip(name), err), r.work.EndHooks())
		}
		ev[core.Clip(name)] = strconv.FormatFloat(core.Milliseconds(time.Since(start)), 'f', 1, 64) + " ms"
	}
	if len(ev) == 0 {
		return nil, skipError("no hooks in " + hooksDir)
	}
	return ev, r.work.EndHooks()
}

// hook runs one program, with the facts that it needs in its environment.
func (r *Run) hook(ctx context.Context, path string) error {
	out, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	cmd := &exec.Cmd{
		Path: path, Args: []string{path}, Dir: "/", Stdout: w, Stderr: w, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
		Env: []string{
			"PATH=" + account.DefaultPath, "HOME=/root", "LANG=C.UTF-8", "COPPICE_GENERATION=" + r.req.Identity.Generation,
			"COPPICE_CHECKPOINT=" + string(r.req.CheckpointID), "COPPICE_HOSTNAME=" + r.req.Identity.Hostname,
			"COPPICE_MACHINE_ID=" + r.req.Identity.MachineID, "COPPICE_IP=" + r.ip(),
		},
	}
	err = r.work.StartHook(cmd)
	_ = w.Close()
	if err != nil {
		return answer.StartError(path, err)
	}
	r.sys.oom(cmd.Process.Pid)
	var said bytes.Buffer
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(&said, io.LimitReader(out, hookOutput))
		_, _ = io.Copy(io.Discard, out)
	}()
	var left error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		left = cmd.Wait()
	}()
	timer := time.NewTimer(r.sys.hookTimeout)
	defer timer.Stop()
	running := true
	select {
	case <-ended:
		err, running = left, false
	case <-timer.C:
		err = fmt.Errorf("it did not end within %s", r.sys.hookTimeout)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if running {
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		<-ended
	}
	if err == nil {
		return nil
	}
	_ = out.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // processes that it left behind may keep the pipe open
	<-read
	return fmt.Errorf("%w: %s", err, core.Clip(strings.TrimSpace(said.String())))
}

func (r *Run) ip() string {
	if !r.req.Identity.IP.IsValid() {
		return ""
	}
	return r.req.Identity.IP.String()
}
