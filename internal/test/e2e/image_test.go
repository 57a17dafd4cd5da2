package e2e

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const imageDockerfile = `FROM base
ENV GREETING=hello
WORKDIR /srv/app
COPY --chown=nobody --chmod=644 page.txt ./
RUN mkdir -p /var/app && echo "$GREETING from a build" > /var/app/said && id -un > /var/app/who
RUN <<EOF
set -e
useradd --create-home app
chown -R app /var/app
EOF
USER app
RUN id -un >> /var/app/who && pwd >> /var/app/who
`

// TestBuildImage builds an image with a server that runs in it, on real machines: a second build carries out nothing, and workspaces from it have
// the server running and its sessions the image's defaults.
func TestBuildImage(t *testing.T) {
	s := theStack(t)
	ctx := t.Context()
	files := new(bytes.Buffer)
	w := tar.NewWriter(files)
	const page = "the page\n"
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "page.txt", Mode: 0o600, Size: int64(len(page))}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, page); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.PutUpload(ctx, "e2e-image", files); err != nil {
		t.Fatal(err)
	}
	req := coppice.BuildImageRequest{
		Name: "e2e-app", Dockerfile: imageDockerfile, Context: "e2e-image",
		Start: &coppice.BuildStart{Command: "exec python3 -m http.server 8080", Ready: &coppice.BuildReady{Port: 8080}},
	}
	began := time.Now()
	first, err := s.client.BuildImage(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	uncached := time.Since(began)
	log, _, err := s.client.OperationLog(ctx, first.OperationID, 0)
	if err != nil || !strings.Contains(string(log), "[1/") {
		t.Errorf("%q, %v", log, err)
	}
	t.Logf("%s", log)
	began = time.Now()
	second, err := s.client.BuildImage(ctx, req)
	if err != nil || second.Image.CheckpointID != first.Image.CheckpointID || second.Image.Build.CachedSteps != second.Image.Build.Steps {
		t.Errorf("built again: %+v, %v", second, err)
	}
	cached := time.Since(began)
	t.Logf("%d steps, of which %d on a machine: %v; from the cache: %v", first.Image.Build.Steps, first.Image.Build.Steps-first.Image.Build.CachedSteps, uncached, cached)

	// The command line sends the same files and text, so it gets the same image but for its program.
	c := newCLI(t)
	for name, text := range map[string]string{"Dockerfile": imageDockerfile, "page.txt": page, ".dockerignore": "*.log", "large.log": "left out"} {
		if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if status, stdout, stderr := c.run("", "image", "build", ".", "--name", "e2e-app-cli"); status != 0 || !strings.Contains(stdout, "8 from the cache") || !strings.Contains(stderr, "CACHED") {
		t.Errorf("the command line: %d %s %s", status, stdout, stderr)
	}
	if status, _, stderr := c.run("", "image", "build", ".", "--name", "e2e-app-cli", "--file", "absent"); status == 0 || !strings.Contains(stderr, "absent") {
		t.Errorf("without a Dockerfile: %d %s", status, stderr)
	}

	ws, err := s.client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Image: "e2e-app"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = s.client.TerminateWorkspace(ctx, ws.ID) })
	run := func(script string) string {
		t.Helper()
		out, err := s.client.Exec(ctx, ws.ID, coppice.ExecRequest{Command: []string{"sh", "-c", script}})
		if err != nil {
			t.Fatal(err)
		}
		return out.Stdout + out.Stderr
	}
	if got := run(`echo "$GREETING"; id -un; pwd; cat /var/app/said /var/app/who; stat -c '%U %a' page.txt`); got != "hello\napp\n/srv/app\nhello from a build\nroot\napp\n/srv/app\nnobody 644\n" {
		t.Errorf("a session of the image: %q", got)
	}
	if got := run("curl -sS http://127.0.0.1:8080/page.txt"); got != page {
		t.Errorf("the server in the workspace: %q", got)
	}
	if _, err := s.client.BuildImage(ctx, coppice.BuildImageRequest{Name: "e2e-app", From: "e2e-app", Steps: []coppice.BuildStep{{Run: "echo oh >&2; exit 7"}}}); err == nil ||
		!strings.Contains(err.Error(), "exit status 7") || !strings.Contains(err.Error(), "oh") {
		t.Errorf("a command that fails: %v", err)
	}
	if err := s.client.DeleteImage(ctx, "e2e-app"); err != nil {
		t.Fatal(err)
	}
}
