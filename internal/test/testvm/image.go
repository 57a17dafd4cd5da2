package testvm

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// guestAgent is the main package of the guest agent.
const guestAgent = "cmd/coppice-guest"

// Packages are the Debian packages of the image on top of those that every image has: examples/mcts needs them. All tests
// share one image, because the build of a second one takes a minute.
func Packages() []string { return []string{"python3-toolz"} }

// Image returns a store with the real image, named images.DefaultName, with the guest agent of this tree. It is built
// once per machine and state of the tree. That takes a minute with an empty cache, and a second or two if only the
// agent has changed. The store is shared: tests must not remove anything from it.
func Image(t testing.TB) (*images.Store, images.Image) {
	t.Helper()
	QEMU(t, "")
	require.Root(t)
	require.That(t, Requirement, Prepared() != "" || len(build.MissingPrograms()) == 0, cure)
	built.once.Do(func() {
		if dir := Prepared(); dir != "" {
			built.store, built.image, built.err = PreparedStore(dir)
			return
		}
		built.store, built.image, built.err = buildImage(program(t, guestAgent))
	})
	if built.err != nil {
		t.Fatalf("build the image: %v", built.err)
	}
	return built.store, built.image
}

// built is the result of the first call of Image.
var built struct {
	once  sync.Once
	store *images.Store
	image images.Image
	err   error
}

func buildImage(agent string) (*images.Store, images.Image, error) {
	store, err := openStore()
	if err != nil {
		return nil, images.Image{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	img, err := build.Image(ctx, store, build.Options{AgentBinary: agent, Packages: Packages()})
	if err != nil {
		return nil, images.Image{}, err
	}
	return store, img, prune(ctx, store, img)
}

// prune removes images of earlier states of the tree.
func prune(ctx context.Context, store *images.Store, current images.Image) error {
	all, err := store.List()
	if err != nil {
		return err
	}
	for _, img := range all {
		if img.Name != "" || img.Digest == current.Digest || time.Since(img.CreatedAt) < keep {
			continue
		}
		if err := store.Remove(ctx, string(img.Digest)); err != nil && core.CodeOf(err) != core.CodeImageNotFound { // another process may be faster
			return err
		}
	}
	return nil
}
