package builds

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/controller/builds/plan"
	"github.com/coppice-dev/coppice/controller/builds/tarcopy"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/controller/uploads"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// afterInstruction is where a controller may be killed between two instructions.
var afterInstruction = failpoint.New("controller.after_build_instruction")

// The files that give sessions their defaults; the agent reads them.
const (
	envFile  = "/etc/coppice/env"
	userFile = "/etc/coppice/user"
	dirFile  = "/etc/coppice/workdir"
)

// Job is a build that this controller works on.
type Job struct {
	steps.Ref
	Spec    *Spec
	Created time.Time
	// Create begins a workspace from an image of the runners, and Fork one from a checkpoint. Both wait in line for room.
	Create func(ctx context.Context, image string, note steps.Note) error
	// Fork gives the workspace the rules of the build if network is set, and otherwise those that the checkpoint has.
	Fork func(ctx context.Context, id core.CheckpointID, network bool, note steps.Note) error
	// Lease returns nil while no other controller can have claimed the build.
	Lease func(ctx context.Context) error
	// Progress says at which instruction the build is.
	Progress func(ctx context.Context, step string) error
}

// build is the work on one build.
type build struct {
	*Builder
	Job
	ctx     context.Context //nolint:containedctx // of the work, for the log
	head    core.CheckpointID
	key     string
	total   int // instructions, with the base and the end
	cached  int
	network core.CheckpointID // the checkpoint whose forks get the rules of the build; others have them
	dirs    []string          // that the next machine makes
}

// Run builds. The image that it returns has no name yet; see Publish.
func (b *Builder) Run(ctx context.Context, job Job) (Image, error) {
	ctx, cancel := context.WithDeadlineCause(ctx, job.Created.Add(buildTime), errTooLong)
	defer cancel()
	w := &build{Builder: b, Job: job, ctx: ctx}
	image := Image{Name: job.Spec.Name, Operation: job.ID, Labels: job.Spec.Labels}
	list, config, err := w.begin(ctx, &image)
	if err != nil {
		return image, w.failed(ctx, err)
	}
	for i, in := range list {
		if err := w.instruct(ctx, i+1, in); err != nil {
			return image, w.failed(ctx, err)
		}
		config = in.Config
	}
	if err := w.finish(ctx, len(list)+1, config); err != nil {
		return image, w.failed(ctx, err)
	}
	image.Checkpoint, image.Config, image.Steps, image.Cached = w.head, config, w.total, w.cached
	return image, nil
}

var errTooLong = core.Errorf(core.TimedOut, core.CodeTimedOut, "the build has taken longer than %v", buildTime)

// failed writes into the log why a build ends.
func (w *build) failed(ctx context.Context, err error) error {
	if ctx.Err() == nil && !errors.Is(err, operations.ErrLeaseLost) {
		w.say("ERROR: %s\n", core.MessageOf(err))
	}
	return err
}

// say appends to the log. What cannot be written is left out: the log is for people.
func (w *build) say(format string, args ...any) { w.write(fmt.Appendf(nil, format, args...)) }

func (w *build) write(data []byte) {
	if len(data) == 0 {
		return
	}
	if err := w.store.InProject(w.ctx, w.Project, func(tx Tx) error { return tx.AppendBuildLog(w.ctx, w.Ref, data, maxLog) }); err != nil {
		w.log.InfoContext(w.ctx, "log of a build not written", "operation_id", w.ID, "err", err)
	}
}

func digestOf(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		_, _ = fmt.Fprintf(h, "%d:%s\n", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil)[:20])
}

// environment is an environment in one form.
func environment(env map[string]string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(env)) {
		_, _ = fmt.Fprintf(&b, "%s=%s\n", name, env[name])
	}
	return b.String()
}

