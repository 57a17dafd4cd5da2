package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestPulledImage: an image of a registry, made of files of Debian in three layers, is pulled with a password over a mirror
// that lacks it, and boots. A session has its user, directory and environment; a file that an upper layer removed is gone.
func TestPulledImage(t *testing.T) {
	c := newCLI(t)
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "ann" || password != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	defer server.Close()
	mirror := httptest.NewServer(http.NotFoundHandler())
	defer mirror.Close()
	host, mirrored := strings.TrimPrefix(server.URL, "http://"), strings.TrimPrefix(mirror.URL, "http://")
	pushDebian(t, host)

	t.Setenv("DOCKER_CONFIG", c.dir)
	if err := os.WriteFile(filepath.Join(c.dir, "config.json"), []byte(`{"auths": {"`+host+`": {"username": "ann", "password": "secret"}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{
		"image", "pull", "--json", "--images-dir", imageStore(t).Dir(), "--agent", program(t, guestAgent), "--plain-http", host, "--plain-http", mirrored,
		"--mirror", mirrored, "--name", "e2e-pulled", host + "/team/app:1",
	}
	var got struct {
		Digest     core.Digest   `json:"digest"`
		Source     string        `json:"source"`
		Layers     int           `json:"layers"`
		LayersKept int           `json:"layers_kept"`
		Config     images.Config `json:"config"`
	}
	if err := json.Unmarshal([]byte(c.ok(args...)), &got); err != nil {
		t.Fatal(err)
	}
	if got.Source != images.SourceRegistry || got.Layers != 3 || got.Config.ExposedPorts[0] != "80/tcp" || got.Config.Cmd[0] != "serve" {
		t.Errorf("pulled: %+v", got)
	}
	first := got.Digest
	if err := json.Unmarshal([]byte(c.ok(args...)), &got); err != nil || got.Digest != first || got.LayersKept != 3 {
		t.Errorf("pulled again: %+v, %v", got, err)
	}

	ws, err := c.s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Name: "pulled", Image: string(first), Resources: small()})
	if err != nil {
		t.Fatal(err)
	}
	endWithTest(t, c.s, ws.ID)
	prints := func(want string, args ...string) {
		t.Helper()
		if out := c.ok(append([]string{"ws", "exec"}, args...)...); out != want {
			t.Errorf("%q: %q, want %q", args, out, want)
		}
	}
	prints("1000:1001 /srv/app hello world\n", "pulled", "--", "sh", "-c", `echo "$(id -u):$(id -g) $(pwd) $GREETING"`)
	prints("0 /tmp\n", "--user", "root", "--cwd", "/tmp", "pulled", "--", "sh", "-c", `echo "$(id -u) $(pwd)"`)
	prints("new\nnote of layer 3\n", "pulled", "--", "sh", "-c", "ls /srv/data; cat /etc/note; test ! -e /etc/secret")
	prints("0\n", "pulled", "--", "/usr/bin/as-root", "-u") // a program with the set-user-id bit

	// A fork has them as well.
	child := fork(t, c.s, checkpoint(t, c.s, ws.ID).ID, coppiceFork{})[0]
	prints("1000 /srv/app\n", idTail(child.Workspace.ID), "--", "sh", "-c", `echo "$(id -u) $(pwd)"`)
}

// projectRegistry is a registry without TLS, on loopback, from which projects may pull. It needs no password.
var projectRegistry = sync.OnceValue(func() string {
	return strings.TrimPrefix(httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0)))).URL, "http://")
})

// TestPullThroughAPI: the server pulls an image that a build names, onto the kernel of the base image. The image is the project's, and
// workspaces from it have its files, user and environment.
func TestPullThroughAPI(t *testing.T) {
	if !*long {
		return
	}
	c := newCLI(t)
	pushDebian(t, projectRegistry())
	ctx := t.Context()
	ref := projectRegistry() + "/team/app:1"
	began := time.Now()
	built, err := c.s.client.BuildImage(ctx, coppice.BuildImageRequest{Name: "from-registry", From: ref, Resources: small()})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("pulled and made a checkpoint in %.1f s", time.Since(began).Seconds())
	text, _, err := c.s.client.OperationLog(ctx, built.OperationID, 0)
	if said := string(text); err != nil || !strings.Contains(said, "3 of 3 layers") || !strings.Contains(said, "manifest sha256:") {
		t.Errorf("the log: %v, %s", err, said)
	}
	if i := built.Image; i.From != ref || i.Config.User != "app:1001" || i.Config.Workdir != "/srv/app" || i.Config.Env["GREETING"] != "hello world" {
		t.Errorf("%+v", i)
	}
	ws, err := c.s.client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Name: "pulled-by-api", Image: "from-registry"})
	if err != nil {
		t.Fatal(err)
	}
	endWithTest(t, c.s, ws.ID)
	if out := c.ok("ws", "exec", "pulled-by-api", "--", "sh", "-c", `echo "$(id -u):$(id -g) $(pwd) $GREETING"; as-root -u; cat /etc/note; test ! -e /etc/secret`); out != "1000:1001 /srv/app hello world\n0\nnote of layer 3\n" {
		t.Errorf("the workspace: %q", out)
	}
	if out := c.ok("image", "ls", "--json", "--images-dir", imageStore(t).Dir()); strings.Contains(out, "from-registry") {
		t.Errorf("the image of a project has a name on the host: %s", out)
	}
	_, err = c.s.client.BuildImage(ctx, coppice.BuildImageRequest{Name: "other", From: "127.0.0.1:1/team/app:1", Resources: small()})
	if err == nil || !strings.Contains(err.Error(), "--image-registry") {
		t.Errorf("a registry that the operator has not named: %v", err)
	}
	if err := c.s.client.DeleteImage(ctx, "from-registry"); err != nil {
		t.Error(err)
	}
}

// pushDebian pushes an image of a few files of the base image, in three layers.
func pushDebian(t *testing.T, host string) {
	t.Helper()
	_, base := testvm.Image(t)
	tree := filepath.Join(t.TempDir(), "tree")
	if out, err := exec.CommandContext(t.Context(), "fsck.erofs", "--extract="+tree, base.RootFS).CombinedOutput(); err != nil {
		t.Fatalf("unpack the base image: %v, %s", err, out)
	}
	var first []tarFile
	for _, pattern := range []string{"bin", "lib", "lib64", "usr/bin/dash", "usr/bin/sh", "usr/bin/id", "usr/bin/cat", "usr/bin/ls", "usr/lib64/*", "usr/lib/*/ld-linux*", "usr/lib/*/libc.so.6", "usr/lib/*/libselinux.so.1", "usr/lib/*/libpcre2-8.so*"} {
		found, err := filepath.Glob(filepath.Join(tree, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			first = append(first, fileOf(t, tree, path))
		}
	}
	first = append(first,
		tarFile{tar.Header{Name: "etc/passwd", Mode: 0o644}, "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001::/srv/app:/bin/sh\n"},
		tarFile{tar.Header{Name: "etc/secret", Mode: 0o600}, "secret"},
		tarFile{tar.Header{Name: "etc/note", Mode: 0o644}, "note of layer 1\n"},
		tarFile{tar.Header{Name: "srv/data/old", Mode: 0o644}, "old"},
		tarFile{tar.Header{Name: "srv/app/", Typeflag: tar.TypeDir, Mode: 0o700, Uid: 1000, Gid: 1001}, ""},
	)
	asRoot := fileOf(t, tree, filepath.Join(tree, "usr/bin/id"))
	asRoot.Name, asRoot.Mode = "usr/bin/as-root", 0o4755
	img, err := mutate.AppendLayers(empty.Image, debianLayer(t, first),
		debianLayer(t, []tarFile{
			{tar.Header{Name: "etc/.wh.secret"}, ""}, {tar.Header{Name: "srv/data/new", Mode: 0o644}, "new"}, {tar.Header{Name: "srv/data/.wh..wh..opq"}, ""}, asRoot,
		}),
		debianLayer(t, []tarFile{{tar.Header{Name: "etc/note", Mode: 0o644}, "note of layer 3\n"}}))
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", base.Architecture
	config.Config = v1.Config{
		Env: []string{"PATH=/usr/bin", "GREETING=hello world"}, WorkingDir: "/srv/app", User: "app:1001", Cmd: []string{"serve"}, ExposedPorts: map[string]struct{}{"80/tcp": {}},
	}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(host + "/team/app:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img, remote.WithAuth(&authn.Basic{Username: "ann", Password: "secret"})); err != nil {
		t.Fatal(err)
	}
}

// tarFile is an entry of a layer with its content.
type tarFile struct {
	tar.Header
	content string
}

// fileOf is a file or link of an unpacked tree.
func fileOf(t *testing.T, tree, path string) tarFile {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	rel, err := filepath.Rel(tree, path)
	if err != nil {
		t.Fatal(err)
	}
	f := tarFile{Header: tar.Header{Name: rel, Mode: int64(info.Mode().Perm())}}
	if info.Mode()&fs.ModeSymlink != 0 {
		f.Typeflag = tar.TypeSymlink
		f.Linkname, err = os.Readlink(path)
	} else {
		var b []byte
		b, err = os.ReadFile(path)
		f.content = string(b)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func debianLayer(t *testing.T, files []tarFile) v1.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		f.Size = int64(len(f.content))
		if err := w.WriteHeader(&f.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f.content); err != nil {
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
