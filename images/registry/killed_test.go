package registry

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// The variables by which TestKilledPull tells its child what to do.
const (
	childStore = "REGISTRY_TEST_STORE"
	childHost  = "REGISTRY_TEST_HOST"
)

// TestPullInner is the process that TestKilledPull kills.
func TestPullInner(t *testing.T) {
	dir := os.Getenv(childStore)
	if dir == "" {
		return
	}
	store, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := store.Layers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, err = Pull(t.Context(), layers, opts(os.Getenv(childHost), "app:1"))
	t.Fatalf("the pull ended: %v", err)
}

// TestKilledPull kills a pull in the middle of a layer. The next one finds no lock, and asks for the rest only.
func TestKilledPull(t *testing.T) {
	t.Parallel()
	s := &shelf{t: t}
	_, want := s.honest()
	whole := s.blobs[want[0].Digest]
	half := len(whole) / 2
	var second atomic.Bool
	var asked atomic.Value
	s.front = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, string(want[0].Digest)) {
			return false
		}
		if !second.Load() {
			w.Header().Set("Content-Length", fmt.Sprint(len(whole)))
			_, _ = w.Write(whole[:half])
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return true
		}
		asked.Store(r.Header.Get("Range"))
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", half, len(whole)-1, len(whole)))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(whole[half:])
		return true
	}
	host := s.start(t)
	store, err := images.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), self, "-test.run", "^TestPullInner$")
	child.Env = append(os.Environ(), childStore+"="+store.Dir(), childHost+"="+host)
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	part := filepath.Join(store.Dir(), "layers", "part-"+want[0].Digest.Hex())
	eventually.True(t, "half of the layer is in the store", func() bool {
		info, err := os.Stat(part)
		return err == nil && info.Size() == int64(half)
	})
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := child.Wait(); err == nil {
		t.Error("the killed pull ended well")
	}
	second.Store(true)
	layers, err := store.Layers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer layers.Close()
	if _, err := Pull(t.Context(), layers, opts(host, "app:1")); err != nil {
		t.Fatal(err)
	}
	if got, want := asked.Load(), fmt.Sprintf("bytes=%d-%d", half, len(whole)-1); got != want {
		t.Errorf("the second pull asked for %v, want %s", got, want)
	}
	if f, err := images.HashFile(layers.Path(want[0].Digest)); err != nil || f.Digest != want[0].Digest {
		t.Errorf("the layer in the store: %v, %v", f, err)
	}
	if _, err := os.Stat(part); !os.IsNotExist(err) {
		t.Errorf("the part is still there: %v", err)
	}
}
