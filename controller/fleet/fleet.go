// Package fleet owns the runners of a cluster. A runner joins with a token, registers, and keeps its
// lease by heartbeats. The package compares each heartbeat with the rows: it tells the runner what to
// drop, and ends the workspaces whose sandboxes are gone. It gives up runners that are silent for too
// long, chooses runners for new sandboxes, and knows which runner has which image.
package fleet

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/cluster"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/imageref"
)

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps runners and images. All of its rows belong to the system, except for workspaces and sandboxes.
type Tx interface {
	BeatTx
	DropTx
	FenceTx
	IdentityTx
	ImageTx
	DrainRunner(ctx context.Context, id core.RunnerID, on bool) (model.Runner, error)
	Runners(ctx context.Context, p model.Page) ([]model.Runner, error)
	// EndWorkspaces ends workspaces and all their sandboxes. Its answer does not name the checkpoints from which lost ones can be recovered.
	EndWorkspaces(ctx context.Context, list []model.EndedWorkspace) ([]model.Workspace, error)
}

// Runners calls runners by their endpoint. A repeated call changes nothing. The error is Unavailable if a runner cannot be reached.
type Runners interface {
	Images(ctx context.Context, endpoint string) ([]runnerapi.Image, error)
	// Pull begins the pull of an image, or says how far it is.
	Pull(ctx context.Context, endpoint string, id core.OperationID, in runnerapi.Pull) (runnerapi.PullState, error)
	DeleteSandbox(ctx context.Context, endpoint string, id core.SandboxID) error
	DeleteCheckpoint(ctx context.Context, endpoint string, id core.CheckpointID) error
}

// Config says how a fleet works.
type Config struct {
	ClusterID       string         // runners mark everything on their hosts with it
	Trust           *cluster.Trust // nil if controller and runner share a secret; then no runner can join
	CertificateLife time.Duration  // of runners' certificates

	Lease         time.Duration // how long a silent runner counts as reachable
	Fence         time.Duration // how long after that its workspaces are lost
	UsageInterval time.Duration // how often the usage of a sandbox is written
	DropPause     time.Duration // the longest pause between two attempts to take down a sandbox

	// Certify issues the certificate of a runner's attestation key; nil if the request is empty or no authority is configured.
	Certify func(id core.RunnerID, request []byte) ([]byte, error)
	// Used hears of each workspace whose data plane was used.
	Used func(core.WorkspaceID)
	// Go runs work that the end of the controller cancels and waits for. It returns false, and runs nothing, if the controller is stopping.
	Go func(work func(ctx context.Context)) bool

	// Registries are those from which projects may pull images, and PullRetry is how long a pull waits for a silent runner.
	Registries imageref.Registries
	PullRetry  time.Duration

	Log *slog.Logger
}

// Fleet is safe for concurrent use.
type Fleet struct {
	cfg     Config
	store   Store
	runners Runners
	usage   usageTimes
	images  imageRequests
	quiet   quietBeats

	dropping sync.Map // core.RunnerID -> true: it did not drop what it was asked to
}

// New makes a fleet. It starts nothing.
func New(cfg Config, store Store, runners Runners) *Fleet {
	return &Fleet{cfg: cfg, store: store, runners: runners, quiet: quietBeats{report: rate.Sometimes{Interval: time.Minute}}}
}

// read runs a query that sees all projects.
func read[T any](ctx context.Context, f *Fleet, query func(Tx) (T, error)) (out T, err error) {
	err = f.store.InSystem(ctx, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

// Drain keeps new sandboxes away from a runner, or stops doing so. Its present sandboxes stay.
func (f *Fleet) Drain(ctx context.Context, id core.RunnerID, on bool) (model.Runner, error) {
	r, err := read(ctx, f, func(tx Tx) (model.Runner, error) { return tx.DrainRunner(ctx, id, on) })
	if err == nil {
		f.cfg.Log.InfoContext(ctx, "runner drains or not", "runner_id", id, "draining", on)
	}
	return r, err
}

// Runners lists the runners that a project may see.
func (f *Fleet) Runners(ctx context.Context, project core.ProjectID, p model.Page) (list []model.Runner, err error) {
	err = f.store.InProject(ctx, project, func(tx Tx) (err error) {
		list, err = tx.Runners(ctx, p)
		return err
	})
	return list, err
}
