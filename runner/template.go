package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/hostlimit"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// Template makes the template checkpoint of an image and shape. It boots the image once and captures it when its agent is ready. The
// memory becomes the base of everything that descends from the template. This takes as long as a boot.
func (r *Runner) Template(ctx context.Context, req runnerapi.Template) (runnerapi.Checkpoint, error) {
	return r.checkpoints.Once(ctx, req.CheckpointID, r.counted(func() (*checkpoints.Record, error) {
		img, err := r.cfg.Images.Get(string(req.Image))
		if err != nil {
			return nil, err
		}
		if err := r.cfg.Images.Verify(ctx, img); err != nil {
			return nil, err
		}
		defer r.roots.Hold()()
		if err := r.roots.Keep(img); err != nil {
			return nil, hostlimit.Explain(err, "the image could not be kept")
		}
		rec, err := r.bootTemplate(context.WithoutCancel(ctx), img, req)
		if err != nil {
			return nil, hostlimit.Explain(fmt.Errorf("boot image %s: %w", img.Digest.Short(), err), "the image could not be booted")
		}
		return rec, nil
	}))
}

func (r *Runner) bootTemplate(ctx context.Context, img images.Image, req runnerapi.Template) (_ *checkpoints.Record, err error) {
	watch := core.NewStopwatch()
	zero, err := r.bases.Zero(int64(req.Resources.MemoryMiB) << 20)
	if err != nil {
		return nil, err
	}
	defer zero.Close()
	b, err := openBoot(img)
	if err != nil {
		return nil, err
	}
	defer b.close()
	size, err := b.overlayTemplate.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	sh, err := r.neededShell(ctx, shape{image: img.Digest, resources: req.Resources, diskBytes: size}, zero, b)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.dismantle(ctx, sh)) }()
	watch.Lap("spawn")
	agent, err := r.bootShell(ctx, sh)
	if err != nil {
		return nil, err
	}
	defer agent.Close()
	watch.Lap("boot")
	if err := warmUp(ctx, agent); err != nil {
		return nil, err
	}
	watch.Lap("warm_up")
	c, err := r.prepareCapture(ctx, sh, agent, req.CheckpointID)
	if err != nil {
		return nil, err
	}
	defer c.close()
	c.watch = watch
	rec, err := r.captureTemplate(ctx, sh, agent, c, req)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(c.dir))
	}
	return rec, nil
}

func (r *Runner) captureTemplate(ctx context.Context, sh *shell, agent *guest.Client, c *capture, req runnerapi.Template) (*checkpoints.Record, error) {
	frozen, err := agent.Quiesce(ctx, r.quiesceRequest(req.CheckpointID, c))
	if err != nil {
		return nil, err
	}
	c.survey = checkpoints.SurveyOf(frozen)
	c.watch.Lap("freeze")
	if err := c.take(ctx, sh); err != nil {
		return nil, err
	}
	rec := &checkpoints.Record{Checkpoint: runnerapi.Checkpoint{
		ID: req.CheckpointID, Image: sh.shape.image, Class: sh.Class, Resources: req.Resources, Processes: frozen.StaleProcesses,
	}}
	rec.Resources.DiskGiB = int(sh.shape.diskBytes >> 30)
	release := r.checkpoints.HoldBases()
	return rec, errors.Join(r.publishTemplate(ctx, sh, c, rec), release())
}

// publishTemplate writes the new base, and publishes the checkpoint when everything of it is durable. Meanwhile no base is removed.
func (r *Runner) publishTemplate(ctx context.Context, sh *shell, c *capture, rec *checkpoints.Record) error {
	err := c.durable(func() error {
		base, err := r.bases.Rebase(sh.base, c.memory.Delta())
		if err != nil {
			return err
		}
		rec.Base = base.ID
		return errors.Join(base.Close(), templateAfterBase.Hit(ctx))
	})
	if err != nil {
		return err
	}
	return c.describe(r.checkpoints, rec)
}

// bootShell lets the kernel run and waits for the agent.
func (r *Runner) bootShell(ctx context.Context, sh *shell) (*guest.Client, error) {
	if err := sh.machine.Boot(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.BootTimeout)
	defer cancel()
	ctx, dead := context.WithCancelCause(ctx)
	defer dead(nil)
	go func() {
		select {
		case <-sh.machine.Done():
			exit := sh.machine.Exit()
			dead(core.Errorf(core.Unavailable, core.CodeVMMFailed, "%s", exit.Describe()))
		case <-r.runCtx.Done():
			dead(errStopping)
		case <-ctx.Done():
		}
	}()
	agent, err := guest.Dial(ctx, sh.machine.DialAgent)
	if err != nil {
		return nil, errors.Join(vmm.WithConsole(err, sh.machine), context.Cause(ctx))
	}
	return agent, nil
}

// warmUp runs one command. After it no fork has to be the first to read a shell and its libraries from the disk, and an image in which no
// command can run never becomes a template.
func warmUp(ctx context.Context, agent *guest.Client) error {
	body := `{"command":["/bin/sh","-c","exit 0"],"cwd":"/"}`
	var s guestapi.Session
	if err := askGuest(ctx, agent, http.MethodPost, guestapi.PathSessions, body, &s); err != nil {
		return err
	}
	wait := strings.Replace(guestapi.PathSessionWait, "{id}", string(s.ID), 1) + "?timeout_ms=60000"
	if err := askGuest(ctx, agent, http.MethodGet, wait, "", &s); err != nil {
		return err
	}
	if s.ExitCode == nil || *s.ExitCode != 0 {
		return core.Errorf(core.FailedPrecondition, core.CodeGuestProtocol, "the image cannot run /bin/sh")
	}
	return askGuest(ctx, agent, http.MethodDelete, strings.Replace(guestapi.PathSession, "{id}", string(s.ID), 1), "", nil)
}

func askGuest(ctx context.Context, agent *guest.Client, method, path, body string, into any) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := agent.Transport().RoundTrip(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode >= http.StatusBadRequest {
		b, err := io.ReadAll(io.LimitReader(res.Body, 4<<10))
		if err != nil {
			return err
		}
		return core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest agent answered %d to %s %s: %s", res.StatusCode, method, path, core.Clip(string(b)))
	}
	if into == nil {
		return nil
	}
	return guest.Decode(res.Body, into)
}

// openBoot opens the files that a cold boot reads.
func openBoot(img images.Image) (_ *boot, err error) {
	b := &boot{commandLine: img.CommandLine}
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	for _, f := range []struct {
		to   **os.File
		path string
	}{{&b.kernel, img.Kernel}, {&b.initrd, img.Initrd}, {&b.overlayTemplate, img.Overlay}} {
		if *f.to, err = os.Open(f.path); err != nil {
			return nil, fmt.Errorf("open a file of image %s: %w", img.Digest.Short(), err)
		}
	}
	return b, nil
}

func (b *boot) close() {
	for _, f := range []*os.File{b.kernel, b.initrd, b.overlayTemplate} {
		if f != nil {
			_ = f.Close() // only read
		}
	}
}