// instruct carries out one instruction.
func (w *build) instruct(ctx context.Context, index int, in plan.Instruction) error {
	if in.Dir != "" && !slices.Contains(w.dirs, in.Dir) {
		w.dirs = append(w.dirs, in.Dir)
	}
	if in.Command == nil && in.Copy == nil {
		w.say("#%d [%d/%d] %s\n#%[1]d DONE 0.0s\n", index+1, index+1, w.total, in.Text)
		w.cached++
		return nil
	}
	prepare := preparation{Dirs: w.dirs, Copy: in.Copy}
	var action steps.Action
	parts := []string{w.key, strings.Join(w.dirs, "\n")}
	if in.Copy != nil {
		u, err := w.upload(ctx, *in.Copy)
		if err != nil {
			return err
		}
		selected, err := tarcopy.Select(*in.Copy, w.open(ctx, u))
		if err != nil {
			return w.at(in, err)
		}
		in.Copy.Dir, in.Copy.Data = selected.Dir, u.Data
		parts = append(parts, "copy", selected.Digest, in.Copy.Dest, strconv.FormatBool(in.Copy.Dir), in.Copy.Owner, in.Copy.Mode)
	} else {
		action.Command = &guestclient.ExecRequest{
			Command: in.Command, Cwd: cmp.Or(in.Config.Workdir, "/"), Env: in.Env, User: cmp.Or(in.Config.User, "root"), TimeoutMS: runTime.Milliseconds(),
		}
		parts = append(parts, "run", strings.Join(in.Command, "\x00"), environment(in.Env), in.Config.Workdir, in.Config.User)
	}
	w.key = digestOf(parts...)
	var err error
	if action.Prepare, err = prepare.json(); err != nil {
		return err
	}
	w.dirs = nil
	if err := w.machine(ctx, index, in.Text, action, nil); err != nil {
		return w.at(in, err)
	}
	return nil
}

// at names the instruction in an error about it.
func (w *build) at(in plan.Instruction, err error) error {
	switch core.CodeOf(err) {
	case core.CodeBuildFailed, core.CodeFileNotFound, core.CodeMalformedBody, core.CodeInvalidField:
	default:
		return err
	}
	where := in.Text
	if in.Line > 0 {
		where = fmt.Sprintf("Dockerfile, line %d: %s", in.Line, in.Text)
	}
	return core.Wrapf(err, core.CategoryOf(err), core.CodeOf(err), "%s: %s", where, core.MessageOf(err))
}

func (w *build) upload(ctx context.Context, c plan.Copy) (uploads.Upload, error) {
	if len(c.Sources) == 0 {
		return uploads.Upload{}, nil
	}
	return w.uses.Uploads.Get(ctx, w.Project, c.Upload)
}

func (w *build) open(ctx context.Context, u uploads.Upload) tarcopy.Open {
	return func() io.Reader { return w.uses.Uploads.Open(ctx, w.Project, u) }
}

// finish writes the defaults of sessions, starts the program, and waits until it is ready.
func (w *build) finish(ctx context.Context, index int, config plan.Config) error {
	var env, user, dir string
	env = environment(config.Env)
	if config.User != "" {
		user = config.User + "\n"
	}
	if config.Workdir != "" {
		dir = config.Workdir + "\n"
	}
	action := steps.Action{Files: []guestclient.PutFile{{Path: envFile, Content: []byte(env)}, {Path: userFile, Content: []byte(user)}, {Path: dirFile, Content: []byte(dir)}}}
	parts := []string{w.key, "end", env, user, dir, strings.Join(w.dirs, "\n")}
	text := "the image"
	prepare := preparation{Dirs: w.dirs}
	if s := w.Spec.Start; s != nil {
		text = "START " + s.Command
		prepare.Start, prepare.In = s, config.Workdir
		b, err := json.Marshal(s)
		if err != nil {
			return fmt.Errorf("encode start: %w", err)
		}
		parts = append(parts, string(b))
		action.Command = s.ready(config)
	}
	w.key = digestOf(parts...)
	var err error
	if action.Prepare, err = prepare.json(); err != nil {
		return err
	}
	err = w.machine(ctx, index, text, action, nil)
	if core.CodeOf(err) == core.CodeBuildFailed && w.Spec.Start != nil {
		return core.Wrapf(err, core.FailedPrecondition, core.CodeBuildFailed, "the program of start was not ready: %s", core.MessageOf(err))
	}
	return err
}

// ready is the command that ends when the program is ready; nil: nobody waits.
func (s *Start) ready(config plan.Config) *guestclient.ExecRequest {
	if s.Ready == nil {
		return nil
	}
	check := "(" + s.Ready.Command + "\n)"
	if s.Ready.Port != 0 {
		check = fmt.Sprintf("cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -Eq ':%04X [0-9A-F]+:0000 0A'", s.Ready.Port)
	}
	within := cmp.Or(time.Duration(s.Ready.Seconds)*time.Second, readyTime)
	return &guestclient.ExecRequest{
		Command: []string{"/bin/sh", "-c", "until " + check + "; do sleep 0.2 || sleep 1; done"}, Cwd: cmp.Or(config.Workdir, "/"), User: cmp.Or(s.User, config.User, "root"),
		Env: s.Env, TimeoutMS: within.Milliseconds(),
	}
}

