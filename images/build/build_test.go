package build

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/internal/confine/confinetest"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// shared is the one store in which most tests build; TestMain removes it.
var shared struct {
	dir  string
	once sync.Once
	base built
	err  error
}

// built is an image with its store and the agent that it was made with.
type built struct {
	store  *images.Store
	img    images.Image
	agent  string
	events []Event
}

// TestMain makes nothing by itself: some tests kill processes that run it.
func TestMain(m *testing.M) {
	confine.Enter(ConfinedTask())
	confinetest.AllowWithoutRoot(m)
	status := m.Run()
	if shared.dir != "" {
		if err := os.RemoveAll(shared.dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			status = 1
		}
	}
	os.Exit(status)
}

// baseImage builds a Debian image once for all tests, with the probe as its agent. It takes half a minute.
func baseImage(t *testing.T) built {
	t.Helper()
	requireImage(t)
	shared.once.Do(func() {
		start := time.Now()
		b := &shared.base
		if shared.dir, shared.err = os.MkdirTemp("", "coppice-images-"); shared.err != nil { //nolint:usetesting // outlives single tests
			return
		}
		if b.agent, shared.err = buildProbe(shared.dir); shared.err != nil {
			return
		}
		if b.store, shared.err = images.Open(filepath.Join(shared.dir, "store")); shared.err != nil {
			return
		}
		b.img, shared.err = Image(t.Context(), b.store, Options{AgentBinary: b.agent, Progress: func(e Event) { b.events = append(b.events, e) }})
		t.Logf("the first build took %.1f s", time.Since(start).Seconds())
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.base
}

func buildProbe(dir string) (string, error) {
	file := filepath.Join(dir, "probe")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", file, "./testdata/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the probe: %w\n%s", err, out)
	}
	return file, nil
}

// otherAgent makes a different agent that still runs.
func otherAgent(t *testing.T, agent string) string {
	t.Helper()
	raw, err := os.ReadFile(agent)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(file, append(raw, "another"...), 0o700); err != nil {
		t.Fatal(err)
	}
	return file
}

func mustBuild(t *testing.T, s *images.Store, o Options) (images.Image, []Event) {
	t.Helper()
	var events []Event
	o.Progress = func(e Event) { events = append(events, e) }
	start := time.Now()
	img, err := Image(t.Context(), s, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("built %s in %.2f s", img.Name, time.Since(start).Seconds())
	return img, events
}

func hasEvent(events []Event, stage, msg string) bool {
	return slices.ContainsFunc(events, func(e Event) bool { return e.Stage == stage && strings.Contains(e.Msg, msg) })
}

func TestBuildDescribesTheImage(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	if err := b.store.Verify(t.Context(), b.img); err != nil {
		t.Error(err)
	}
	r := b.img.Recipe
	if b.img.Name != images.DefaultName || r.Source != images.SourceDebian || r.Suite == "" || !cmp.Equal(r.Requested, BasePackages()) {
		t.Errorf("image %q, recipe %+v", b.img.Name, r)
	}
	for _, name := range append(BasePackages(), "libc6", "bash") {
		if !slices.ContainsFunc(r.Packages, func(p string) bool { return strings.HasPrefix(p, name+"=") }) {
			t.Errorf("package %s is not in the recipe", name)
		}
	}
	for _, name := range []string{"cron", "systemd", "systemd-sysv", "openssh-server", "rsyslog", "man-db"} {
		if slices.ContainsFunc(r.Packages, func(p string) bool { return strings.HasPrefix(p, name+"=") }) {
			t.Errorf("package %s is in the image", name)
		}
	}
	agent, err := images.HashFile(b.agent)
	if err != nil || agent.Digest != r.AgentDigest {
		t.Errorf("the agent's digest is %s (%v), the recipe says %s", agent.Digest, err, r.AgentDigest)
	}
	for _, word := range []string{"console=", "panic=-1", "coppice.rootfstype=erofs", "clocksource=kvm-clock"} {
		if !strings.Contains(b.img.CommandLine, word) {
			t.Errorf("%s is not on the command line %q", word, b.img.CommandLine)
		}
	}
	if b.img.SizeBytes > 300<<20 {
		t.Errorf("the image has %d MiB", b.img.SizeBytes>>20)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(b.img.Overlay, &st); err != nil || st.Size != overlayBytes || st.Blocks*512 > 1<<20 {
		t.Errorf("the overlay has %d bytes, %d of them on disk (%v)", st.Size, st.Blocks*512, err)
	}
	t.Logf("image: %d MiB; kernel %d, initrd %d, root %d MiB; overlay %d KiB on disk", b.img.SizeBytes>>20,
		b.img.Files[images.KernelFile].SizeBytes>>20, b.img.Files[images.InitrdFile].SizeBytes>>20, b.img.Files[images.RootFSFile].SizeBytes>>20, st.Blocks/2)
}

func TestInitrdHoldsTheContract(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	raw, err := os.ReadFile(b.img.Initrd)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]cpioEntry{}
	for _, e := range readCPIO(t, raw) {
		files[e.Name] = e
	}
	agent, err := os.ReadFile(b.agent)
	if err != nil {
		t.Fatal(err)
	}
	if init := files["init"]; init.Data != string(agent) || init.Mode != 0o100755 {
		t.Errorf("/init has mode %o and is not the agent", init.Mode)
	}
	for path := range strings.Lines(files["etc/coppice/modules"].Data) {
		path = strings.TrimSuffix(path, "\n")
		if !strings.HasPrefix(path, "/") || !strings.HasPrefix(files[strings.TrimPrefix(path, "/")].Data, "\x7fELF") {
			t.Errorf("module %s is not an ELF file in the initrd", path)
		}
	}
	for _, dir := range []string{"dev", "proc", "sys", "newroot"} {
		if files[dir].Mode&cpioDir == 0 {
			t.Errorf("/%s is missing", dir)
		}
	}
}

func TestRootFileSystemPassesLint(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	require.Program(t, "fsck.erofs", "erofs-utils")
	dir := filepath.Join(t.TempDir(), "root")
	if out, err := exec.CommandContext(t.Context(), "fsck.erofs", "--extract="+dir, b.img.RootFS).CombinedOutput(); err != nil {
		t.Fatalf("fsck.erofs: %v\n%s", err, out)
	}
	found, err := Lint(dir)
	if err != nil || len(found) > 0 {
		t.Errorf("findings: %v, %v", found, err)
	}
	for _, absent := range []string{"usr/share/man/man1/bash.1.gz", "usr/share/doc/bash/README", "var/lib/apt/lists/lock", "var/log/dpkg.log", "etc/passwd-", "var/cache/apt/pkgcache.bin"} {
		if _, err := os.Lstat(filepath.Join(dir, absent)); err == nil {
			t.Errorf("/%s is in the image", absent)
		}
	}
	// Without the directory, Java cannot be installed.
	if info, err := os.Stat(filepath.Join(dir, "usr/share/man/man1")); err != nil || !info.IsDir() {
		t.Errorf("the directory of man pages is missing: %v", err)
	}
}

// TestNothingChanged: the second build is instant, and one more name costs nothing.
func TestNothingChanged(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	img, events := mustBuild(t, b.store, Options{Name: "again", AgentBinary: b.agent})
	if img.Digest != b.img.Digest || len(events) != 1 || !hasEvent(events, "cached", "nothing changed") {
		t.Errorf("digest %s, want %s; events %v", img.Digest, b.img.Digest, events)
	}
	if got, err := b.store.Get("again"); err != nil || got.Digest != b.img.Digest {
		t.Errorf("Get = %v, %v", got.Digest, err)
	}
}

// TestAgentChanged: only the initrd is made again.
func TestAgentChanged(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	img, events := mustBuild(t, b.store, Options{Name: "agent", AgentBinary: otherAgent(t, b.agent)})
	if img.Digest == b.img.Digest {
		t.Error("another agent gave the same image")
	}
	want := maps.Clone(b.img.Files)
	got := maps.Clone(img.Files)
	if got[images.InitrdFile] == want[images.InitrdFile] {
		t.Error("the initrd did not change")
	}
	delete(got, images.InitrdFile)
	delete(want, images.InitrdFile)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("other files changed (-want +got):\n%s", diff)
	}
	if !hasEvent(events, "rootfs", "did not change") || hasEvent(events, "kernel", "") {
		t.Errorf("events: %v", events)
	}
	a, errA := os.Stat(img.RootFS)
	c, errC := os.Stat(b.img.RootFS)
	if err := errors.Join(errA, errC); err != nil || !os.SameFile(a, c) {
		t.Errorf("the root file system is on the disk twice (%v)", err)
	}
}

// TestSameInputsSameDigest builds everything a second time, in a fresh store.
func TestSameInputsSameDigest(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	s := openStore(t)
	img, _ := mustBuild(t, s, Options{AgentBinary: b.agent, Rebuild: true})
	if img.Digest != b.img.Digest {
		t.Errorf("digests differ; recipe (-first +second):\n%s\nfiles:\n%s", cmp.Diff(b.img.Recipe, img.Recipe), cmp.Diff(b.img.Files, img.Files))
	}
	if err := s.Remove(t.Context(), "base"); err != nil {
		t.Fatal(err)
	}
	entries, err := filepath.Glob(filepath.Join(s.Dir(), "cache", images.KindRootFS+"-*"))
	if err != nil || len(entries) > 0 {
		t.Errorf("the cache still holds %v (%v)", entries, err)
	}
}

// containerTar is a small image as `docker export` might write it.
func containerTar(t *testing.T, program string) []byte {
	t.Helper()
	raw, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	entries := []tar.Header{
		{Name: ".dockerenv", Typeflag: tar.TypeReg},
		{Name: "app/", Typeflag: tar.TypeDir, Uid: 1000, Gid: 1000, Mode: 0o750},
		{Name: "app/program", Typeflag: tar.TypeReg, Uid: 1000, Gid: 1000, Mode: 0o4711},
		{Name: "app/link", Typeflag: tar.TypeLink, Linkname: "app/program"},
		{Name: "app/capable", Typeflag: tar.TypeReg, PAXRecords: map[string]string{
			"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		}},
		{Name: "etc/", Typeflag: tar.TypeDir},
		{Name: "etc/machine-id", Typeflag: tar.TypeReg},
		{Name: "etc/cron.d/job", Typeflag: tar.TypeReg},
		{Name: "dev/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3},
	}
	return makeTar(t, entries, map[string]string{"app/program": string(raw), "etc/machine-id": "0123456789abcdef0123456789abcdef\n"})
}

// TestFromTar: the output of `docker export` becomes an image that boots, without Python or a shell in it, with the
// kernel and the initrd of any other image.
func TestFromTar(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	archive := containerTar(t, b.agent)
	file := filepath.Join(t.TempDir(), "container.tar")
	if err := os.WriteFile(file, archive, 0o600); err != nil {
		t.Fatal(err)
	}
	o := Options{Name: "container", AgentBinary: b.agent, FromTar: file, Env: map[string]string{"PATH": "/app"}}
	img, events := mustBuild(t, b.store, o)
	for _, name := range []string{images.KernelFile, images.InitrdFile, images.OverlayFile} {
		if img.Files[name] != b.img.Files[name] {
			t.Errorf("%s differs from the Debian image's", name)
		}
	}
	if img.Recipe.Source != images.SourceTar || img.Recipe.TarDigest != core.DigestOf(archive) || len(img.Recipe.Packages) > 0 {
		t.Errorf("recipe %+v", img.Recipe)
	}
	if !hasEvent(events, "lint", "/etc/cron.d/job") {
		t.Errorf("a cron job was not reported: %v", events)
	}
	if again, events := mustBuild(t, b.store, o); again.Digest != img.Digest || !hasEvent(events, "cached", "nothing changed") {
		t.Errorf("the second build gave %s, %v", again.Digest, events)
	}
	o.FromTar, o.Stdin = "-", bytes.NewReader(archive)
	if again, events := mustBuild(t, b.store, o); again.Digest != img.Digest || !hasEvent(events, "rootfs", "did not change") {
		t.Errorf("the same archive as a stream gave %s, %v", again.Digest, events)
	}
	got := boot(t, img, overlayBytes, "probe.exec=/app/program", "probe.stat=/app/program", "probe.stat=/app/link", "probe.stat=/app", "probe.stat=/app/capable",
		"probe.stat=/etc/coppice/env")
	if e := find(got, "exec"); e == nil || e.Error != "" {
		t.Errorf("the program ended with %+v", e)
	}
	for _, e := range got {
		bad := false
		switch e.Path {
		case "/app/program", "/app/link":
			bad = e.Mode != 0o104711 || e.UID != 1000 || e.GID != 1000 || e.Nlink != 2 || e.Mtime != tarTime.Unix()
		case "/app":
			bad = e.Mode != 0o040750 || e.UID != 1000
		case "/app/capable":
			bad = e.Attrs["security.capability"] != "0100000200200000000000000000000000000000"
		}
		if bad {
			t.Errorf("%+v", e)
		}
	}
}

func TestBadTarLeavesNothing(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	s := openStore(t)
	notRoot := filepath.Join(t.TempDir(), "source.tar")
	if err := os.WriteFile(notRoot, makeTar(t, []tar.Header{{Name: "project/main.go", Typeflag: tar.TypeReg}}, nil), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]Options{
		"not a root":   {FromTar: notRoot},
		"missing":      {FromTar: filepath.Join(t.TempDir(), "none.tar")},
		"a directory":  {FromTar: t.TempDir()},
		"text":         {FromTar: "-", Stdin: strings.NewReader("not an archive")},
		"broken input": {FromTar: "-", Stdin: io.MultiReader(bytes.NewReader(containerTar(t, b.agent)[:4096]), failingReader{})},
	} {
		o.AgentBinary, o.Name = b.agent, "bad"
		_, err := Image(t.Context(), s, o)
		if core.CodeOf(err) != CodeInvalidTar {
			t.Errorf("%s: err = %v, want %s", name, err, CodeInvalidTar)
		}
		if _, err := s.Get("bad"); core.CodeOf(err) != core.CodeImageNotFound {
			t.Errorf("%s: the name exists: %v", name, err)
		}
	}
	if got := listed(t, s); len(got) > 0 {
		t.Errorf("the store holds %q", got)
	}
	checkTidy(t, s)
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, errors.New("the pipe broke") }

func TestBuildRefusesBadOptions(t *testing.T) {
	t.Parallel()
	s := openStore(t)
	dynamic, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(text, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		o    Options
		code core.Code
		want string
		root bool
	}{
		{"name", Options{Name: "Not a name", AgentBinary: text}, core.CodeInvalidName, "Not a name", false},
		{"no agent", Options{}, core.CodeInvalidField, "go build ./cmd/coppice-guest", false},
		{"package", Options{AgentBinary: text, Packages: []string{"-o=Dir::Etc=/tmp"}}, core.CodeInvalidField, "-o=Dir::Etc", false},
		{"suite", Options{AgentBinary: text, Suite: "../x"}, core.CodeInvalidField, "../x", false},
		{"tar and packages", Options{AgentBinary: text, FromTar: "x", Packages: []string{"vim"}}, core.CodeInvalidField, "Dockerfile", false},
		{"no input", Options{AgentBinary: text, FromTar: "-"}, core.CodeInvalidField, "standard input", false},
		{"env", Options{AgentBinary: text, Env: map[string]string{"A": "x\ny"}}, core.CodeInvalidField, "line break", false},
		{"missing agent", Options{AgentBinary: text + "2"}, core.CodeInvalidField, "does not exist", true},
		{"agent is a script", Options{AgentBinary: text}, core.CodeInvalidField, "ELF", true},
		{"agent is dynamic", Options{AgentBinary: dynamic}, core.CodeInvalidField, "dynamically linked", true},
		{"unknown suite", Options{AgentBinary: text, Suite: "sarge"}, images.CodeImageBuildFailed, "apt-get update", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.root {
				requireImage(t)
			}
			_, err := Image(t.Context(), s, c.o)
			if core.CodeOf(err) != c.code || !strings.Contains(core.MessageOf(err), c.want) {
				t.Errorf("err = %v, want %s with %q", err, c.code, c.want)
			}
		})
	}
}

func TestUnknownPackage(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	s := openStore(t)
	_, err := Image(t.Context(), s, Options{AgentBinary: b.agent, Packages: []string{"no-such-package-anywhere"}})
	if core.CodeOf(err) != images.CodeImageBuildFailed || !strings.Contains(core.MessageOf(err), "no-such-package-anywhere") {
		t.Errorf("err = %v", err)
	}
	checkTidy(t, s)
}

func TestMissingProgramsAreNamed(t *testing.T) {
	requireImage(t)
	t.Setenv("PATH", t.TempDir())
	_, err := Image(t.Context(), openStore(t), Options{AgentBinary: "/nowhere"})
	if core.CodeOf(err) != CodeMissingProgram || !strings.Contains(core.MessageOf(err), "apt-get install") || !strings.Contains(core.MessageOf(err), "mmdebstrap") {
		t.Errorf("err = %v", err)
	}
}

// TestBuildInner is the process that TestKilledBuild kills.
func TestBuildInner(t *testing.T) {
	dir := os.Getenv("IMAGES_TEST_BUILD")
	if dir == "" {
		return
	}
	s, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Image(t.Context(), s, Options{AgentBinary: os.Getenv("IMAGES_TEST_AGENT"), Log: os.Stdout})
	t.Fatalf("the build ended: %v", err)
}

// extracting is the message of mmdebstrap when it begins to fill the tree.
const extracting = "I: extracting archives"

// TestKilledBuild kills a build while packages are unpacked. No process of it lives on. The next writer finds a store
// without images and removes the leftovers, without touching the directories that had been mounted.
func TestKilledBuild(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	s := openStore(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestBuildInner$")
	cmd.Env = append(os.Environ(), "IMAGES_TEST_BUILD="+s.Dir(), "IMAGES_TEST_AGENT="+b.agent)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), extracting) {
	}
	if !hasProcess(t, s.Dir()) {
		t.Error("mmdebstrap was not found, so its end proves nothing")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// The pipe ends when the last process that could write to it has ended.
	if _, err := io.Copy(io.Discard, out); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the killed build succeeded")
	}
	// Processes that write elsewhere die with their parents, one after the other.
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for begun := time.Now(); hasProcess(t, s.Dir()); <-again.C {
		if time.Since(begun) > time.Minute {
			t.Fatal("processes of the killed build live on")
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || bytes.Contains(mounts, []byte(s.Dir())) {
		t.Errorf("mounts of the killed build (%v) in:\n%s", err, mounts)
	}
	if got := listed(t, s); len(got) > 0 {
		t.Errorf("the store holds %q", got)
	}
	staging, err := s.Stage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := staging.Close(); err != nil {
		t.Fatal(err)
	}
	checkTidy(t, s)
	if _, err := os.Stat("/dev/null"); err != nil {
		t.Fatal(err)
	}
}

// hasProcess reports whether a process names dir on its command line, or is in it.
func hasProcess(t *testing.T, dir string) bool {
	t.Helper()
	list, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(list, func(proc string) bool { // each may have ended meanwhile
		raw, err := os.ReadFile(filepath.Join(proc, "cmdline"))
		found := err == nil && bytes.Contains(raw, []byte(dir))
		for _, link := range []string{"cwd", "root"} {
			at, err := os.Readlink(filepath.Join(proc, link))
			found = found || err == nil && strings.HasPrefix(at, dir)
		}
		return found
	})
}

// TestCancelledBuild: a cancelled build ends at once and leaves nothing.
func TestCancelledBuild(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	s := openStore(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	log := &triggerWriter{text: extracting, fire: cancel}
	_, err := Image(ctx, s, Options{AgentBinary: b.agent, Log: log})
	if !errors.Is(err, context.Canceled) || !log.fired {
		t.Errorf("err = %v (triggered: %v)", err, log.fired)
	}
	if hasProcess(t, s.Dir()) {
		t.Error("processes of the cancelled build live on")
	}
	if got := listed(t, s); len(got) > 0 {
		t.Errorf("the store holds %q", got)
	}
	checkTidy(t, s)
}

type triggerWriter struct {
	text  string
	fire  func()
	fired bool
}

func (w *triggerWriter) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(w.text)) {
		w.fired = true
		w.fire()
	}
	return len(p), nil
}

func openStore(t *testing.T) *images.Store {
	t.Helper()
	s, err := images.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// listed returns the digests of the images in a store.
func listed(t *testing.T, s *images.Store) (out []string) {
	t.Helper()
	list, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, img := range list {
		out = append(out, img.Digest.Short())
	}
	return out
}

// checkTidy fails if anything temporary is in the store.
func checkTidy(t *testing.T, s *images.Store) {
	t.Helper()
	err := filepath.WalkDir(s.Dir(), func(path string, _ fs.DirEntry, err error) error {
		if base := filepath.Base(path); strings.HasPrefix(base, "tmp-") || strings.HasPrefix(base, ".") {
			t.Errorf("%s was left behind", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
