package scripts_test

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testprog"
	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
)

const release = "v53.0"

// binary is a release of cloud-hypervisor as far as the script looks at it.
func binary(says string) string { return "#!/bin/sh\necho '" + says + "'\n" }

// setup is one run of the script.
type setup struct {
	t      *testing.T
	script string   // the real one, or a copy with other sums
	env    []string // besides PATH
	prefix string
}

func newSetup(t *testing.T) *setup {
	t.Helper()
	require.Program(t, "curl", "curl")
	script, err := filepath.Abs("setup-kvm")
	if err != nil {
		t.Fatal(err)
	}
	return &setup{t: t, script: script, prefix: filepath.Join(t.TempDir(), "lib", "coppice")}
}

// pin makes the script one that pins the release with this content, for both architectures.
func (s *setup) pin(content string) {
	s.t.Helper()
	b, err := os.ReadFile(s.script)
	if err != nil {
		s.t.Fatal(err)
	}
	sums := regexp.MustCompile(`(?m)^(sum_[a-z0-9_]+)=[0-9a-f]{64}$`)
	if n := len(sums.FindAll(b, -1)); n != 2 {
		s.t.Fatalf("the script pins %d sums", n)
	}
	sum := fmt.Sprintf("%x", sha256.Sum256([]byte(content)))
	s.script = filepath.Join(s.t.TempDir(), "setup-kvm")
	testprog.Write(s.t, s.script, sums.ReplaceAll(b, []byte("${1}="+sum)))
}

