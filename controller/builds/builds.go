// Package builds builds images: operations of the kind build_image. An image is a checkpoint with a
// name. A build makes a workspace from the base and a checkpoint of it. For each instruction that
// changes the machine, it forks the checkpoint before, carries out the instruction, and takes the
// next checkpoint.
//
// # The cache
//
// Each checkpoint has a label with its key: the digest of the key before it, the instruction, and
// all that the instruction depends on. A build looks for a checkpoint of the project with the key
// before it carries out an instruction. So the tree of checkpoints is the cache. ENV, WORKDIR, USER
// and the like make no checkpoint: they change the configuration, which is part of the keys that
// follow.
//
// # Crashes
//
// Each instruction that is carried out is an action of package steps, with a row that says how far it
// has come. A controller that takes over a build begins at the first instruction: those that have
// ended have a row or are in the cache, and one that has begun goes on from its row.
package builds

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/builds/dockerfile"
	"github.com/coppice-dev/coppice/controller/builds/plan"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/controller/sweep"
	"github.com/coppice-dev/coppice/controller/uploads"
	"github.com/coppice-dev/coppice/core"
)

// Bounds of builds.
const (
	MaxSteps  = 256 // of a request
	MaxImages = 500 // of a project

	maxRunning  = 16       // builds of a project that have not ended
	maxLog      = 1 << 20  // bytes of the log of a build
	maxLogs     = 100      // of a project
	maxText     = 64 << 10 // bytes of a command or a variable
	maxAccounts = 1 << 20  // bytes of a file that is read of a guest
)

const (
	buildTime   = 12 * time.Hour
	runTime     = time.Hour        // of one command
	copyTime    = 20 * time.Minute // of one copy
	pullEvery   = 2 * time.Second  // between two reports of how far a pull is
	readyTime   = 2 * time.Minute  // for a service to become ready, unless the request says
	logsKept    = 24 * time.Hour
	sweepBatch  = 50
	lastLines   = 12   // of a command that failed, in the problem
	lastBytes   = 1500 // likewise
	secondsHour = 3600

	// Every is the time between two sweeps.
	Every = time.Minute
)

// Label is the label of a checkpoint that a build may use again, with its key. Clients cannot set it: an image may reach more than the workspace
// of a checkpoint might.
const Label = "coppice.build/key"

// Spec is what a build makes.
type Spec struct {
	Name       string            `json:"name"`
	From       string            `json:"from,omitempty"`
	Dockerfile string            `json:"dockerfile,omitempty"`
	Context    string            `json:"context,omitempty"` // an upload
	Steps      []Step            `json:"steps,omitempty"`
	Args       map[string]string `json:"args,omitempty"`
	Target     string            `json:"target,omitempty"`
	Start      *Start            `json:"start,omitempty"`
	Resources  core.Resources    `json:"resources"`
	Egress     core.EgressPolicy `json:"egress,omitempty"`
	Allow      []string          `json:"allow,omitempty"`
	NoCache    bool              `json:"no_cache,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
}

// Step is one step of a request. One field is set.
type Step struct {
	Run     string            `json:"run,omitempty"`
	Copy    *CopyStep         `json:"copy,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
	User    string            `json:"user,omitempty"`
}

// CopyStep copies files of an upload.
type CopyStep struct {
	Upload string `json:"upload"`
	Path   string `json:"path,omitempty"` // a pattern; empty: all
	Dest   string `json:"dest"`
	User   string `json:"user,omitempty"` // user[:group]
	Mode   string `json:"mode,omitempty"` // octal
}

