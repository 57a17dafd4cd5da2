// Command poolrun runs a command against an installation of several runners on this machine, and ends that again: `make demo-pool`.
//
//	poolrun -runners 2 -- command args...
//
// PostgreSQL, a server that speaks S3, a controller and the runners are processes of their own; each runner is in a network namespace of its own
// as on another host. The command gets COPPICE_SERVER and COPPICE_TOKEN. Its status is this one's. It needs root.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/coppice-dev/coppice/internal/test/testpool"
	"github.com/coppice-dev/coppice/internal/test/tests3"
)

// config says what to run.
type config struct {
	dir, images, coppice string
	runners              int
	command              []string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var cfg config
	flag.StringVar(&cfg.dir, "dir", "var/pool", "`directory` for everything; what was left in it is removed, and it stays when something ends badly")
	flag.StringVar(&cfg.images, "images-dir", "var/images", "image store `directory`")
	flag.StringVar(&cfg.coppice, "coppice", "bin/coppice", "`path` of the program")
	flag.IntVar(&cfg.runners, "runners", 2, "how many")
	flag.Parse()
	cfg.command = flag.Args()
	err := run(ctx, cfg, os.Stdout, os.Stderr)
	stop()
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "poolrun:", err)
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() > 0 {
		os.Exit(exit.ExitCode())
	}
	os.Exit(1)
}

func run(ctx context.Context, cfg config, out, progress io.Writer) (err error) {
	if len(cfg.command) == 0 || cfg.runners < 1 {
		return errors.New("a command and at least one runner are needed")
	}
	if os.Geteuid() != 0 {
		return errors.New("runners on hosts of their own need root")
	}
	for _, path := range []*string{&cfg.dir, &cfg.images, &cfg.coppice} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if err := errors.Join(testpool.RemoveDir(cfg.dir), os.MkdirAll(filepath.Join(cfg.dir, "s3"), 0o711)); err != nil { //nolint:gosec // G301: the database's user must pass
		return err
	}
	s3, err := tests3.Open(ctx, filepath.Join(cfg.dir, "s3"))
	if err != nil {
		return err
	}
	defer s3.Close()
	pool, err := testpool.Open(ctx, testpool.Config{Dir: cfg.dir, Coppice: cfg.coppice, Images: cfg.images, Store: s3})
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, pool.Close(ctx)); err == nil {
			err = testpool.RemoveDir(cfg.dir)
		}
	}()
	for range cfg.runners {
		h, err := pool.Join(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintf(progress, "%s is ready at %s\n", h.ID, h.Link.Far)
	}
	cmd := exec.CommandContext(ctx, cfg.command[0], cfg.command[1:]...) //nolint:gosec // G204: the caller's command
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Env = append(os.Environ(), "COPPICE_SERVER="+pool.Server, "COPPICE_TOKEN="+pool.Token)
	cmd.Stdout, cmd.Stderr = out, progress
	return cmd.Run()
}
