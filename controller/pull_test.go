package controller_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/imageref"
)

// pullsFrom lets projects pull from registries.
func pullsFrom(t testing.TB, list ...string) option {
	t.Helper()
	registries, err := imageref.ParseRegistries(list)
	if err != nil {
		t.Fatal(err)
	}
	return func(c *controller.Config, _ *runnertest.Config) { c.ImageRegistries = registries }
}

// TestBuildPulls builds on an image that no runner has: a runner pulls it, and the image is the project's, in no list of the fleet.
func TestBuildPulls(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pullsFrom(t, "registry.example", "http://127.0.0.1:5000"))
	var pulls atomic.Int32
	w.runner.SetPull(func(_ context.Context, in runnerapi.Pull, report func(runnerapi.PullState)) (runnerapi.PullState, error) {
		pulls.Add(1)
		if in.Reference != "registry.example/team/app:1.4" || len(in.Hosts) != 2 || len(in.PlainHTTP) != 1 {
			t.Errorf("the runner is asked for %+v", in)
		}
		s := runnerapi.PullState{Stage: runnerapi.PullUnpacking, Layers: 2, LayersDone: 2, Bytes: 7, BytesDone: 7}
		report(s)
		s.Reference, s.Manifest, s.Image = in.Reference, core.DigestOf([]byte("manifest")), core.DigestOf([]byte("pulled"))
		return s, nil
	})
	spec := builds.Spec{Name: "app", From: "registry.example/team/app:1.4"}
	image := w.build(spec)
	log := w.buildLog(image.Operation)
	for _, want := range []string{"pull registry.example/team/app:1.4", "2 of 2 layers, 7 of 7 bytes", "manifest sha256:"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log has no %q:\n%s", want, log)
		}
	}
	if again := w.build(spec); again.Checkpoint != image.Checkpoint || pulls.Load() != 2 {
		t.Errorf("built again: %+v after %d pulls; the tag may have moved", again, pulls.Load())
	}
	a, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Image: "app", Resources: smallest}, wait)
	if err != nil || a.Result.Workspace == nil {
		t.Fatalf("%+v, %v", a, err)
	}
	list, err := w.Fleet().Images(t.Context(), w.project, controller.Page{Limit: 10})
	if err != nil || len(list) != 1 || list[0].Name != "base" {
		t.Errorf("the images of the fleet: %+v, %v", list, err)
	}
	w.consistent()
}

// TestUnlistedImage: an image that was pulled for a project is found by its digest alone, and not by what is in the place of its name.
func TestUnlistedImage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pulled := runnertest.DefaultImage
	pulled.Name, pulled.Digest, pulled.Unlisted = "", core.DigestOf([]byte("pulled")), true
	w.runner.SetImages(runnertest.DefaultImage, pulled)
	if found, err := w.Fleet().FindImage(t.Context(), string(pulled.Digest)); err != nil || found.Digest != pulled.Digest || found.Name != "" {
		t.Errorf("by its digest: %+v, %v", found, err)
	}
	for _, ref := range []string{"/", "%", ""} {
		if found, err := w.Fleet().FindImage(t.Context(), ref); core.CodeOf(err) != core.CodeImageNotFound {
			t.Errorf("%q finds the image of any project: %+v, %v", ref, found, err)
		}
	}
	if _, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Image: "/", Resources: smallest}, wait); core.CodeOf(err) != core.CodeImageNotFound {
		t.Errorf("a workspace from the image of any project: %v", err)
	}
}

// TestRefusedPulls: nothing is asked of a runner unless the operator allows the registry and the text can only be a reference.
func TestRefusedPulls(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pullsFrom(t, "registry.example"))
	w.runner.SetPull(func(context.Context, runnerapi.Pull, func(runnerapi.PullState)) (runnerapi.PullState, error) {
		return runnerapi.PullState{}, core.Errorf(core.Invalid, "REGISTRY_REFUSED", "the layer is not what its digest says")
	})
	fails := func(from string, want core.Code) {
		t.Helper()
		_, err := w.BuildImage(t.Context(), w.project, builds.Spec{Name: "app", From: from, Resources: smallest, Egress: core.EgressDenyAll}, wait)
		if core.CodeOf(err) != want {
			t.Errorf("%s: %v, want %s", from, err, want)
		}
	}
	fails("python:3.12", core.CodePermissionDenied)
	fails("169.254.169.254/app:1", core.CodePermissionDenied)
	fails("nosuch", core.CodeImageNotFound)
	fails("registry.example/App:1", core.CodeInvalidField) // no repository has capitals
	fails("registry.example/app:1", "REGISTRY_REFUSED")
	if n := w.number(`SELECT count(*) FROM project_images`); n != 0 {
		t.Errorf("%d images", n)
	}
	none := newWorld(t)
	if _, err := none.BuildImage(t.Context(), none.project, builds.Spec{Name: "app", From: "python:3.12", Resources: smallest, Egress: core.EgressDenyAll}, wait); core.CodeOf(err) != core.CodeImageNotFound {
		t.Errorf("pulls are off: %v", err)
	}
}

// TestPullIsTakenOver kills the controller while a runner pulls. The next one goes on with the same pull.
func TestPullIsTakenOver(t *testing.T) {
	t.Parallel()
	allow := pullsFrom(t, imageref.Public)
	w := newWorld(t, allow)
	reached, open := make(chan struct{}, 2), make(chan struct{})
	var pulls atomic.Int32
	w.runner.SetPull(func(ctx context.Context, in runnerapi.Pull, _ func(runnerapi.PullState)) (runnerapi.PullState, error) {
		pulls.Add(1)
		reached <- struct{}{}
		select {
		case <-open:
		case <-ctx.Done():
		}
		return runnerapi.PullState{Image: core.DigestOf([]byte(in.Reference))}, ctx.Err()
	})
	begin := func(c *controller.Controller, from string) core.OperationID {
		t.Helper()
		a, err := c.BuildImage(t.Context(), w.project, builds.Spec{Name: "app", From: from, Resources: smallest, Egress: core.EgressDenyAll}, 0)
		if err != nil {
			t.Fatal(err)
		}
		<-reached
		return a.Operation.ID
	}
	id := begin(w.Controller, "app:1")
	w.stop()
	cfg := controller.Config{LoopInterval: 50 * time.Millisecond}
	allow(&cfg, nil)
	next, _ := w.start(cfg)
	close(open)
	end, err := next.Operation(t.Context(), w.project, id, 2*time.Minute)
	if err != nil || !end.Done || end.Operation.Problem != nil || end.Result.Image == nil || pulls.Load() != 1 {
		t.Fatalf("%+v, %v, %d pulls", end, err, pulls.Load())
	}
}
