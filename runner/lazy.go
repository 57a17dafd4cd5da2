package runner

import (
	"context"
	"os"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/lazy"
)

// openLazy opens the images that an earlier runner has begun to fetch.
func openLazy(r *Runner) (*lazy.Images, error) {
	return lazy.Open(r.runCtx, lazy.Config{
		DataDir: r.cfg.DataDir, Pager: r.cfg.Store.Pager, Whole: r.cfg.Store.Whole, Room: r.room, Keys: &r.keys, Log: r.cfg.Log, Host: lazyHost{r},
	})
}

// lazyHost implements lazy.Host.
type lazyHost struct{ r *Runner }

var _ lazy.Host = lazyHost{}

// OpenBase implements lazy.Host.
func (h lazyHost) OpenBase(id core.BaseID) (*os.File, error) { return h.r.bases.OpenFile(id) }

// ImageArrived implements lazy.Host: a checkpoint that lacked the image can be uploaded.
func (h lazyHost) ImageArrived() { h.r.seals.arrived() }

// EndMachines implements lazy.Host.
func (h lazyHost) EndMachines(ctx context.Context, why string, match func(lazy.Machine) bool) {
	for _, s := range h.r.all() {
		if !match(s.lazyMachine()) {
			continue
		}
		h.r.cfg.Log.ErrorContext(ctx, "sandbox is ended", "sandbox_id", s.info.ID, "reason", why)
		if err := s.end(ctx, why); err != nil {
			h.r.cfg.Log.ErrorContext(ctx, "sandbox was not ended", "sandbox_id", s.info.ID, "err", err)
		}
	}
}

// PagerEnded implements lazy.Host: it drops open bases and warm shells that have memory from the pager.
func (h lazyHost) PagerEnded(ctx context.Context, instance string) {
	h.r.bases.ForgetArriving()
	h.r.warm.purge(ctx, func(s *shell) bool { return s.Pager == instance })
}

// lazyMachine says which images the sandbox's machine uses.
func (s *sandbox) lazyMachine() lazy.Machine {
	return lazy.Machine{ID: s.info.ID, Pager: s.Pager, Base: s.shape.base, Root: string(s.shape.rootKey())}
}

// imageIDs are the images that a checkpoint needs besides its own directory.
func (r *checkpointRecord) imageIDs() []string {
	return []string{string(r.Base), rootImageID(r.rootKey())}
}

func rootImageID(k rootKey) string { return lazy.RootID(string(k)) }
