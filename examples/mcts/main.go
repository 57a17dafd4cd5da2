package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
	"github.com/coppice-dev/coppice/sdk/go/search"
)

// config is what the command line and the environment say.
type config struct {
	server, token, image, report string
	seed                         uint64
	siblings, creates, runners   int
	spread                       bool
	timeout                      time.Duration
	settings                     Settings
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	cfg := config{settings: defaultSettings()}
	flag.StringVar(&cfg.server, "server", os.Getenv("COPPICE_SERVER"), "server: unix:///path or http://host:port (COPPICE_SERVER)")
	flag.StringVar(&cfg.token, "token", os.Getenv("COPPICE_TOKEN"), "API key (COPPICE_TOKEN)")
	flag.StringVar(&cfg.image, "image", "demo", "image with python3, git, curl and the package python3-toolz")
	flag.StringVar(&cfg.report, "report", "", "file to write the report to")
	flag.Uint64Var(&cfg.seed, "seed", 1, "of the policy's guesses")
	flag.IntVar(&cfg.siblings, "siblings", 4, "forks of the best node that are compared at the end")
	flag.IntVar(&cfg.creates, "creates", 3, "how many creates are measured, after the first")
	flag.BoolVar(&cfg.spread, "spread", false, "grow children evenly on all runners; every node is sealed before it is forked")
	flag.IntVar(&cfg.runners, "runners", 1, "fail unless children were grown on so many runners")
	flag.DurationVar(&cfg.timeout, "timeout", 9*time.Minute, "give up after this long")
	flag.IntVar(&cfg.settings.Children, "children", cfg.settings.Children, "children of a node that are forked at once")
	flag.IntVar(&cfg.settings.Budget, "budget", cfg.settings.Budget, "forks of the search at most")
	flag.Float64Var(&cfg.settings.Exploration, "exploration", cfg.settings.Exploration, "UCT constant")
	flag.Parse()
	if err := run(ctx, cfg, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "mcts:", err)
		stop()
		os.Exit(1) //nolint:gocritic // nothing is deferred that matters
	}
}

// errNotSolved is how a search ends that spent its budget.
var errNotSolved = errors.New("the fix was not found")

func run(ctx context.Context, cfg config, out io.Writer) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.timeout, fmt.Errorf("gave up after %s", cfg.timeout))
	defer cancel()
	client, err := coppice.New(coppice.Config{Server: cfg.server, Token: cfg.token, UserAgent: "coppice-mcts"})
	if err != nil {
		return fmt.Errorf("%w; set --server", err)
	}
	defer client.Close()
	m := &Machines{Client: client, Spread: cfg.spread, Labels: coppice.Labels{"mcts": strconv.FormatUint(rand.Uint64(), 36)}} //nolint:gosec // G404: a label
	defer func() {
		_, cleared := m.Clear(ctx)
		err = errors.Join(err, cleared)
	}()
	began := time.Now()
	start, err := root(ctx, cfg, m, out)
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	g := start.game
	searcher, err := newSearch(g, m.Records(), start.node, start.seen, func(x search.Expansion) { progress(out, g, x, time.Since(began)) })
	if err != nil {
		return err
	}
	result, err := g.play(ctx, searcher)
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	siblings, err := m.Siblings(ctx, result.Best.ID, cfg.siblings)
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	tree := searcher.Tree()
	r := fill(g, tree, result, m, time.Since(began))
	r.TemplateMS, r.Siblings, r.Distinct = start.templateMS, siblings, distinct(siblings)
	fmt.Fprintln(out)
	printTree(out, g, tree, result.Best)
	r.print(out)
	if cfg.report != "" {
		if err := r.write(cfg.report); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
		fmt.Fprintf(out, "report: %s\n", cfg.report)
	}
	fmt.Fprintln(out, r.summary())
	return verdict(r, cfg.runners)
}

// verdict is the error that the report amounts to, when forks on so many runners are wanted.
func verdict(r Report, runners int) error {
	var errs []error
	if len(r.Runners) < runners {
		errs = append(errs, fmt.Errorf("%d runners have had forks, want %d", len(r.Runners), runners))
	}
	if !r.Solved {
		errs = append(errs, errNotSolved)
	}
	if !r.Distinct.All() {
		errs = append(errs, fmt.Errorf("siblings share an identity: %+v", r.Distinct))
	}
	if !r.MemoryBranches {
		errs = append(errs, errors.New("the memory of a node is not that of its way"))
	}
	return errors.Join(errs...)
}

// start is the root of the game.
type start struct {
	game       *Game
	node       string
	seen       Observation
	templateMS float64
}

// root makes the machine at the root of the game. The first create boots the image, unless that was done before, and is
// not part of what is measured.
func root(ctx context.Context, cfg config, m *Machines, out io.Writer) (start, error) {
	candidates, err := Candidates()
	if err != nil {
		return start{}, err
	}
	fmt.Fprintf(out, "creating a workspace from image %q (the first one boots it once) …\n", cfg.image)
	began := time.Now()
	ws, err := m.Create(ctx, cfg.image, false)
	if err != nil {
		return start{}, err
	}
	templateMS := milliseconds(time.Since(began))
	for range cfg.creates {
		spare, err := m.Create(ctx, cfg.image, true)
		if err != nil {
			return start{}, err
		}
		if err := m.terminate(ctx, spare.ID); err != nil {
			return start{}, err
		}
	}
	seen, err := prepare(ctx, m, ws.ID)
	if err != nil {
		return start{}, err
	}
	id, err := m.Checkpoint(ctx, ws.ID, nil)
	if err != nil {
		return start{}, err
	}
	if err := m.terminate(ctx, ws.ID); err != nil {
		return start{}, err
	}
	fmt.Fprintf(out, "root: %d of %d tests pass; %d candidate actions, %d children at once\n", seen.Passed, seen.Total, len(candidates), cfg.settings.Children)
	return start{
		game: &Game{
			World: m, Settings: cfg.settings,
			Policy: &Edits{Candidates: candidates, Random: rand.New(rand.NewPCG(cfg.seed, 0))}, //nolint:gosec // G404: guesses that can be repeated
		},
		node: id, seen: seen, templateMS: templateMS,
	}, nil
}

func progress(out io.Writer, g *Game, x search.Expansion, since time.Duration) {
	way := strings.Join(x.Node.Path(), " → ")
	if way == "" {
		way = "root"
	}
	best := g.observed(x.Best)
	fmt.Fprintf(out, "%6.1f s  %3d forks  best %d/%d  expanded %s\n", since.Seconds(), x.Tried, best.Passed, best.Total, way)
}