// machine carries out an instruction that changes the machine, unless the cache has its checkpoint. create makes the workspace of the first one.
func (w *build) machine(ctx context.Context, index int, text string, action steps.Action, create func(context.Context, steps.Note) error) error {
	w.say("#%d [%d/%d] %s\n", index+1, index+1, w.total, text)
	if err := w.Progress(ctx, fmt.Sprintf("%d/%d", index+1, w.total)); err != nil {
		return err
	}
	rows, err := w.uses.Steps.Rows(ctx, w.Project, w.ID)
	if err != nil {
		return err
	}
	begun := slices.ContainsFunc(rows, func(r steps.Row) bool { return r.Index == index })
	if !begun && !w.Spec.NoCache {
		hit, err := w.lookup(ctx)
		if err != nil {
			return err
		}
		if hit != "" {
			if index == 0 {
				if err := w.settle(ctx, hit); err != nil {
					return err
				}
			}
			w.head = hit
			w.cached++
			w.say("#%d CACHED\n", index+1)
			return nil
		}
	}
	zero := 0
	action.Keep, action.OnlyIf = steps.KeepCheckpoint, steps.Condition{}
	if action.Command != nil {
		action.OnlyIf.ExitCode = &zero
	}
	action.Name = "build-" + core.Short(w.ID) + "-" + strconv.Itoa(index)
	action.Node = steps.Node{Labels: map[string]string{Label: w.key}}
	if err := w.uses.Steps.Add(ctx, w.Ref, index, action); err != nil {
		return err
	}
	since := time.Now()
	from := w.head
	step := steps.Step{
		Ref: w.Ref, Parallel: 1, Created: w.Created, Lease: w.Lease, Prepare: w.prepare, Follow: w.write,
		Fork: func(ctx context.Context, _ *steps.Row, note steps.Note) error {
			if create != nil {
				return create(ctx, note)
			}
			return w.Fork(ctx, from, from == w.network, note)
		},
	}
	result, err := w.uses.Steps.RunOne(ctx, step, index)
	if err == nil {
		err = problemOf(result)
	}
	if err != nil {
		return err
	}
	w.head = result.Checkpoint
	if begun { // an earlier attempt may have found another image or upload
		if err := w.keyOf(ctx, w.head); err != nil {
			return err
		}
	}
	w.say("#%d DONE %.1fs\n", index+1, time.Since(since).Seconds())
	return afterInstruction.Hit(ctx)
}

// keyOf makes the key of a checkpoint that of the build.
func (w *build) keyOf(ctx context.Context, id core.CheckpointID) error {
	cp, err := w.uses.Checkpoint(ctx, w.Project, id)
	w.key = cmp.Or(cp.Labels[Label], digestOf("checkpoint", string(id)))
	return err
}

func (w *build) lookup(ctx context.Context) (id core.CheckpointID, err error) {
	err = w.store.InProject(ctx, w.Project, func(tx Tx) (err error) {
		id, err = tx.BuildCheckpoint(ctx, w.Project, w.key)
		return err
	})
	return id, err
}

// problemOf says why an instruction failed.
func problemOf(r steps.Result) error {
	switch {
	case r.Problem != nil:
		return core.Errorf(categories[r.Problem.Code], r.Problem.Code, "%s", r.Problem.Message)
	case r.Kept == steps.KeepCheckpoint && r.Checkpoint != "":
		return nil
	}
	how := "was ended by signal " + r.Signal
	switch {
	case r.TimedOut:
		how = "did not end in time"
	case r.ExitCode != nil && r.Signal == "":
		how = "ended with exit status " + strconv.Itoa(*r.ExitCode)
	}
	said := tail(r.Stderr)
	if said == "" {
		said = tail(r.Stdout)
	}
	if said != "" {
		how += "; its last lines:\n" + said
	}
	return core.Errorf(core.FailedPrecondition, core.CodeBuildFailed, "the command %s", how)
}

// categories are those of problems that a row keeps without one. Others are failures of the preparation.
var categories = map[core.Code]core.Category{
	core.CodeQuotaExceeded: core.Exhausted, core.CodeCapacity: core.Exhausted, core.CodeTimedOut: core.TimedOut, core.CodeInternal: core.Internal,
	core.CodeOperationCanceled: core.Canceled, core.CodeFileNotFound: core.NotFound, core.CodeUploadNotFound: core.NotFound,
	core.CodeCheckpointNotFound: core.NotFound,
}

