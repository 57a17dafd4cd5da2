package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/runner/heartbeat"
	"github.com/coppice-dev/coppice/runner/pager"
)

// PagerConfig says how the pager of a runner runs. It comes as JSON from the runner that starts it, by a pipe: what is in the arguments or the
// environment of a process others can see.
type PagerConfig struct {
	Dir       string      `json:"dir"`
	Store     StoreConfig `json:"store"`
	AccessKey string      `json:"access_key,omitempty"`
	SecretKey string      `json:"secret_key,omitempty"`
}

// pagerDir is where the pager has its socket, in the run directory.
const pagerDir = "pager"

// pagerOf says how a runner's pager is started: as this program.
func pagerOf(runDir string, store StoreConfig) (*pager.Process, error) {
	cfg := PagerConfig{Dir: filepath.Join(runDir, pagerDir), Store: store, AccessKey: store.AccessKey, SecretKey: store.SecretKey}
	b, err := json.Marshal(cfg) //nolint:gosec // G117: it goes through a pipe to the process that needs it
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	return &pager.Process{Dir: cfg.Dir, Command: []string{self, "pager"}, Config: b}, err
}

// askPeers has a pager ask other runners as its runner does, by the same certificate. That is renewed in its file while the pager lives.
func askPeers(ctx context.Context, store *StoreConfig, log *slog.Logger, steps *undo.Stack) {
	if store.Member == "" {
		return
	}
	member, _, err := heartbeat.Load(store.Member)
	if err != nil || member == nil {
		log.WarnContext(ctx, "the pager asks no other runners: it has no certificate", "err", err)
		return
	}
	others := newPeerClient(member.Identity)
	store.Peers = others
	ctx, stop := context.WithCancel(ctx)
	var renewing sync.WaitGroup
	renewing.Go(func() {
		const pause = time.Minute
		every := time.NewTicker(pause)
		defer every.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-every.C:
			}
			if err := member.Reload(); err != nil {
				log.WarnContext(ctx, "the certificate for other runners was not read again", "err", err)
			}
		}
	})
	steps.Push("connections to other runners", func(context.Context) error {
		stop()
		renewing.Wait()
		others.close()
		return nil
	})
}

// RunPager runs the pager that config describes until ctx ends or its runner stops it.
func RunPager(ctx context.Context, config io.Reader, log *slog.Logger) (err error) {
	var cfg PagerConfig
	if err := json.NewDecoder(config).Decode(&cfg); err != nil {
		return core.Wrapf(err, core.Invalid, core.CodeInvalidField, "the pager is started by a runner, which tells it on its standard input what to do")
	}
	cfg.Store.AccessKey, cfg.Store.SecretKey = cfg.AccessKey, cfg.SecretKey
	// Guests live by it: when memory is short, others go first.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0); err != nil {
		log.WarnContext(ctx, "the pager is as likely to be killed for want of memory as any other process", "err", err)
	}
	var steps undo.Stack
	defer func() { err = errors.Join(err, steps.Undo(context.WithoutCancel(ctx))) }()
	askPeers(ctx, &cfg.Store, log, &steps)
	store, err := cfg.Store.Chain(ctx, log, nil, &steps)
	if err != nil {
		return err
	}
	if store == nil {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "a pager needs a store")
	}
	server, err := pager.New(pager.Config{Dir: cfg.Dir, Blobs: store, Log: log})
	if err != nil {
		return fmt.Errorf("open the pager: %w", err)
	}
	return server.Run(ctx)
}