// publish puts the release into a directory as GitHub has it, and the script there.
func (s *setup) publish(content string) (dir string) {
	s.t.Helper()
	dir = s.t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, release), 0o700); err != nil {
		s.t.Fatal(err)
	}
	for _, asset := range []string{"cloud-hypervisor-static", "cloud-hypervisor-static-aarch64"} {
		if err := os.WriteFile(filepath.Join(dir, release, asset), []byte(content), 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
	s.env = append(s.env, "COPPICE_RELEASE_BASE=file://"+dir)
	return dir
}

func (s *setup) run(args ...string) (output string, ok bool) {
	s.t.Helper()
	cmd := exec.CommandContext(s.t.Context(), s.script, args...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, s.env...)
	out, err := cmd.CombinedOutput()
	s.t.Logf("%s", out)
	return string(out), err == nil
}

func (s *setup) target() string { return filepath.Join(s.prefix, "cloud-hypervisor") }

// wantNothing fails the test if anything was installed or left.
func (s *setup) wantNothing() {
	s.t.Helper()
	if left, err := filepath.Glob(filepath.Join(s.prefix, ".*")); err != nil || len(left) > 0 {
		s.t.Errorf("left behind: %q, %v", left, err)
	}
	if _, err := os.Stat(s.target()); !os.IsNotExist(err) {
		s.t.Errorf("something was installed: %v", err)
	}
}

func (s *setup) wantFailure(want string, args ...string) {
	s.t.Helper()
	if out, ok := s.run(args...); ok || !strings.Contains(out, want) {
		s.t.Errorf("it said %q, want a failure with %q", out, want)
	}
	s.wantNothing()
}

// TestSetupKVM installs a release from a directory and from a server, replaces what is there whole, and does nothing the second time.
func TestSetupKVM(t *testing.T) {
	t.Parallel()
	s := newSetup(t)
	content := binary("cloud-hypervisor v53.0.0")
	s.pin(content)
	dir := s.publish(content)
	if err := os.MkdirAll(s.prefix, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.target(), []byte("an older one"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, ok := s.run("--prefix", s.prefix)
	if !ok || !strings.Contains(out, "is cloud-hypervisor v53.0.") || !strings.Contains(out, "export COPPICE_CLOUD_HYPERVISOR="+s.target()) {
		t.Errorf("it said %q", out)
	}
	installed := func() os.FileInfo {
		t.Helper()
		b, err := os.ReadFile(s.target())
		if err != nil || string(b) != content {
			t.Fatalf("it installed %q, %v", b, err)
		}
		info, err := os.Stat(s.target())
		if err != nil || info.Mode() != 0o755 {
			t.Fatalf("its mode is %v, %v", info.Mode(), err)
		}
		return info
	}
	first := installed()
	s.env = []string{"COPPICE_RELEASE_BASE=file:///no/such/mirror"}
	if out, ok := s.run("--prefix=" + s.prefix); !ok || strings.Contains(out, "Fetching") || !os.SameFile(first, installed()) {
		t.Errorf("the second time it said %q", out)
	}

	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	s.env = []string{"COPPICE_RELEASE_BASE=" + server.URL}
	s.prefix += "-2"
	if out, ok := s.run("--prefix", s.prefix); !ok {
		t.Errorf("from a server: %q", out)
	}
	installed()
	if left, err := os.ReadDir(s.prefix); err != nil || len(left) != 1 {
		t.Errorf("it left %v, %v", left, err)
	}
}

// TestSetupKVMRefuses: what is not the release, cannot be had or cannot be put there leaves nothing, and says what to do.
func TestSetupKVMRefuses(t *testing.T) {
	t.Parallel()
	good := binary("cloud-hypervisor v53.0")
	for name, c := range map[string]struct {
		prepare func(*setup)
		args    []string
		want    string
	}{
		"another sum":     {prepare: func(s *setup) { s.publish(good) }, want: "is not v53.0 of cloud-hypervisor and was removed: its SHA-256 is "},
		"no such release": {prepare: func(s *setup) { s.env = []string{"COPPICE_RELEASE_BASE=file://" + s.t.TempDir()} }, want: "could not be fetched"},
		"not found": {prepare: func(s *setup) {
			server := httptest.NewServer(http.NotFoundHandler())
			s.t.Cleanup(server.Close)
			s.env = []string{"COPPICE_RELEASE_BASE=" + server.URL}
		}, want: "404"},
		"nobody listens": {prepare: func(s *setup) {
			server := httptest.NewServer(http.NotFoundHandler())
			server.Close()
			s.env = []string{"COPPICE_RELEASE_BASE=" + server.URL}
		}, want: "On a machine without a way there, fetch that file elsewhere"},
		"cut short": {prepare: func(s *setup) { s.pin(good); s.publish(good[:len(good)-4]) }, want: "was removed: its SHA-256 is "},
		"another version": {prepare: func(s *setup) {
			s.pin(binary("cloud-hypervisor v54.0"))
			s.publish(binary("cloud-hypervisor v54.0"))
		}, want: "says that it is v54.0, not v53.0"},
		"another program": {prepare: func(s *setup) { s.pin(binary("hello")); s.publish(binary("hello")) }, want: "is no cloud-hypervisor"},
		"does not run":    {prepare: func(s *setup) { s.pin("\x7fELF"); s.publish("\x7fELF") }, want: "cannot be run on this machine"},
		"another architecture": {prepare: func(s *setup) {
			dir := s.t.TempDir()
			testprog.Write(s.t, filepath.Join(dir, "uname"), []byte("#!/bin/sh\necho riscv64\n"))
			s.env = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
		}, want: "has no release for riscv64; Coppice uses QEMU here"},
		"no curl": {prepare: func(s *setup) {
			dir := s.t.TempDir()
			for _, name := range []string{"env", "bash", "uname", "mkdir", "id", "sha256sum", "cut", "mktemp", "rm"} {
				if err := os.Symlink(require.Program(s.t, name, "coreutils"), filepath.Join(dir, name)); err != nil {
					s.t.Fatal(err)
				}
			}
			s.env = []string{"PATH=" + dir}
		}, want: "curl is missing; cure: apt-get install"},
		"unknown argument": {prepare: func(*setup) {}, args: []string{"--force"}, want: "unknown argument --force"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSetup(t)
			c.prepare(s)
			args := c.args
			if args == nil {
				args = []string{"--prefix", s.prefix}
			}
			s.wantFailure(c.want, args...)
		})
	}
}

// TestSetupKVMNotRoot wants nothing to be fetched for a directory that cannot be written.
func TestSetupKVMNotRoot(t *testing.T) {
	t.Parallel()
	s := newSetup(t)
	s.publish(binary("cloud-hypervisor v53.0"))
	s.wantFailure("cannot be written as user", "--prefix", "/proc/coppice")
	if out, _ := s.run("--prefix", "/proc/coppice"); strings.Contains(out, "Fetching") || !strings.Contains(out, "sudo") {
		t.Errorf("it said %q", out)
	}
}

// TestSetupKVMOwn looks at a binary that somebody has, and installs nothing.
func TestSetupKVMOwn(t *testing.T) {
	t.Parallel()
	for says, want := range map[string]string{
		"cloud-hypervisor v53.0":         "is cloud-hypervisor v53.0; coppice uses it",
		"cloud-hypervisor v53.1-2-gab12": "is cloud-hypervisor v53.1-2-gab12; coppice uses it",
		"cloud-hypervisor v54.0":         "is v54.0; Coppice needs v53",
		"cloud-hypervisor v52.1":         "is v52.1; Coppice needs v53",
		"cloud-hypervisor v5.3":          "is v5.3; Coppice needs v53",
		"QEMU emulator version 10.0.0":   "is no cloud-hypervisor",
	} {
		s := newSetup(t)
		own := filepath.Join(t.TempDir(), "ch")
		testprog.Write(t, own, []byte(binary(says)))
		s.env = []string{"COPPICE_CLOUD_HYPERVISOR=" + own}
		out, ok := s.run("--prefix", s.prefix)
		if !strings.Contains(out, want) || ok != strings.Contains(want, "uses it") {
			t.Errorf("%s: %v, it said %q, want %q", says, ok, out, want)
		}
		s.wantNothing()
		if version, ok := strings.CutPrefix(says, "cloud-hypervisor v"); ok && (cloudhypervisor.Check(version) == nil) != strings.Contains(want, "uses it") {
			t.Errorf("%s: the driver is of another opinion: %v", says, cloudhypervisor.Check(version))
		}
	}
	s := newSetup(t)
	s.env = []string{"COPPICE_CLOUD_HYPERVISOR=/no/such/binary"}
	s.wantFailure("/no/such/binary, which is not there")
	s.env = []string{"COPPICE_CLOUD_HYPERVISOR=/etc/passwd"}
	s.wantFailure("cannot be executed; cure: chmod 0755 /etc/passwd")
}
