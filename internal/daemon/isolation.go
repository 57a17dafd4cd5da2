package daemon

import (
	"context"
	"path/filepath"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/hostcheck"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/cgroup"
	"github.com/coppice-dev/coppice/runner/journal"
)

// judge decides whether VMs may run on this host: what weakens their isolation is refused, unless it is allowed by name or VMs run here
// already, which somebody must watch over. It is said in the log, in the metrics and by the runner.
func (h *Host) judge(ctx context.Context, cfg HostConfig, groups *cgroup.Tree, rc *runner.Config) error {
	found, err := hostcheck.Isolation(ctx, groups.Controllers())
	if err != nil {
		return err
	}
	allowed := cfg.AllowWeak
	if cfg.WarnWeak {
		allowed = hostcheck.IsolationNames()
	}
	weak, err := hostcheck.Judge(found, allowed)
	showIsolation(cfg.Registry, found, groups)
	if core.CodeOf(err) == core.CodeIncompatibleHost && journal.Inhabited(filepath.Join(h.RunDir, vmDir)) {
		cfg.Log.WarnContext(ctx, "the runner starts on a host that it would refuse, for sandboxes run here already: without them it does not start again", "err", err)
		weak, err = hostcheck.Judge(found, hostcheck.IsolationNames())
	}
	if err != nil {
		return err
	}
	for _, w := range weak {
		rc.Weak = append(rc.Weak, w.Name)
		h.Weak = append(h.Weak, w.Name+": "+w.Detail)
		cfg.Log.WarnContext(ctx, "this host isolates guests weakly", "check", w.Name, "found", w.Detail, "cure", w.Cure)
	}
	rc.Limits = cfg.Limits
	if (cfg.Limits.IOBytes > 0 || cfg.Limits.IOPS > 0) && slices.Contains(groups.Controllers(), "io") {
		return groups.LimitDevice(rc.DataDir)
	}
	return nil
}

// showIsolation registers the findings as metrics. A nil registerer gets none.
func showIsolation(to prometheus.Registerer, found []hostcheck.Result, groups *cgroup.Tree) {
	if to == nil {
		return
	}
	weak := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "coppice_runner_host_weak", Help: "Whether a check found that this host isolates guests weakly.",
	}, []string{"check"})
	for _, r := range found {
		value := 0.0
		if r.Status != hostcheck.OK {
			value = 1
		}
		weak.WithLabelValues(r.Name).Set(value)
	}
	controllers := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "coppice_runner_cgroup_controller", Help: "Whether the host limits virtual machines with this cgroup controller.",
	}, []string{"controller"})
	for _, c := range groups.Controllers() {
		controllers.WithLabelValues(c).Set(1)
	}
	for _, c := range groups.Missing() {
		controllers.WithLabelValues(c).Set(0)
	}
	to.MustRegister(weak, controllers)
}
