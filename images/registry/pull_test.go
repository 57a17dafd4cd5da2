package registry

import (
	"archive/tar"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	served "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/imageref"
)

// requests counts what a registry was asked for.
type requests struct {
	mu    sync.Mutex
	paths []string
}

func (r *requests) add(req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.paths = append(r.paths, req.URL.Path)
}

// all is how many requests there were.
func (r *requests) all() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.paths)
}

// blobs are the distinct blobs that were asked for since the last call.
func (r *requests) blobs() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := map[string]bool{}
	for _, p := range r.paths {
		if strings.Contains(p, "/blobs/") {
			seen[p] = true
		}
	}
	r.paths = nil
	return len(seen)
}

// realRegistry starts a registry. front may answer requests of the test's subject; it is nil or returns false to let the
// registry answer. put writes through, without front.
func realRegistry(t *testing.T, front func(http.ResponseWriter, *http.Request) bool) (host string, put string, asked *requests) {
	t.Helper()
	inner := served.New(served.Logger(log.New(io.Discard, "", 0)))
	asked = &requests{}
	outer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.add(r)
		if front == nil || !front(w, r) {
			inner.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(outer.Close)
	back := httptest.NewServer(inner)
	t.Cleanup(back.Close)
	return strings.TrimPrefix(outer.URL, "http://"), strings.TrimPrefix(back.URL, "http://"), asked
}

func layerOf(t *testing.T, files map[string]string) v1.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for file, text := range files {
		if err := w.WriteHeader(&tar.Header{Name: file, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func imageOf(t *testing.T, arch string, c v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", arch, c
	if img, err = mutate.ConfigFile(img, file); err != nil {
		t.Fatal(err)
	}
	return img
}

func push(t *testing.T, ref string, img v1.Image) core.Digest {
	t.Helper()
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img); err != nil {
		t.Fatal(err)
	}
	d, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return core.Digest(d.String())
}

func openLayers(t *testing.T) *images.Layers {
	t.Helper()
	s, err := images.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Layers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// anonymous has no credentials, whatever the user who runs the test has.
var anonymous = authn.NewMultiKeychain()

func opts(host, ref string) Options {
	return Options{Reference: host + "/" + ref, Architecture: "amd64", PlainHTTP: []string{host}, Keychain: anonymous, Backoff: time.Millisecond}
}

// text is a file that does not become small when it is compressed.
func text(n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		b.WriteString(core.DigestOf([]byte(fmt.Sprint(i))).Hex())
	}
	return b.String()[:n]
}

// TestPull fetches an image of an index, for the wanted platform, with what it says about its programs. A second image
// fetches only the layer that the first one does not have.
func TestPull(t *testing.T) {
	t.Parallel()
	host, put, asked := realRegistry(t, nil)
	base := layerOf(t, map[string]string{"usr/a": text(100_000)})
	img := imageOf(t, "amd64", v1.Config{
		Env: []string{"PATH=/app", "A=b=c"}, WorkingDir: "/srv", User: "app:1000", Entrypoint: []string{"/app/run"}, Cmd: []string{"-v"},
		ExposedPorts: map[string]struct{}{"80/tcp": {}, "53/udp": {}},
	}, base, layerOf(t, map[string]string{"usr/b": "b"}))
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: imageOf(t, "arm64", v1.Config{}, base), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm64"}}},
		mutate.IndexAddendum{Add: imageOf(t, "amd64", v1.Config{}, base), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "windows", Architecture: "amd64"}}},
		mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}},
	)
	ref, err := name.ParseReference(put + "/team/app:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(ref, index); err != nil {
		t.Fatal(err)
	}
	layers := openLayers(t)
	o := opts(host, "team/app:1")
	var last Progress
	o.Progress = func(p Progress) { last = p }
	got, err := Pull(t.Context(), layers, o)
	if err != nil {
		t.Fatal(err)
	}
	d, _ := img.Digest()
	want := images.Config{
		Env: []string{"PATH=/app", "A=b=c"}, WorkingDir: "/srv", User: "app:1000", Entrypoint: []string{"/app/run"}, Cmd: []string{"-v"},
		ExposedPorts: []string{"53/udp", "80/tcp"},
	}
	if diff := cmp.Diff(want, got.Config); diff != "" || string(got.Manifest) != d.String() || got.Kept != 0 || got.Reference != host+"/team/app:1" {
		t.Errorf("config (-want +got):\n%s\n%+v", diff, got)
	}
	all, _ := img.Layers()
	sum := int64(0)
	for i, l := range all {
		want := images.Layer{}
		digest, _ := l.Digest()
		diff, _ := l.DiffID()
		want.Digest, want.Content = core.Digest(digest.String()), core.Digest(diff.String())
		want.SizeBytes, _ = l.Size()
		sum += want.SizeBytes
		if got.Layers[i] != want {
			t.Errorf("layer %d: %+v, want %+v", i, got.Layers[i], want)
		}
		if f, err := images.HashFile(layers.Path(want.Digest)); err != nil || f.Digest != want.Digest {
			t.Errorf("layer %d in the store: %v, %v", i, f, err)
		}
	}
	if got.Fetched != sum || last.Layers != 2 || last.LayersDone != 2 || last.Bytes != sum || last.BytesDone != sum {
		t.Errorf("fetched %d bytes of %d; progress %+v", got.Fetched, sum, last)
	}
	if n := asked.blobs(); n != 3 { // two layers and the configuration
		t.Errorf("%d blobs were asked for", n)
	}
	digest := push(t, put+"/team/other", imageOf(t, "amd64", v1.Config{}, base, layerOf(t, map[string]string{"usr/c": "c"})))
	got, err = Pull(t.Context(), layers, opts(host, "team/other@"+string(digest)))
	if n := asked.blobs(); err != nil || got.Kept != 1 || n != 2 {
		t.Errorf("the second image: %d layers kept, %d blobs asked for, %v", got.Kept, n, err)
	}
	o.Architecture = "riscv64"
	if _, err := Pull(t.Context(), layers, o); core.CodeOf(err) != core.CodeImageNotFound || !strings.Contains(core.MessageOf(err), "linux/amd64, linux/arm64, windows/amd64") {
		t.Errorf("another platform: %v", err)
	}
}