// tail is the end of an output.
func tail(b []byte) string {
	b = bytes.TrimSpace(b)
	if len(b) > lastBytes {
		b = b[len(b)-lastBytes:]
		for len(b) > 0 && !utf8.RuneStart(b[0]) {
			b = b[1:]
		}
	}
	lines := bytes.Split(b, []byte("\n"))
	if len(lines) > lastLines {
		lines = lines[len(lines)-lastLines:]
	}
	return strings.ToValidUTF8(string(bytes.Join(lines, []byte("\n"))), "?")
}

// prepare is steps.Step.Prepare: it makes directories, copies files and starts the program.
func (w *build) prepare(ctx context.Context, ws model.Workspace, row *steps.Row) error {
	var p preparation
	if err := json.Unmarshal(row.Action.Prepare, &p); err != nil {
		return fmt.Errorf("read what to prepare: %w", err)
	}
	for _, dir := range p.Dirs {
		if _, err := w.uses.Guests.MakeDirectory(ctx, ws.Sandbox, guestclient.MakeDirectory{Path: dir, Mode: "0755", Parents: true}); err != nil {
			return err
		}
	}
	if p.Copy != nil {
		if err := w.copy(ctx, ws.Sandbox, *p.Copy); err != nil {
			return err
		}
	}
	if s := p.Start; s != nil {
		req := guestclient.ExecRequest{Command: []string{"/bin/sh", "-c", s.Command}, Cwd: cmp.Or(p.In, "/"), User: s.User, Env: s.Env}
		return w.uses.Start(steps.Bind(ctx, w.ID, row.Index, ":start"), w.Project, ws.ID, req)
	}
	return nil
}

// copy unpacks what a copy selects in the guest.
func (w *build) copy(ctx context.Context, s model.Sandbox, c plan.Copy) error {
	u, err := w.upload(ctx, c)
	if err == nil && u.Data != c.Data {
		err = core.Errorf(core.NotFound, core.CodeUploadNotFound, "upload %s was replaced while the build used it; repeat the build", u.ID)
	}
	if err != nil {
		return err
	}
	dir := c.Dir
	if !dir {
		info, err := w.uses.Guests.Stat(ctx, s, c.Dest)
		if err != nil && core.CodeOf(err) != core.CodeFileNotFound {
			return err
		}
		dir = err == nil && info.Type == "dir"
	}
	owner, err := w.owner(ctx, s, c.Owner)
	if err != nil {
		return err
	}
	from, to := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		err := tarcopy.Write(c, dir, owner, w.open(ctx, u), to)
		_ = to.CloseWithError(err)
		sent <- err
	}()
	err = w.uses.Guests.PutTar(ctx, s, tarcopy.Place(c, dir), from, copyTime)
	_ = from.CloseWithError(errDone)
	if wrote := <-sent; wrote != nil && !errors.Is(wrote, errDone) {
		return wrote
	}
	return err
}

var errDone = errors.New("the guest reads no more")

// owner finds the ids of user[:group] in the guest.
func (w *build) owner(ctx context.Context, s model.Sandbox, text string) (tarcopy.Owner, error) {
	var out tarcopy.Owner
	if text == "" {
		return out, nil
	}
	user, group, both := strings.Cut(text, ":")
	id, primary, err := w.account(ctx, s, "/etc/passwd", user)
	if err != nil {
		return out, err
	}
	out.UID, out.GID = id, primary
	if both && group != "" {
		out.GID, _, err = w.account(ctx, s, "/etc/group", group)
	}
	return out, err
}

// account finds a name or a number in a file of accounts. second is the number in the fourth field, or the same number.
func (w *build) account(ctx context.Context, s model.Sandbox, file, name string) (id, second int, err error) {
	number, numeric := strconv.Atoi(name)
	b, err := w.uses.Guests.ReadFile(ctx, s, path.Clean(file), maxAccounts)
	if err != nil && core.CodeOf(err) != core.CodeFileNotFound {
		return 0, 0, err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) < 4 || f[0] != name && f[2] != name {
			continue
		}
		id, err = strconv.Atoi(f[2])
		if second, _ = strconv.Atoi(f[3]); err == nil {
			return id, second, nil
		}
	}
	if numeric == nil && number >= 0 {
		return number, number, nil
	}
	return 0, 0, core.Errorf(core.FailedPrecondition, core.CodeBuildFailed, "%s of the image has no %q", file, core.Clip(name))
}

// TakeBack ends what a build has begun.
func (b *Builder) TakeBack(ctx context.Context, job Job, why error) error {
	return b.uses.Steps.TakeBack(ctx, steps.Step{Ref: job.Ref, Parallel: 1, Created: job.Created, Lease: job.Lease}, why)
}