// Start is a program that runs in the image: forks begin with it.
type Start struct {
	Command string            `json:"command"`
	User    string            `json:"user,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	Ready   *Ready            `json:"ready,omitempty"`
}

// Ready says when the program is ready. One of the first two is set.
type Ready struct {
	Command string `json:"command,omitempty"` // ends with 0
	Port    int    `json:"port,omitempty"`    // listens
	Seconds int    `json:"seconds,omitempty"` // how long to wait
}

// Image is an image of a project.
type Image struct {
	Name       string            `json:"name"`
	Checkpoint core.CheckpointID `json:"checkpoint_id"`
	From       string            `json:"from"`
	Config     plan.Config       `json:"config"`
	Operation  core.OperationID  `json:"operation_id"`
	Steps      int               `json:"steps"`
	Cached     int               `json:"cached_steps"`
	Labels     map[string]string `json:"labels,omitempty"`
	CreatedAt  time.Time         `json:"created_at"`

	Open bool `json:"open,omitempty"` // its forks may reach what a workspace of the project may
}

// Log is a part of the log of a build.
type Log struct {
	Data []byte
	Next int64 // the offset of what follows
}

// AdmitTx has what the transactions of a build itself need.
type AdmitTx interface {
	// CountBuild fails with QUOTA_EXCEEDED if as many builds of the project as most have not ended.
	CountBuild(ctx context.Context, project core.ProjectID, most int) error
	// PutProjectImage makes a checkpoint the image of a name, so that it cannot be deleted. It fails with QUOTA_EXCEEDED if the project has most
	// images of other names, and with CHECKPOINT_NOT_FOUND if the checkpoint is gone.
	PutProjectImage(ctx context.Context, project core.ProjectID, image Image, most int) (Image, error)
	// ProjectImage returns an image; IMAGE_NOT_FOUND.
	ProjectImage(ctx context.Context, project core.ProjectID, name string) (Image, error)
}

// Tx keeps images and logs.
type Tx interface {
	AdmitTx
	ProjectImages(ctx context.Context, project core.ProjectID) ([]Image, error)
	// DeleteProjectImage takes the name from its checkpoint; IMAGE_NOT_FOUND.
	DeleteProjectImage(ctx context.Context, project core.ProjectID, name string) error
	// BuildCheckpoint returns the newest checkpoint with a key that can be forked now, or nothing.
	BuildCheckpoint(ctx context.Context, project core.ProjectID, key string) (core.CheckpointID, error)
	// AppendBuildLog appends to the log of a build, up to most bytes. It is fenced as steps.NoteTx.MoveStepAction is.
	AppendBuildLog(ctx context.Context, ref steps.Ref, data []byte, most int64) error
	// BuildLog reads at most one part of a log.
	BuildLog(ctx context.Context, id core.OperationID, offset int64) (Log, error)
	// SweepBuildLogs removes the logs of at most limit builds that ended more than kept ago, or that are not among the newest of their project.
	SweepBuildLogs(ctx context.Context, kept time.Duration, newest, limit int) (int, error)
}

// Store runs transactions.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Uses are the use cases that builds consist of.
type Uses struct {
	Guests  *guestclient.Client
	Steps   *steps.Stepper
	Uploads *uploads.Keeper
	// Start starts a program in a workspace. A repeat under the same claim starts none.
	Start     func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.ExecRequest) error
	FindImage func(ctx context.Context, ref string) (model.Image, error)
	// MayPull reports whether an image that no runner has is looked for in a registry, and Pull has a runner make it. id names the pull.
	MayPull    func(ref string) bool
	Pull       func(ctx context.Context, id core.OperationID, ref string, res core.Resources, show func(runnerapi.PullState)) (core.Digest, error)
	Checkpoint func(ctx context.Context, project core.ProjectID, id core.CheckpointID) (model.Checkpoint, error)
	// File reads a file of a checkpoint of at most most bytes; FILE_NOT_FOUND.
	File func(ctx context.Context, project core.ProjectID, id core.CheckpointID, path string, most int) ([]byte, error)
}

// Builder builds images. It is safe for concurrent use.
type Builder struct {
	uses  Uses
	store Store
	log   *slog.Logger
}

// New makes a builder. It starts nothing.
func New(uses Uses, store Store, log *slog.Logger) *Builder { return &Builder{uses, store, log} }

// Admit counts a build, in the transaction that begins it.
func Admit(ctx context.Context, tx AdmitTx, project core.ProjectID) error {
	return tx.CountBuild(ctx, project, maxRunning)
}

// Publish makes the checkpoint of a build the image of its name, in the transaction that ends the build.
func Publish(ctx context.Context, tx AdmitTx, project core.ProjectID, image Image) (Image, error) {
	return tx.PutProjectImage(ctx, project, image, MaxImages)
}

// Check refuses a build that cannot be carried out, and fills in what it does not say.
func Check(s *Spec) error {
	if err := core.ValidateName("name", s.Name); err != nil {
		return err
	}
	switch {
	case s.Dockerfile == "" && s.From == "":
		return invalid("dockerfile", "give a Dockerfile, or from and steps")
	case s.Dockerfile != "" && (s.From != "" || len(s.Steps) > 0):
		return invalid("dockerfile", "it cannot be given together with from or steps")
	case s.Dockerfile == "" && (s.Context != "" || s.Target != "" || len(s.Args) > 0):
		return invalid("context", "context, target and build_args are for a Dockerfile")
	case len(s.Steps) > MaxSteps:
		return invalid("steps", "there are too many")
	}
	if s.Context != "" {
		if err := uploads.CheckID(s.Context); err != nil {
			return err
		}
	}
	if err := s.Resources.Validate(); err != nil {
		return err
	}
	if st := s.Start; st != nil {
		switch {
		case st.Command == "" || len(st.Command) > maxText:
			return invalid("start.command", "it is empty or too long")
		case st.Ready != nil && (st.Ready.Command == "") == (st.Ready.Port == 0):
			return invalid("start.ready", "give a command or a port")
		case st.Ready != nil && (st.Ready.Port < 0 || st.Ready.Port > 65535 || st.Ready.Seconds < 0 || st.Ready.Seconds > secondsHour || len(st.Ready.Command) > maxText):
			return invalid("start.ready", "the port is at most 65535, and the time at most an hour")
		}
	}
	_, err := s.plan(plan.Config{})
	return err
}

func invalid(field, detail string) error {
	return core.Errorf(core.Invalid, core.CodeInvalidField, "%s: %s", field, detail)
}

// from is the base.
func (s *Spec) from() (string, error) {
	if s.Dockerfile == "" {
		return s.From, nil
	}
	f, err := dockerfile.Parse(s.Dockerfile, s.Args, s.Target, s.Context)
	if err != nil {
		return "", err
	}
	return f.From, nil
}

// plan has the instructions of a build on a base.
func (s *Spec) plan(base plan.Config) ([]plan.Instruction, error) {
	if s.Dockerfile != "" {
		f, err := dockerfile.Parse(s.Dockerfile, s.Args, s.Target, s.Context)
		if err != nil {
			return nil, err
		}
		return f.Plan(base)
	}
	config := base.Clone()
	list := make([]plan.Instruction, 0, len(s.Steps))
	for i, step := range s.Steps {
		in, err := step.on(&config)
		if err != nil {
			return nil, core.Wrapf(err, core.Invalid, core.CodeOf(err), "steps.%d: %s", i, core.MessageOf(err))
		}
		list = append(list, in)
	}
	return list, nil
}

// on makes an instruction of a step, and changes the configuration as the step does.
func (s Step) on(config *plan.Config) (plan.Instruction, error) {
	var in plan.Instruction
	kinds := 0
	if s.Run != "" {
		kinds++
		in.Text, in.Command = "RUN "+s.Run, []string{"/bin/sh", "-c", s.Run}
	}
	if c := s.Copy; c != nil {
		kinds++
		if err := uploads.CheckID(c.Upload); err != nil {
			return in, err
		}
		in.Text = "COPY " + c.Path + " " + c.Dest
		in.Copy = &plan.Copy{Upload: c.Upload, Sources: []string{c.Path}, Dest: config.In(c.Dest), Dir: strings.HasSuffix(c.Dest, "/") || c.Dest == ".", Owner: c.User, Mode: c.Mode}
		if c.Path == "" {
			in.Copy.Sources = []string{"."}
		}
		if c.Dest == "" {
			return in, invalid("copy.dest", "it is missing")
		}
	}
	if len(s.Env) > 0 {
		kinds++
		in.Text = "ENV"
		for name, value := range s.Env {
			if err := plan.CheckEnv(name, value); err != nil {
				return in, err
			}
			config.Env[name] = value
		}
	}
	if s.Workdir != "" {
		kinds++
		in.Text, config.Workdir = "WORKDIR "+s.Workdir, config.In(s.Workdir)
		in.Dir = config.Workdir
	}
	if s.User != "" {
		kinds++
		in.Text, config.User = "USER "+s.User, s.User
	}
	if kinds != 1 {
		return in, invalid("run", "a step has one of run, copy, env, workdir and user")
	}
	if len(s.Run) > maxText {
		return in, invalid("run", "it is too long")
	}
	in.Text, in.Config = dockerfile.Line(in.Text), config.Clone()
	in.Env = in.Config.Env
	return in, in.Config.Check()
}

// Images lists the images of a project, by name.
func (b *Builder) Images(ctx context.Context, project core.ProjectID) (list []Image, err error) {
	err = b.store.InProject(ctx, project, func(tx Tx) (err error) {
		list, err = tx.ProjectImages(ctx, project)
		return err
	})
	return list, err
}

// Image returns an image of a project; IMAGE_NOT_FOUND.
func (b *Builder) Image(ctx context.Context, project core.ProjectID, name string) (image Image, err error) {
	err = b.store.InProject(ctx, project, func(tx Tx) (err error) {
		image, err = tx.ProjectImage(ctx, project, name)
		return err
	})
	return image, err
}

// Delete takes a name away. The checkpoint stays, and can be deleted then.
func (b *Builder) Delete(ctx context.Context, project core.ProjectID, name string) error {
	return b.store.InProject(ctx, project, func(tx Tx) error { return tx.DeleteProjectImage(ctx, project, name) })
}

// Log reads a part of the log of a build.
func (b *Builder) Log(ctx context.Context, project core.ProjectID, id core.OperationID, offset int64) (out Log, err error) {
	err = b.store.InProject(ctx, project, func(tx Tx) (err error) {
		out, err = tx.BuildLog(ctx, id, offset)
		return err
	})
	return out, err
}

// Sweep removes old logs.
func (b *Builder) Sweep(ctx context.Context) error {
	return sweep.Batches(ctx, sweepBatch, func(ctx context.Context) (n int, err error) {
		err = b.store.InSystem(ctx, func(tx Tx) (err error) {
			n, err = tx.SweepBuildLogs(ctx, logsKept, maxLogs, sweepBatch)
			return err
		})
		return n, err
	})
}

// preparation is what is done in the workspace of an instruction before its command. The row of the action keeps it.
type preparation struct {
	Dirs  []string   `json:"dirs,omitempty"` // of WORKDIR
	Copy  *plan.Copy `json:"copy,omitempty"`
	Start *Start     `json:"start,omitempty"`
	In    string     `json:"in,omitempty"` // the directory of Start
}

func (p preparation) json() (json.RawMessage, error) {
	if len(p.Dirs) == 0 && p.Copy == nil && p.Start == nil {
		return nil, nil
	}
	return json.Marshal(p) //nolint:wrapcheck // strings always have a form
}
