package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	thought     = 2 * time.Second // how long the client waits between a checkpoint and its fork, as for a model
	branches    = 4               // children of each of its forks
	prepareMax  = 12              // of the server that prepares machines: for a fork of 8, one of 1, and what else is expected
	prepareTime = 30 * time.Second
	quietTime   = 90 * time.Second
)

// preparingServer starts a second server, which prepares machines.
func (b *bench) preparingServer(ctx context.Context) (s *server, metrics string, err error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", err
	}
	metrics = l.Addr().String()
	if err := l.Close(); err != nil {
		return nil, "", err
	}
	s, err = startServer(ctx, b.cfg, preparingDir(b.cfg), "--prepare-max", fmt.Sprint(prepareMax), "--metrics-listen", metrics)
	return s, "http://" + metrics + "/metrics", err
}

func preparingDir(cfg config) string { return filepath.Join(cfg.out, "data", "preparing") }

// measureThinking measures forks of a client that thinks between a checkpoint and its fork, with machines that were prepared meanwhile and
// without, in turns; then single forks and forks of 8 whose machines are all prepared, beside cold boots; and at the end what an idle server costs.
func (b *bench) measureThinking(ctx context.Context) (err error) {
	s, metrics, err := b.preparingServer(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	with, without := &thinker{s: s}, &thinker{s: b.server}
	for i := range b.rounds(50, 150*time.Second) {
		turns := []*thinker{with, without}
		for j := range turns { // who goes first changes
			if err := turns[(i+j)%2].round(ctx); err != nil {
				return err
			}
		}
	}
	if err := errors.Join(s.endAll(ctx), b.server.endAll(ctx)); err != nil {
		return err
	}
	think, err := preparedFigures(ctx, metrics)
	if err != nil {
		return err
	}
	var one, eight prepared
	var boot report.Samples
	if err := b.measurePrepared(ctx, s, metrics, &one, &eight, &boot); err != nil {
		return err
	}
	before, err := preparedFigures(ctx, metrics)
	if err != nil {
		return err
	}
	if err := pace.Pause(ctx, quietTime); err != nil {
		return err
	}
	after, err := preparedFigures(ctx, metrics)
	if err != nil {
		return err
	}
	b.report.Group(fmt.Sprintf("A client that thinks: checkpoint, %s, fork of %d, a command in each (512 MiB, through REST)", thought, branches),
		without.ready.MS("not prepared: fork to READY of all", ""),
		with.ready.MS("prepared: fork to READY of all", fmt.Sprintf("%d of %d children took a prepared machine", with.hits, with.children)),
		without.first.MS("not prepared: to the end of the commands", ""),
		with.first.MS("prepared: to the end of the commands", ""),
		boot.MS("cold boot to first exec", "driver alone, no REST"),
		one.ready.MS("prepared: fork of 1 to READY", "waited for its machine"),
		one.first.MS("prepared: fork of 1 to first exec", ""),
		eight.ready.MS("prepared: fork of 8 to READY of all", "waited for its machines"),
	)
	b.report.Stages["prepared"] = one.where.Medians()
	b.report.over("prepared_ready_over_boot", one.ready, boot, "prepared fork of 1 to READY through REST over cold boot to first exec, ms")
	b.report.over("prepared_exec_over_boot", one.first, boot, "prepared fork of 1 to first exec through REST over cold boot to first exec, ms")
	b.report.over("prepared_wall_8_over_1", eight.ready, one.ready, "prepared fork of 8 over one of 1, to READY of all, ms")
	b.report.ratio("prepared_hit_rate", float64(with.hits)/float64(with.children), fmt.Sprintf("children of the thinking client that took a prepared machine: %d of %d", with.hits, with.children))
	b.report.ratio("prepared_waste", think.wasted/(think.taken+think.wasted), fmt.Sprintf("CPU of machines never taken over that of all prepared, s: %.1f over %.1f", think.wasted, think.taken+think.wasted))
	idle := after.wasted - before.wasted
	b.report.ratio("prepared_idle_cpus", idle/quietTime.Seconds(), fmt.Sprintf("CPU of machines that were prepared and ended in the first %s without a request, over this time, s: %.2f", quietTime, idle))
	return nil
}

// thinker is the client of one server.
type thinker struct {
	s              *server
	at             coppice.WorkspaceID // empty: none yet
	ready, first   report.Samples
	hits, children int
}

// round is one step of a search: it goes on from the first child.
func (t *thinker) round(ctx context.Context) (err error) {
	if t.at == "" {
		if t.at, _, err = t.s.create(ctx, standardMiB); err != nil {
			return err
		}
		if _, err := t.s.exec(ctx, t.at, "true"); err != nil {
			return err
		}
	}
	cp, err := t.s.checkpoint(ctx, t.at)
	if err != nil {
		return err
	}
	if err := pace.Pause(ctx, thought); err != nil {
		return err
	}
	children, ready, first, err := forkAndRun(ctx, t.s, cp.ID, branches)
	if err != nil {
		return err
	}
	t.ready.Add(ready)
	t.first.Add(first)
	for _, c := range children {
		t.children++
		if claimed(c) {
			t.hits++
		}
	}
	ids := idsOf(children)
	before := t.at
	t.at = ids[0]
	return t.s.end(ctx, append(ids[1:], before)...)
}

// forkAndRun forks a checkpoint and runs a command in each child.
func forkAndRun(ctx context.Context, s *server, id coppice.CheckpointID, n int) (children []coppice.ForkChild, ready, first float64, err error) {
	began := time.Now()
	if children, err = s.fork(ctx, id, n); err != nil {
		return nil, 0, 0, err
	}
	ready = report.Since(began)
	group, ctx := errgroup.WithContext(ctx)
	for _, c := range children {
		group.Go(func() error {
			_, err := s.exec(ctx, c.Workspace.ID, "true")
			return err
		})
	}
	err = group.Wait()
	return children, ready, report.Since(began), err
}

// claimed reports whether a child was made of a prepared machine.
func claimed(c coppice.ForkChild) bool {
	return slices.ContainsFunc(c.Timings, func(t coppice.Timing) bool { return t.Stage == "claim" })
}

// prepared has the measurements of forks whose machines were all prepared.
type prepared struct {
	ready, first report.Samples
	where        report.Stages
	teaches      int
}

func (p *prepared) fork(ctx context.Context, s *server, id coppice.CheckpointID, n int) error {
	children, ready, first, err := forkAndRun(ctx, s, id, n)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(children, func(c coppice.ForkChild) bool { return !claimed(c) }) {
		p.ready.Add(ready)
		p.first.Add(first)
		for _, c := range children {
			p.where.Public(c.Timings)
		}
	} else {
		p.teaches++ // the server learns that this checkpoint is forked, and into how many
	}
	return s.end(ctx, idsOf(children)...)
}

// measurePrepared forks two checkpoints in turns, one into 1 and one into 8, each time when the machines for both are prepared.
func (b *bench) measurePrepared(ctx context.Context, s *server, metrics string, one, eight *prepared, boot *report.Samples) error {
	var ids [2]coppice.CheckpointID
	for i := range ids {
		w, _, err := s.create(ctx, standardMiB)
		if err != nil {
			return err
		}
		cp, err := s.checkpoint(ctx, w)
		if err != nil {
			return err
		}
		ids[i] = cp.ID
		if err := s.end(ctx, w); err != nil {
			return err
		}
	}
	for range b.rounds(12, 120*time.Second) {
		m, _, f, err := b.lab.boot(ctx, standardMiB)
		if err != nil {
			return err
		}
		boot.Add(f)
		if err := m.close(ctx); err != nil {
			return err
		}
		for i, p := range []*prepared{one, eight} {
			if err := awaitPrepared(ctx, metrics, 9); err != nil {
				return err
			}
			if err := p.fork(ctx, s, ids[i], []int{1, 8}[i]); err != nil {
				return err
			}
		}
	}
	if len(one.ready) == 0 || len(eight.ready) == 0 {
		return fmt.Errorf("no fork found all of its machines prepared: %d and %d did not", one.teaches, eight.teaches)
	}
	return nil
}

// awaitPrepared waits, for a while at most, until n machines are prepared: the forecast need not want so many.
func awaitPrepared(ctx context.Context, metrics string, n int) error {
	limit, cancel := context.WithTimeout(ctx, prepareTime/3)
	defer cancel()
	for {
		f, err := preparedFigures(ctx, metrics)
		if err != nil || f.ready >= float64(n) {
			return err
		}
		if pace.Pause(limit, 100*time.Millisecond) != nil {
			return ctx.Err()
		}
	}
}

// preparedState is what a server says of its prepared machines.
type preparedState struct {
	ready         float64
	taken, wasted float64 // seconds of CPU time
}

func preparedFigures(ctx context.Context, metrics string) (f preparedState, err error) {
	ctx, cancel := context.WithTimeout(ctx, prepareTime)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, metrics, nil)
	if err != nil {
		return f, err
	}
	a, err := http.DefaultClient.Do(q)
	if err != nil {
		return f, err
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return f, fmt.Errorf("%s: status %d", metrics, a.StatusCode)
	}
	f, err = readFigures(a.Body)
	if err != nil {
		return f, fmt.Errorf("%s: %w", metrics, err)
	}
	return f, nil
}

// readFigures wants every one of the figures: one that is missing is not 0.
func readFigures(text io.Reader) (f preparedState, err error) {
	wanted := map[string]*float64{
		"coppice_runner_machines_prepared":                            &f.ready,
		`coppice_runner_prepared_cpu_seconds_total{outcome="taken"}`:  &f.taken,
		`coppice_runner_prepared_cpu_seconds_total{outcome="wasted"}`: &f.wasted,
	}
	lines := bufio.NewScanner(text)
	for lines.Scan() {
		name, number, _ := strings.Cut(lines.Text(), " ")
		to, ok := wanted[name]
		if !ok {
			continue
		}
		if *to, err = strconv.ParseFloat(number, 64); err != nil || math.IsNaN(*to) || math.IsInf(*to, 0) {
			return f, fmt.Errorf("%s is not a number: %q", name, number)
		}
		delete(wanted, name)
	}
	if err := lines.Err(); err != nil {
		return f, err
	}
	if len(wanted) > 0 {
		return f, fmt.Errorf("the metrics lack %q", slices.Sorted(maps.Keys(wanted)))
	}
	return f, nil
}
