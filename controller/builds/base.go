package builds

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/builds/plan"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// begin finds or makes the base.
func (w *build) begin(ctx context.Context, image *Image) ([]plan.Instruction, plan.Config, error) {
	from, err := w.Spec.from()
	if err != nil {
		return nil, plan.Config{}, err
	}
	image.From, image.Open = from, true
	rows, err := w.uses.Steps.Rows(ctx, w.Project, w.ID)
	if err != nil {
		return nil, plan.Config{}, err
	}
	row := first(rows)
	text := "FROM " + from
	base, config, known, err := w.known(ctx, from, image)
	if err != nil {
		return nil, config, err
	}
	if known && row.Workspace != "" { // an earlier attempt began it when the name was that of an image of the runners
		known, config, image.Open = false, plan.Config{}, true
	}
	list, err := w.Spec.plan(config) // again below, when the configuration of the base is known
	if err != nil {
		return nil, config, err
	}
	w.total = len(list) + 2
	if known {
		return w.from(ctx, text, base, config, list, row, image)
	}
	found, err := w.image(ctx, from)
	if err != nil {
		return nil, config, err
	}
	r := w.Spec.Resources
	w.key = digestOf("image", string(found), strconv.Itoa(r.VCPUs), strconv.Itoa(r.MemoryMiB), strconv.Itoa(r.DiskGiB), string(w.Spec.Egress), strings.Join(w.Spec.Allow, " "))
	made := w.key
	create := func(ctx context.Context, note steps.Note) error { return w.Create(ctx, string(found), note) }
	if err := w.machine(ctx, 0, text, steps.Action{}, create); err != nil {
		return nil, config, err
	}
	if row.Workspace == "" && row.Phase == steps.Ended && w.key != made {
		if err := w.inherit(ctx, image); err != nil {
			return nil, config, err
		}
	}
	if config, err = w.configOf(ctx, w.head); err != nil {
		return nil, config, err
	}
	list, err = w.Spec.plan(config)
	return list, config, err
}

// from begins with a checkpoint that there is.
func (w *build) from(
	ctx context.Context, text string, base core.CheckpointID, config plan.Config, list []plan.Instruction, row steps.Row, image *Image,
) ([]plan.Instruction, plan.Config, error) {
	if row.Phase != steps.Ended {
		if err := w.settle(ctx, base); err != nil {
			return nil, config, err
		}
	}
	// An earlier attempt may have found another checkpoint under the name.
	settled, err := w.uses.Steps.RunOne(ctx, steps.Step{Ref: w.Ref, Parallel: 1, Created: w.Created, Lease: w.Lease}, 0)
	if err != nil {
		return nil, config, err
	}
	if settled.Checkpoint != base {
		base = settled.Checkpoint
		cp, err := w.uses.Checkpoint(ctx, w.Project, base)
		if err != nil {
			return nil, config, err
		}
		image.Open = cp.Published
		if config, err = w.configOf(ctx, base); err != nil {
			return nil, config, err
		}
		if list, err = w.Spec.plan(config); err != nil {
			return nil, config, err
		}
	}
	if err := w.keyOf(ctx, base); err != nil {
		return nil, config, err
	}
	if image.Open {
		w.network, w.key = base, digestOf(w.key, string(w.Spec.Egress), strings.Join(w.Spec.Allow, " "))
	}
	w.head, w.cached = base, w.cached+1
	w.say("#1 [1/%d] %s\n#1 CACHED\n", w.total, text)
	return list, config, nil
}

// first is the row of the base; the zero value: there is none.
func first(rows []steps.Row) (row steps.Row) {
	if i := slices.IndexFunc(rows, func(r steps.Row) bool { return r.Index == 0 }); i >= 0 {
		row = rows[i]
	}
	return row
}

// inherit gives the build the limits of its base, when an earlier attempt found an image of the project that has gone.
func (w *build) inherit(ctx context.Context, image *Image) error {
	cp, err := w.uses.Checkpoint(ctx, w.Project, w.head)
	if err != nil {
		return err
	}
	if image.Open = cp.Published; image.Open {
		w.network, w.key = w.head, digestOf(w.key, string(w.Spec.Egress), strings.Join(w.Spec.Allow, " "))
	}
	return nil
}

