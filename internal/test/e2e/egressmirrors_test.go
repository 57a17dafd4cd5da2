package e2e

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
)

// The servers that clients in guests ask: what the real ones do, small.

// gitServer serves one repository, repo.git, which has a file README, by git's own server.
func gitServer(t *testing.T) http.Handler {
	t.Helper()
	git := require.Program(t, "git", "git")
	dir := t.TempDir()
	work := filepath.Join(dir, "work")
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(git, args...)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
			"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %q: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	run("init", "-q", "-b", "main", work)
	if err := os.WriteFile(filepath.Join(work, "README"), []byte("cloned\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run("-C", work, "add", "README")
	run("-C", work, "commit", "-q", "-m", "first")
	run("clone", "-q", "--bare", work, filepath.Join(dir, "repo.git"))
	return &cgi.Handler{
		Path: filepath.Join(run("--exec-path"), "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"},
	}
}

// debMirror serves a repository of Debian packages, below /debian/, each of which has a file /usr/share/NAME.
func debMirror(t *testing.T, names ...string) http.Handler {
	t.Helper()
	deb := require.Program(t, "dpkg-deb", "dpkg")
	dir := t.TempDir()
	var packages bytes.Buffer
	for _, name := range names {
		tree := t.TempDir()
		if err := os.Chmod(tree, 0o755); err != nil {
			t.Fatal(err)
		}
		control := fmt.Sprintf("Package: %s\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@example.com>\nDescription: a test\n", name)
		for path, text := range map[string]string{"DEBIAN/control": control, "usr/share/" + name: "installed\n"} {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(tree, path)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(tree, path), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		file := name + "_1.0_all.deb"
		if out, err := exec.Command(deb, "--root-owner-group", "-b", tree, filepath.Join(dir, file)).CombinedOutput(); err != nil {
			t.Fatalf("dpkg-deb: %v: %s", err, out)
		}
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&packages, "%sFilename: ./%s\nSize: %d\nSHA256: %x\n\n", control, file, len(b), sha256.Sum256(b))
	}
	release := fmt.Sprintf("Date: Mon, 02 Jan 2006 15:04:05 UTC\nSHA256:\n %x %d Packages\n", sha256.Sum256(packages.Bytes()), packages.Len())
	for file, b := range map[string][]byte{"Packages": packages.Bytes(), "Release": []byte(release)} {
		if err := os.WriteFile(filepath.Join(dir, file), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return http.StripPrefix("/debian/", http.FileServer(http.Dir(dir)))
}

// pyIndex serves an index of Python packages, below /simple/, with one that is called coppice-demo.
func pyIndex(t *testing.T) http.Handler {
	t.Helper()
	const name, wheel = "coppice_demo-1.0.dist-info/", "coppice_demo-1.0-py3-none-any.whl"
	files := map[string]string{
		"coppice_demo.py": "said = 'installed'\n", name + "METADATA": "Metadata-Version: 2.1\nName: coppice-demo\nVersion: 1.0\n",
		name + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
	}
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	record := ""
	add := func(path, text string) {
		w, err := z.Create(path)
		if err == nil {
			_, err = w.Write([]byte(text))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for path, text := range files {
		sum := sha256.Sum256([]byte(text))
		record += fmt.Sprintf("%s,sha256=%s,%d\n", path, base64.RawURLEncoding.EncodeToString(sum[:]), len(text))
		add(path, text)
	}
	add(name+"RECORD", record+name+"RECORD,,\n")
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /simple/coppice-demo/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!DOCTYPE html><a href="/files/%s#sha256=%x">%[1]s</a>`, wheel, sha256.Sum256(b.Bytes()))
	})
	mux.HandleFunc("GET /files/"+wheel, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(b.Bytes()) })
	return mux
}