// TestAuth: credentials come from Docker's configuration, for registries that want a password with each request and for
// those that give a token for it. A wrong or missing password is told as such. No other host gets one.
func TestAuth(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	const token = "a-token"
	for _, kind := range []string{"basic", "bearer"} {
		var host, put string
		var leaked []string
		elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if h := r.Header.Get("Authorization"); h != "" {
				leaked = append(leaked, h)
			}
			http.Redirect(w, r, "http://"+put+r.URL.Path, http.StatusTemporaryRedirect)
		}))
		defer elsewhere.Close()
		host, put, _ = realRegistry(t, func(w http.ResponseWriter, r *http.Request) bool {
			user, password, _ := r.BasicAuth()
			right := user == "ann" && password == "secret"
			switch {
			case r.URL.Path == "/token" && right:
				if r.URL.Query().Get("scope") != "repository:team/app:pull" {
					t.Errorf("scope %q", r.URL.Query().Get("scope"))
				}
				_ = json.NewEncoder(w).Encode(map[string]string{"token": token})
				return true
			case kind == "basic" && right || kind == "bearer" && r.Header.Get("Authorization") == "Bearer "+token:
				if strings.Contains(r.URL.Path, "/blobs/") { // as registries do that have their blobs in a store
					http.Redirect(w, r, elsewhere.URL+r.URL.Path, http.StatusTemporaryRedirect)
					return true
				}
				return false
			case kind == "basic":
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			default:
				w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="test"`, host))
			}
			w.WriteHeader(http.StatusUnauthorized)
			return true
		})
		push(t, put+"/team/app:latest", imageOf(t, "amd64", v1.Config{}, layerOf(t, map[string]string{"usr/a": "a"})))
		for password, want := range map[string]core.Code{"secret": "", "wrong": CodeDenied, "": CodeDenied} {
			auths := map[string]any{}
			if password != "" {
				auths[host] = map[string]string{"auth": base64.StdEncoding.EncodeToString([]byte("ann:" + password))}
			}
			raw, err := json.Marshal(map[string]any{"auths": auths})
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "config.json"), raw, 0o600); err != nil {
				t.Fatal(err)
			}
			o := opts(host, "team/app")
			o.Keychain = nil
			o.PlainHTTP = append(o.PlainHTTP, strings.TrimPrefix(elsewhere.URL, "http://"), put)
			_, err = Pull(t.Context(), openLayers(t), o)
			if want == "" && err != nil || want != "" && core.CodeOf(err) != want {
				t.Errorf("%s, password %q: %v, want %q", kind, password, err, want)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("the password is in the error: %v", err)
			}
		}
		if len(leaked) > 0 {
			t.Errorf("%s: another host was shown %q", kind, leaked)
		}
	}
}

// TestMirrors: mirrors are asked first. One that lacks the image, is broken, or sends something else is left out, and the
// operator is told.
func TestMirrors(t *testing.T) {
	t.Parallel()
	img := imageOf(t, "amd64", v1.Config{}, layerOf(t, map[string]string{"usr/a": text(50_000)}), layerOf(t, map[string]string{"usr/b": text(60_000)}),
		layerOf(t, map[string]string{"usr/c": text(70_000)}))
	for kind, c := range map[string]struct {
		front  func(http.ResponseWriter, *http.Request) bool
		note   string
		asked  int // blobs of the registry
		mirror int // requests to the mirror, if they are counted
	}{
		"good":   {nil, "", 0, 0},
		"empty":  {func(w http.ResponseWriter, r *http.Request) bool { w.WriteHeader(http.StatusNotFound); return true }, "left out", 4, 1},
		"broken": {func(w http.ResponseWriter, r *http.Request) bool { w.WriteHeader(http.StatusBadGateway); return true }, "left out", 4, mirrorAttempts},
		"lies about blobs": {func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/blobs/") {
				_, _ = io.WriteString(w, "something else")
				return true
			}
			return false
		}, "left out", 4, 0},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			mirror, putMirror, mirrorAsked := realRegistry(t, c.front)
			host, put, asked := realRegistry(t, nil)
			push(t, put+"/team/app:1", img)
			push(t, putMirror+"/hub/team/app:1", img)
			o := opts(host, "team/app:1")
			o.Mirrors, o.PlainHTTP = []string{mirror + "/hub"}, append(o.PlainHTTP, mirror)
			var notes []string
			o.Progress = func(p Progress) {
				if p.Note != "" {
					notes = append(notes, p.Note)
				}
			}
			layers := openLayers(t)
			got, err := Pull(t.Context(), layers, o)
			if err != nil {
				t.Fatal(err)
			}
			if f, err := images.HashFile(layers.Path(got.Layers[0].Digest)); err != nil || f.Digest != got.Layers[0].Digest {
				t.Errorf("the layer in the store: %v, %v", f, err)
			}
			if n := mirrorAsked.all(); c.mirror > 0 && n != c.mirror {
				t.Errorf("the mirror was asked %d times, want %d", n, c.mirror)
			}
			if n := asked.blobs(); n != c.asked {
				t.Errorf("the registry was asked for %d blobs, want %d", n, c.asked)
			}
			if all := strings.Join(notes, "\n"); !strings.Contains(all, c.note) || c.note == "" && all != "" || len(notes) > 1 {
				t.Errorf("notes: %q", all)
			}
		})
	}
}

// TestContinues: a transfer that breaks off goes on where it was, within one pull and in the next one. What an earlier pull
// has left may be wrong; it is then fetched again.
func TestContinues(t *testing.T) {
	t.Parallel()
	for _, ranges := range []bool{true, false} {
		t.Run(fmt.Sprintf("ranges %v", ranges), func(t *testing.T) {
			t.Parallel()
			img := imageOf(t, "amd64", v1.Config{}, layerOf(t, map[string]string{"usr/a": text(400_000)}))
			all, _ := img.Layers()
			size, _ := all[0].Size()
			hash, _ := all[0].Digest()
			raw, _ := all[0].Compressed()
			content, err := io.ReadAll(raw)
			if err != nil {
				t.Fatal(err)
			}
			var mu sync.Mutex
			breaks, sent := 0, int64(0)
			host, put, _ := realRegistry(t, func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, hash.String()) {
					return false
				}
				if !ranges {
					r.Header.Del("Range")
				}
				mu.Lock()
				defer mu.Unlock()
				from, to := int64(0), size-1
				if h := r.Header.Get("Range"); h != "" {
					if _, err := fmt.Sscanf(h, "bytes=%d-%d", &from, &to); err != nil {
						t.Error(err)
					}
					w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to, size))
				}
				w.Header().Set("Content-Length", fmt.Sprint(to-from+1))
				if from > 0 {
					w.WriteHeader(http.StatusPartialContent)
				}
				part := content[from:]
				if breaks > 0 {
					breaks--
					part = part[:min(len(part), 50_000)]
				}
				n, _ := w.Write(part)
				sent += int64(n)
				return true
			})
			push(t, put+"/app:1", img)
			layers := openLayers(t)
			o := opts(host, "app:1")
			mu.Lock()
			breaks = 2
			mu.Unlock()
			o.Attempts = 1
			if _, err := Pull(t.Context(), layers, o); core.CodeOf(err) != CodeUnreachable {
				t.Errorf("with one attempt: %v", err)
			}
			o.Attempts = 3
			if _, err := Pull(t.Context(), layers, o); err != nil {
				t.Fatal(err)
			}
			mu.Lock()
			if ranges && sent != size {
				t.Errorf("%d bytes were sent, want %d", sent, size)
			}
			mu.Unlock()
			d := core.Digest(hash.String())
			if f, err := images.HashFile(layers.Path(d)); err != nil || f.Digest != d {
				t.Errorf("the layer in the store: %v, %v", f, err)
			}
			if err := layers.Remove(d); err != nil {
				t.Fatal(err)
			}
			f, err := layers.Partial(t.Context(), d)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(f, "not a part of it"); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := Pull(t.Context(), layers, o); err != nil {
				t.Errorf("with a wrong part in the store: %v", err)
			}
			if f, err := images.HashFile(layers.Path(d)); err != nil || f.Digest != d {
				t.Errorf("the layer in the store: %v, %v", f, err)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for reference, want := range map[string]string{
		"python:3.12-slim": "python-3-12-slim", "alpine": "alpine", "registry.example:5000/team/My_App:v1": "", "ghcr.io/team/my_app:v1": "my-app-v1",
		"x@sha256:" + strings.Repeat("0", 64): "x", "a/" + strings.Repeat("b", 100): strings.Repeat("b", 63), "not a name": "", "": "",
	} {
		got, _, err := NameFor(reference)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", reference, got, err)
		}
		if err == nil && core.ValidateName("image", got) != nil {
			t.Errorf("%q is no name of an image", got)
		}
	}
	for _, o := range []Options{
		{Reference: strings.Repeat("x", imageref.MaxBytes+1)},
		{Reference: "a@sha512:" + strings.Repeat("0", 128)},
		{Reference: "a", Mirrors: []string{"http://x"}},
		{Reference: "a", Mirrors: []string{"x/UPPER"}},
		{Reference: "a", Mirrors: []string{""}},
		{Reference: "a", PlainHTTP: []string{"http://x"}},
		{Reference: "a", TrustedHosts: []string{"x/y"}},
	} {
		o.Keychain = anonymous
		if _, err := Pull(t.Context(), nil, o); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
