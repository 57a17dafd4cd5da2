package postgres

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
)

// queueSchema holds the tables of the queue library; the migrations make it.
const queueSchema = "river"

const (
	jobTime   = 30 * time.Second // a job that takes longer is cancelled
	jobRescue = jobTime + 5*time.Second
	jobStop   = 5 * time.Second
	jobKept   = 15 * time.Minute // how long rows of ended jobs stay, for people
	jobConns  = 4
)

// RunPeriodicJobs runs periodic work on one of all controllers: the queue library elects which of them makes a job due, and one
// that is free takes it. Jobs that failed are due again after their interval, not sooner. It returns when ctx ends and the
// jobs that ran here have, or when the database cannot be reached.
func (s *Store) RunPeriodicJobs(ctx context.Context, list []controller.PeriodicJob, log *slog.Logger) (err error) {
	pool, err := s.jobPool(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	workers := river.NewWorkers()
	worker := &jobWorker{log: log, jobs: map[string]*periodicJob{}}
	river.AddWorker(workers, worker)
	periodic := make([]*river.PeriodicJob, len(list))
	for i, c := range list {
		worker.jobs[c.Name] = &periodicJob{PeriodicJob: c}
		periodic[i] = river.NewPeriodicJob(river.PeriodicInterval(c.Every),
			func() (river.JobArgs, *river.InsertOpts) { return jobArgs{Name: c.Name}, nil },
			&river.PeriodicJobOpts{ID: c.Name, RunOnStart: true})
	}
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Schema: queueSchema, Workers: workers, PeriodicJobs: periodic,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: max(len(list), 1)}},
		// A job has one attempt: the next interval is its retry.
		MaxAttempts: 1, JobTimeout: jobTime, RescueStuckJobsAfter: jobRescue, SoftStopTimeout: time.Second,
		CompletedJobRetentionPeriod: jobKept, DiscardedJobRetentionPeriod: jobKept, CancelledJobRetentionPeriod: jobKept,
		ReindexerSchedule: river.NeverSchedule(), // it would need to own the tables; they are small
		Logger:            slog.New(quiet{log.Handler()}),
	})
	if err != nil {
		return fmt.Errorf("prepare the periodic jobs: %w", err)
	}
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return pgtx.MapError(ctx, err)
	}
	select {
	case <-ctx.Done():
	case <-client.Stopped():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), jobStop)
	defer cancel()
	return client.Stop(stop)
}

// jobPool makes the library's connections: as the same role as everything else.
func (s *Store) jobPool(ctx context.Context) (*pgxpool.Pool, error) {
	pc := s.pool.Config()
	pc.MinConns, pc.MaxConns = 0, jobConns
	pc.ConnConfig.RuntimeParams["application_name"] = "coppice-chores"
	pc.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SET role coppice_app")
		return err
	}
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	if err := pool.Ping(ctx); err != nil { // the library takes an absent database for a fault
		pool.Close()
		return nil, pgtx.MapError(ctx, err)
	}
	return pool, nil
}

type jobArgs struct {
	Name string `json:"name"`
}

// Kind names the job in the queue's tables.
func (jobArgs) Kind() string { return "chore" }

type periodicJob struct {
	controller.PeriodicJob
	running sync.Mutex
}

type jobWorker struct {
	river.WorkerDefaults[jobArgs]
	log  *slog.Logger
	jobs map[string]*periodicJob
}

// Work does a job, unless it still runs here since the last time. One that this controller does not know, because a newer
// one made it due, is left to that one's next interval.
func (w *jobWorker) Work(ctx context.Context, job *river.Job[jobArgs]) error {
	c, ok := w.jobs[job.Args.Name]
	if !ok || !c.running.TryLock() {
		return nil
	}
	defer c.running.Unlock()
	if err := c.Do(ctx); err != nil && ctx.Err() == nil {
		w.log.WarnContext(ctx, "periodic job failed", "job", c.Name, "err", err)
		return err
	}
	return nil
}

// quiet passes on what the library says of real trouble: it reports failed jobs, which the worker has logged, as errors too.
type quiet struct{ slog.Handler }

// Enabled drops records below the level of a warning.
func (q quiet) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelWarn && q.Handler.Enabled(ctx, l)
}

// Handle drops what was said because everything stops.
func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	stopped := false
	r.Attrs(func(a slog.Attr) bool {
		err, ok := a.Value.Any().(error)
		// The library gives some errors as texts.
		stopped = ok && errors.Is(err, context.Canceled) || a.Key == "error" && a.Value.String() == context.Canceled.Error()
		return !stopped
	})
	if stopped {
		return nil
	}
	return q.Handler.Handle(ctx, r)
}

// WithAttrs keeps the filter.
func (q quiet) WithAttrs(attrs []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(attrs)} }

// WithGroup keeps the filter.
func (q quiet) WithGroup(name string) slog.Handler { return quiet{q.Handler.WithGroup(name)} }
