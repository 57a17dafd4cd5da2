package hostcheck

import (
	"context"
	"errors"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm/jail"
)

const checkJail = "jail"

// The cures of the two usual reasons.
const (
	cureChroot = "start it outside of the chroot, or enter the directory with systemd-nspawn"
	cureJail   = "in a container, give it all of /proc (docker: --security-opt systempaths=unconfined), CAP_SYS_ADMIN and CAP_SYS_PTRACE"
)

// jails tries what every VM needs: files of its own.
func jails(ctx context.Context) Result {
	err := jail.Try(ctx)
	if errors.Is(err, jail.ErrChroot) {
		return fail(checkJail, cureChroot, "this program runs in a chroot, where it cannot give VMs files of their own")
	}
	if err != nil {
		return fail(checkJail, cureOf(err, cureJail), "no program can be started with files of its own, as every VM is: %s", cause(err))
	}
	return ok(checkJail, "a program was started with files of its own")
}

// VMs refuses a host on which no VM can be started: where none can have files of its own, or a network and its rules.
func VMs(ctx context.Context) error {
	for _, check := range []Check{jails, settings, tap, rules} {
		if r := check(ctx); r.Status != OK {
			return core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost, "VMs cannot run here: %s; cure: %s", r.Detail, r.Cure)
		}
	}
	return nil
}