// known finds a base that is a checkpoint already: an image of the project, or a checkpoint by its id.
func (w *build) known(ctx context.Context, from string, image *Image) (core.CheckpointID, plan.Config, bool, error) {
	config := plan.Config{}
	id, err := core.ParseID[core.CheckpointID](from)
	if err == nil {
		// Its forks never reach more than its workspace did.
		image.Open = false
	} else {
		var of Image
		err := w.store.InProject(ctx, w.Project, func(tx Tx) (err error) {
			of, err = tx.ProjectImage(ctx, w.Project, from)
			return err
		})
		if core.CodeOf(err) == core.CodeImageNotFound {
			return "", config, false, nil
		}
		if err != nil {
			return "", config, false, err
		}
		id, config, image.Open = of.Checkpoint, of.Config, of.Open
	}
	cp, err := w.uses.Checkpoint(ctx, w.Project, id)
	switch {
	case err != nil:
		return "", config, false, err
	case cp.Resources != w.Spec.Resources:
		return "", config, false, ShapeError(from, cp.Resources)
	}
	if config.Env == nil {
		config, err = w.configOf(ctx, id)
	}
	return id, config, true, err
}

// ShapeError says that a checkpoint has other resources than a request wants.
func ShapeError(image string, has core.Resources) error {
	return core.Errorf(core.Invalid, core.CodeImageShape, "resources: the machines of %s have %d vCPUs, %d MiB of memory and %d GiB of disk; leave resources out, or build it with others",
		core.Clip(image), has.VCPUs, has.MemoryMiB, has.DiskGiB)
}

// configOf reads the defaults of sessions out of a checkpoint.
func (w *build) configOf(ctx context.Context, id core.CheckpointID) (plan.Config, error) {
	config := plan.Config{Env: map[string]string{}}
	read := func(name string) (string, error) {
		b, err := w.uses.File(ctx, w.Project, id, name, maxAccounts)
		if core.CodeOf(err) == core.CodeFileNotFound {
			return "", nil
		}
		return string(b), err
	}
	env, err := read(envFile)
	if err != nil {
		return config, err
	}
	for line := range strings.Lines(env) {
		if name, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "="); ok && plan.CheckEnv(name, value) == nil {
			config.Env[name] = value
		}
	}
	user, err := read(userFile)
	if err != nil {
		return config, err
	}
	dir, err := read(dirFile)
	config.User, _, _ = strings.Cut(user, "\n")
	config.Workdir, _, _ = strings.Cut(dir, "\n")
	if err == nil {
		err = config.Check()
	}
	return config, err
}

// settle writes the row of a base that need not be made.
func (w *build) settle(ctx context.Context, base core.CheckpointID) error {
	if err := w.uses.Steps.Add(ctx, w.Ref, 0, steps.Action{}); err != nil {
		return err
	}
	return w.uses.Steps.Settle(ctx, w.Ref, 0, steps.Result{Kept: steps.KeepCheckpoint, Checkpoint: base})
}

// image finds the image of the runners on which the build is based. If none has it, and it is the reference of an image in a registry, a runner
// pulls it.
func (w *build) image(ctx context.Context, from string) (core.Digest, error) {
	found, err := w.uses.FindImage(ctx, from)
	if core.CodeOf(err) != core.CodeImageNotFound || !w.uses.MayPull(from) {
		return found.Digest, err
	}
	w.say("#1 pull %s\n", from)
	var last runnerapi.PullState
	var at time.Time
	digest, err := w.uses.Pull(ctx, w.ID, from, w.Spec.Resources, func(s runnerapi.PullState) {
		if s == last || s.Stage == last.Stage && !s.Done && time.Since(at) < pullEvery {
			return
		}
		last, at = s, time.Now()
		text := s.Stage
		if s.Layers > 0 {
			text = fmt.Sprintf("%s: %d of %d layers, %d of %d bytes", s.Stage, s.LayersDone, s.Layers, s.BytesDone, s.Bytes)
		}
		w.say("#1 %s\n", text)
		if err := w.Progress(ctx, "pull "+text); err != nil {
			w.log.InfoContext(ctx, "progress of a pull not written", "operation_id", w.ID, "err", err)
		}
	})
	if err == nil {
		w.say("#1 pulled %s, manifest %s\n", last.Reference, last.Manifest)
	}
	return digest, err
}
