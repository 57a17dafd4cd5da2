// Package hostcheck finds out what a host can do for Coppice by trying it: it loads rules, makes a
// tap, shares extents. A device node or a version string is only a promise and does not count. Each
// finding comes with a way to fix the host. A check leaves nothing behind.
package hostcheck

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Status is the outcome of a check.
type Status string

// The outcomes.
const (
	OK   Status = "ok"
	Warn Status = "warn" // Coppice works, but slower or with less: the detail says with what
	Fail Status = "fail" // `coppice dev` or `coppice runner` cannot run
)

// Result is what a check found.
type Result struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	Cure   string `json:"cure,omitempty"` // what to do about a warn or a fail
}

// Check tries one thing.
type Check func(ctx context.Context) Result

// Config says what to look at.
type Config struct {
	// DataDir is where sandboxes and checkpoints will be; it need not exist yet.
	DataDir string
	// PGBin is a directory with PostgreSQL's programs; empty looks in the usual places.
	PGBin string
	// QEMU is the program; empty looks on the PATH.
	QEMU string
	// KVM boots something under KVM and says whether that worked. With nil the check only says that nobody tried.
	KVM func(ctx context.Context) (detail string, err error)
	// FindCloudHypervisor returns the binary and its version; an error says why it cannot be used. nil leaves the check out.
	FindCloudHypervisor func(ctx context.Context) (path, version string, err error)
	// BootCloudHypervisor boots something under it. With nil the check only says that nobody tried.
	BootCloudHypervisor func(ctx context.Context) (detail string, err error)
	// Choice says which VMM would be used, and why. nil leaves the check out.
	Choice func(ctx context.Context) (vmm, why string, err error)
	// RunnerOnly leaves out what a runner does not need: PostgreSQL, and what builds images.
	RunnerOnly bool
}

// Report is the whole finding.
type Report struct {
	// OK says that `coppice dev` can run on this host, or `coppice runner` if RunnerOnly is set.
	OK     bool     `json:"ok"`
	Checks []Result `json:"checks"`
}

// patience bounds a single check; a boot under KVM has a shorter limit of its own.
const patience = 3 * time.Minute

// Run performs the checks one after another. A cancelled context ends it with the context's error.
func Run(ctx context.Context, checks []Check) (Report, error) {
	report := Report{OK: true}
	for _, check := range checks {
		r := attempt(ctx, check)
		if ctx.Err() != nil {
			return Report{}, context.Cause(ctx)
		}
		report.Checks = append(report.Checks, r)
		report.OK = report.OK && r.Status != Fail
	}
	return report, nil
}

func attempt(ctx context.Context, check Check) Result {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return check(ctx)
}

func ok(name, format string, a ...any) Result {
	return Result{Name: name, Status: OK, Detail: fmt.Sprintf(format, a...)}
}

func warn(name, cure, format string, a ...any) Result {
	return Result{Name: name, Status: Warn, Detail: fmt.Sprintf(format, a...), Cure: cure}
}

func fail(name, cure, format string, a ...any) Result {
	return Result{Name: name, Status: Fail, Detail: fmt.Sprintf(format, a...), Cure: cure}
}

// gib writes a number of bytes for people.
func gib(bytes uint64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)) }

// cause is the text of an error with what is behind it: who looks at a host may see it all.
func cause(err error) string {
	if own, ok := errors.AsType[*core.Error](err); ok { // it has a cure at its end
		return own.Msg
	}
	return core.Clip(err.Error())
}
