package daemon

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testvm"
)

// pullRig is a real registry with an image, and a store with an image that has the form of one.
type pullRig struct {
	host  string
	store *images.Store
	base  images.Image
	front func(http.ResponseWriter, *http.Request) bool
}

func newPullRig(t *testing.T) *pullRig {
	t.Helper()
	require.That(t, "image", os.Geteuid() == 0 && len(build.MissingPrograms()) == 0, "make setup, then run the tests as root")
	r := &pullRig{}
	r.store, r.base = testvm.FakeImage(t)
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if r.front == nil || !r.front(w, q) {
			inner.ServeHTTP(w, q)
		}
	}))
	t.Cleanup(server.Close)
	r.host = strings.TrimPrefix(server.URL, "http://")
	return r
}

// push puts an image with a file into the registry.
func (r *pullRig) push(t *testing.T, tag, file, text string) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{Name: file, Typeflag: tar.TypeReg, Mode: 0o4755, Size: int64(len(text))})
	if err == nil {
		_, err = io.WriteString(w, text)
	}
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err == nil {
		img, err = mutate.ConfigFile(img, &v1.ConfigFile{OS: "linux", Architecture: r.base.Architecture, Config: v1.Config{Env: []string{"A=b"}}, RootFS: v1.RootFS{Type: "layers", DiffIDs: diffs(t, layer)}})
	}
	ref, bad := name.NewTag(r.host+"/"+tag, name.Insecure)
	if err := errors.Join(err, bad); err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img); err != nil {
		t.Fatal(err)
	}
}

func diffs(t *testing.T, l v1.Layer) []v1.Hash {
	t.Helper()
	d, err := l.DiffID()
	if err != nil {
		t.Fatal(err)
	}
	return []v1.Hash{d}
}

func (r *pullRig) pull(t *testing.T, in runnerapi.Pull) (runnerapi.PullState, []runnerapi.PullState, error) {
	t.Helper()
	var seen []runnerapi.PullState
	state, err := pulling(r.store, 1, func() (map[core.Digest]bool, bool) { return nil, true })(t.Context(), in, func(s runnerapi.PullState) { seen = append(seen, s) })
	return state, seen, err
}

// TestPullForProject pulls an image as a runner does for a project: onto the kernel of the base, without a name, without apt.
func TestPullForProject(t *testing.T) {
	t.Parallel()
	r := newPullRig(t)
	r.push(t, "team/app:1", "bin/tool", "content")
	in := runnerapi.Pull{Reference: r.host + "/team/app:1", Hosts: []string{r.host}, PlainHTTP: []string{r.host}}
	state, seen, err := r.pull(t, in)
	if err != nil {
		t.Fatal(err)
	}
	last := seen[len(seen)-1]
	if last.Stage != runnerapi.PullUnpacking || last.Layers != 1 || last.LayersDone != 1 || last.BytesDone != last.Bytes || last.Bytes == 0 || state.Manifest == "" || !strings.HasSuffix(state.Reference, "/team/app:1") {
		t.Errorf("%+v, progress %+v", state, seen)
	}
	img, err := r.store.Get(string(state.Image))
	if err != nil || r.store.Verify(t.Context(), img) != nil {
		t.Fatalf("%+v, %v", img, err)
	}
	if img.Files[images.KernelFile] != r.base.Files[images.KernelFile] || img.Files[images.InitrdFile] != r.base.Files[images.InitrdFile] || img.Recipe.ManifestDigest != state.Manifest || img.Config.Env[0] != "A=b" {
		t.Errorf("%+v", img)
	}
	list, err := r.store.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range list {
		if i.Digest == img.Digest && (i.Name != "" || len(i.References) > 0 || !i.Pulled) {
			t.Errorf("a project's image is published: %+v", i)
		}
	}
	if again, _, err := r.pull(t, in); err != nil || again.Image != state.Image {
		t.Errorf("again: %+v, %v", again, err)
	}
	knows := func(all bool, used ...core.Digest) func() (map[core.Digest]bool, bool) {
		return func() (map[core.Digest]bool, bool) {
			in := map[core.Digest]bool{}
			for _, d := range used {
				in[d] = true
			}
			return in, all
		}
	}
	if left, err := r.store.RemovePulled(t.Context(), knows(false), 0); err != nil || left != 1 {
		t.Errorf("perhaps in use: %d, %v", left, err)
	}
	if left, err := r.store.RemovePulled(t.Context(), knows(true, img.Digest), 0); err != nil || left != 1 {
		t.Errorf("in use: %d, %v", left, err)
	}
	if left, err := r.store.RemovePulled(t.Context(), knows(true), time.Hour); err != nil || left != 1 {
		t.Errorf("young: %d, %v", left, err)
	}
	// Nobody can give the image a name, or pull it again, between the question what is in use and the removal.
	alone := func() (map[core.Digest]bool, bool) {
		ended, end := context.WithCancel(t.Context())
		end()
		if staging, err := r.store.Stage(ended); err == nil {
			t.Error(errors.Join(errors.New("somebody else can change the store"), staging.Close()))
		}
		return nil, false
	}
	if left, err := r.store.RemovePulled(t.Context(), alone, 0); err != nil || left != 1 {
		t.Errorf("asked: %d, %v", left, err)
	}
	if left, err := r.store.RemovePulled(t.Context(), knows(true), 0); err != nil || left != 0 {
		t.Errorf("unused: %d, %v", left, err)
	}
	if _, err := r.store.Get(string(img.Digest)); core.CodeOf(err) != core.CodeImageNotFound {
		t.Errorf("removed: %v", err)
	}
	if _, err := r.store.Get(images.DefaultName); err != nil {
		t.Errorf("the image of the operator: %v", err)
	}
}

