package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testvm"
)

// builds holds what is built once per test binary.
var builds struct {
	mu   sync.Mutex // guards what follows
	dir  string
	done map[string]func() (string, error)
}

// program builds a package of this module, or takes what was prepared, and returns the path of the executable.
func program(t *testing.T, pkg string) string {
	t.Helper()
	if dir := testvm.Prepared(); dir != "" {
		path, err := testvm.PreparedProgram(dir, pkg)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	builds.mu.Lock()
	if builds.dir == "" {
		dir, err := os.MkdirTemp("", binPrefix) //nolint:usetesting // it outlives this test
		if err != nil {
			builds.mu.Unlock()
			t.Fatal(err)
		}
		builds.dir, builds.done = dir, map[string]func() (string, error){}
	}
	compile, ok := builds.done[pkg]
	if !ok {
		out := filepath.Join(builds.dir, filepath.Base(pkg))
		compile = sync.OnceValues(func() (string, error) {
			return out, testvm.Compile(context.Background(), out, "github.com/coppice-dev/coppice/"+pkg) //nolint:usetesting // it outlives this test
		})
		builds.done[pkg] = compile
	}
	builds.mu.Unlock()
	path, err := compile()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func cleanBuilds() {
	builds.mu.Lock()
	defer builds.mu.Unlock()
	if builds.dir != "" {
		_ = os.RemoveAll(builds.dir)
	}
}

// imageStore is kept between runs: what an image is made of decides whether it is made again.
func imageStore(t *testing.T) *images.Store {
	t.Helper()
	store, _ := testvm.Image(t)
	return store
}

// baseImage returns the digest of the image that all packages share.
func baseImage(t *testing.T) core.Digest {
	t.Helper()
	needVM(t)
	_, img := testvm.Image(t)
	return img.Digest
}

// image builds an image unless it is there, and returns its digest. The agent is a package of this module.
func image(t *testing.T, name, agent string, packages ...string) core.Digest {
	t.Helper()
	needVM(t)
	if testvm.Prepared() != "" {
		t.Fatalf("the image %s was not prepared", name)
	}
	store := imageStore(t)
	img, err := build.Image(t.Context(), store, build.Options{
		Name: name, AgentBinary: program(t, agent), Packages: append(packages, testvm.Packages()...), Log: &tail{t: t},
		Progress: func(e build.Event) {
			if e.Done {
				t.Logf("image %s: %s %s (%.1f s)", name, e.Stage, e.Msg, e.Duration.Seconds())
			}
		},
	})
	if err != nil {
		t.Fatalf("build image %s: %v", name, err)
	}
	return img.Digest
}

const (
	guestAgent = "cmd/coppice-guest"
	probe      = "internal/test/e2e/guestprobe"
)

// needVM skips, or fails, where no VM can be run.
func needVM(t *testing.T) {
	t.Helper()
	boundTime(t)
	require.Root(t)
	_, err := exec.LookPath("qemu-system-x86_64")
	require.That(t, "vm", err == nil && (testvm.Prepared() != "" || len(build.MissingPrograms()) == 0), "make setup")
}

// patienceOfATest is how long a test may take before the run ends with its name. The slowest takes two minutes on two cores.
const patienceOfATest = 15 * time.Minute

// watched are the tests that have a watchdog.
var watched sync.Map

// boundTime ends the run, with the stacks of all goroutines and the end of the shared server's log, when the test does not end.
// A test that hangs would else be known only when the time of the whole package is over.
func boundTime(t *testing.T) {
	t.Helper()
	if *long {
		return
	}
	name, _, _ := strings.Cut(t.Name(), "/")
	if _, has := watched.LoadOrStore(name, true); has {
		return
	}
	timer := time.AfterFunc(patienceOfATest, func() {
		if shared.mu.TryLock() && shared.stack != nil {
			b, _ := os.ReadFile(shared.stack.logFile()) // it is shown if there is one
			fmt.Fprintf(os.Stderr, "the shared server's log ends with:\n%s\n", b[max(0, len(b)-64<<10):])
		}
		debug.SetTraceback("all")
		panic(fmt.Sprintf("%s did not end within %s", name, patienceOfATest))
	})
	t.Cleanup(func() {
		timer.Stop()
		watched.Delete(name)
	})
}

// tail gives the output of a program to the log of the test that started it.
type tail struct{ t *testing.T }

func (w *tail) Write(p []byte) (int, error) {
	if testing.Verbose() && errors.Is(w.t.Context().Err(), nil) {
		w.t.Logf("%s", p)
	}
	return len(p), nil
}
