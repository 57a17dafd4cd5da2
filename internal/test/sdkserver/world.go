package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/test/testaddr"
	"github.com/coppice-dev/coppice/internal/undo"
)

// address is what a client needs.
type address struct {
	URL   string `json:"url"`
	Token string `json:"token"`
	Image string `json:"image"`
}

// world is a controller that can be started again, and a fake runner.
type world struct {
	dsn       string
	token     string
	secret    string // between controller and runner
	authority *mtls.Authority
	wrapper   controller.Wrapper
	runner    *runnertest.Runner

	public string // where the REST API listens; kept over restarts
	inner  string // where the runner reports

	running undo.Stack // parts of the running controller
	beating undo.Stack // the runner and its heartbeats
	control *controller.Controller
}

func newWorld(dir, dsn string) (*world, error) {
	w := &world{dsn: dsn, token: "coppice_" + rand.Text(), secret: rand.Text(), public: testaddr.New(), inner: testaddr.New()}
	var err error
	if w.authority, err = mtls.NewAuthority("sdk"); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "master.key")
	if _, err := masterkey.Create(path); err != nil {
		return nil, err
	}
	w.wrapper, err = masterkey.OpenRing(path)
	return w, err
}

func (w *world) address() address {
	return address{URL: "http://" + w.public, Token: w.token, Image: runnertest.DefaultImage.Name}
}

// lots is a rate that no test reaches.
var (
	lots  = controller.Rate{PerSecond: 1e6, Burst: 1e6}
	rates = map[controller.RateClass]controller.Rate{controller.RateRead: lots, controller.RateWrite: lots, controller.RateExec: lots, controller.RateAdmin: lots}
)

// start starts the controller at its addresses.
func (w *world) start(ctx context.Context) error {
	log := slog.New(slog.DiscardHandler)
	store, err := postgres.Open(ctx, postgres.Config{DSN: w.dsn})
	if err != nil {
		return err
	}
	w.running.Push("store", func(context.Context) error { store.Close(); return nil })
	runners := runnerclient.New(w.secret)
	w.running.Push("runner client", func(context.Context) error { runners.Close(); return nil })
	w.control = controller.New(controller.Config{
		ClusterID: "sdk", Sole: true, AllowAllEgress: true, Authority: w.authority, Wrapper: w.wrapper, Bootstrap: controller.Bootstrap{Key: w.token},
		LoopInterval: 500 * time.Millisecond, AdmissionWait: 50 * time.Millisecond, ShutdownGrace: time.Second,
		// A busy machine must not make the runner look dead.
		RunnerLease: time.Hour,
		Limits:      controller.Limits{Open: lots, FailureDelay: 1, Key: rates, Project: rates},
	}, store, runners, log)
	if _, err := w.control.Bootstrap(ctx); err != nil {
		return err
	}
	background(ctx, &w.running, "controller", w.control.Run)
	if w.public, err = listen(ctx, &w.running, w.public, httpapi.New(w.control, log)); err != nil {
		return err
	}
	internal, err := internalapi.New(w.control, w.secret, log)
	if err != nil {
		return err
	}
	w.inner, err = listen(ctx, &w.running, w.inner, internal)
	return err
}

// stop ends the controller and cuts its connections.
func (w *world) stop() error { return w.running.Undo(context.Background()) }

func (w *world) close() error {
	return errors.Join(w.beating.Undo(context.Background()), w.stop())
}

// output is more than a test of an SDK reads of a program.
const output = 128 << 20

// startRunner starts the fake runner and waits until the controller knows it.
func (w *world) startRunner(ctx context.Context) error {
	w.runner = runnertest.New(runnertest.Config{Secret: w.secret, Output: output})
	if err := w.runner.Listen(); err != nil {
		return err
	}
	w.beating.Push("runner", func(context.Context) error { w.runner.Close(); return nil })
	background(ctx, &w.beating, "heartbeats", func(ctx context.Context) error {
		w.runner.Run(ctx, "http://"+w.inner, w.secret)
		return nil
	})
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	for {
		err := w.control.Ready(ctx)
		if core.CodeOf(err) != core.CodeNoRunner {
			return err
		}
		if err := pace.Pause(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("the runner did not register: %w", err)
		}
	}
}

// background runs a part until the steps are undone.
func background(ctx context.Context, steps *undo.Stack, name string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	steps.Push(name, func(context.Context) error {
		cancel()
		return <-done
	})
}

// listen serves at a loopback address and returns it with its port.
func listen(ctx context.Context, steps *undo.Stack, at string, h http.Handler) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", at)
	if err != nil {
		return "", err
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	steps.Push("listener "+at, func(context.Context) error {
		err := srv.Close()
		if served := <-done; !errors.Is(served, http.ErrServerClosed) {
			err = errors.Join(err, served)
		}
		return err
	})
	return l.Addr().String(), nil
}