// TestNoRoomForPull: on a full disk nothing is fetched, and what earlier pulls have left counts although they have failed.
func TestNoRoomForPull(t *testing.T) {
	t.Parallel()
	r := newPullRig(t)
	r.push(t, "team/app:1", "bin/tool", "content")
	in := runnerapi.Pull{Reference: r.host + "/team/app:1", Hosts: []string{r.host}, PlainHTTP: []string{r.host}}
	none := func() (map[core.Digest]bool, bool) { return nil, true }
	if _, err := pulling(r.store, 1<<60, none)(t.Context(), in, func(runnerapi.PullState) {}); core.CodeOf(err) != core.CodeDiskFull {
		t.Errorf("below the floor: %v", err)
	}
	before, err := roomForPull(r.store, 1)
	if err != nil {
		t.Fatal(err)
	}
	layers := filepath.Join(r.store.Dir(), "layers")
	if err := errors.Join(os.MkdirAll(layers, 0o700), os.WriteFile(filepath.Join(layers, "part-x"), nil, 0o600), os.Truncate(filepath.Join(layers, "part-x"), 1<<50)); err != nil {
		t.Fatal(err)
	}
	if _, err := roomForPull(r.store, 1); core.CodeOf(err) != core.CodeDiskFull || before <= 0 {
		t.Errorf("before a part was left: %d bytes; then: %v", before, err)
	}
}

// TestHostilePullForProject: a project reaches only hosts that the operator has named, or public addresses.
func TestHostilePullForProject(t *testing.T) {
	t.Parallel()
	r := newPullRig(t)
	r.push(t, "team/app:1", "bin/tool", "content")
	named := runnerapi.Pull{Reference: r.host + "/team/app:1", Hosts: []string{r.host}, PlainHTTP: []string{r.host}}
	for what, c := range map[string]struct {
		in    runnerapi.Pull
		front func(http.ResponseWriter, *http.Request) bool
		words string
	}{
		"a registry on loopback":          {runnerapi.Pull{Reference: r.host + "/team/app:1"}, nil, "--image-registry"},
		"a registry on a private network": {runnerapi.Pull{Reference: "10.1.2.3/team/app:1"}, nil, "--image-registry"},
		"a metadata address":              {runnerapi.Pull{Reference: "169.254.169.254/team/app:1"}, nil, "--image-registry"},
		"a layer at a metadata address": {named, func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, "/blobs/") {
				return false
			}
			http.Redirect(w, q, "https://169.254.169.254/latest/meta-data", http.StatusTemporaryRedirect)
			return true
		}, "169.254.169.254"},
		"a lying layer": {named, func(w http.ResponseWriter, q *http.Request) bool {
			if strings.Contains(q.URL.Path, "/blobs/") {
				_, _ = w.Write([]byte("something else"))
				return true
			}
			return false
		}, ""},
	} {
		r.front = c.front
		_, _, err := r.pull(t, c.in)
		if err == nil || !strings.Contains(err.Error(), c.words) || core.CategoryOf(err) == core.Internal {
			t.Errorf("%s: %v", what, err)
		}
	}
	list, err := r.store.List()
	if err != nil || len(list) != 1 {
		t.Errorf("images after refused pulls: %d, %v", len(list), err)
	}
}
