// Command sdkserver serves a live controller to the tests of SDKs that are not written in Go.
//
// It starts a PostgreSQL of its own, a controller with its REST API on loopback, and a runner without virtual machines
// (package runnertest). It needs no root. When all is ready it prints one line of JSON:
//
//	{"url": "http://127.0.0.1:40001", "token": "coppice_…", "image": "base"}
//
// It reads commands from standard input, one a line, and answers each with one line of JSON:
//
//	restart    ends the controller and starts another at the same address, over the same database
//
// It ends, and leaves nothing behind, when standard input ends.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/migrations"
)

// stopTime bounds the end of each part, and the wait for the runner.
const stopTime = 2 * time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := serve(ctx, os.Stdin, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "sdkserver:", err)
		os.Exit(1)
	}
}

// serve runs everything until the input or the context ends.
func serve(ctx context.Context, in io.Reader, out io.Writer) (err error) {
	var steps undo.Stack
	defer func() { err = errors.Join(err, steps.Undo(context.WithoutCancel(ctx))) }()
	dir, err := os.MkdirTemp("", "coppice-sdkserver-")
	if err != nil {
		return err
	}
	steps.Push("directory", func(context.Context) error { return os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil { //nolint:gosec // G302: the database's user passes through
		return err
	}
	dsn, err := database(ctx, &steps, dir)
	if err != nil {
		return err
	}
	w, err := newWorld(dir, dsn)
	if err != nil {
		return err
	}
	steps.Push("controller", func(context.Context) error { return w.close() })
	if err := w.start(ctx); err != nil {
		return err
	}
	if err := w.startRunner(ctx); err != nil {
		return err
	}
	answer := json.NewEncoder(out)
	if err := answer.Encode(w.address()); err != nil {
		return err
	}
	return w.obey(ctx, lines(in), answer)
}

// obey runs the commands until there are no more.
func (w *world) obey(ctx context.Context, commands <-chan string, answer *json.Encoder) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case command, ok := <-commands:
			if !ok {
				return nil
			}
			if command != "restart" {
				return fmt.Errorf("unknown command %q: the one command is restart", command)
			}
			if err := errors.Join(w.stop(), w.start(ctx)); err != nil {
				return err
			}
			if err := answer.Encode(w.address()); err != nil {
				return err
			}
		}
	}
}

// lines sends the input, line by line.
func lines(in io.Reader) <-chan string {
	out := make(chan string)
	go func() {
		defer close(out)
		for s := bufio.NewScanner(in); s.Scan(); {
			out <- s.Text()
		}
	}()
	return out
}

// database starts a PostgreSQL and makes a database in it.
func database(ctx context.Context, steps *undo.Stack, dir string) (string, error) {
	bin, err := pgcluster.Find(ctx, os.Getenv("PGBIN")) //nolint:forbidigo // a program of tests, with the variable of other tests
	if err != nil {
		return "", err
	}
	cluster, err := pgcluster.Start(ctx, pgcluster.Config{
		Dir: filepath.Join(dir, "pg"), Binaries: bin, Durable: true, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return "", err
	}
	steps.Push("database", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, stopTime)
		defer cancel()
		return cluster.Remove(ctx)
	})
	conn, err := pgx.Connect(ctx, cluster.DSN(pgcluster.Superuser))
	if err != nil {
		return "", err
	}
	_, err = conn.Exec(ctx, "CREATE DATABASE sdk")
	if err := errors.Join(err, conn.Close(context.WithoutCancel(ctx))); err != nil {
		return "", err
	}
	dsn := cluster.DSN("sdk")
	return dsn, migrations.Up(ctx, dsn)
}
