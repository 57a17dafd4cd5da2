package build

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/mountns"
	"github.com/coppice-dev/coppice/internal/osthread"
)

// Program is a program that a build calls, with the Debian package that contains it.
type Program struct{ Name, Package string }

// Programs returns the programs that a build of Debian images needs; an image from a tar needs all except mmdebstrap.
func Programs() []Program {
	return []Program{
		{"apt-cache", "apt"},
		{"apt-get", "apt"},
		{"debugfs", "e2fsprogs"},
		{"depmod", "kmod"},
		{"dpkg", "dpkg"},
		{"dpkg-deb", "dpkg"},
		{"mkfs.erofs", "erofs-utils"},
		{"mkfs.ext4", "e2fsprogs"},
		{"mmdebstrap", "mmdebstrap"},
		{"unshare", "util-linux"},
		{"xz", "xz-utils"},
	}
}

// MissingPrograms returns the elements of Programs that this host lacks.
func MissingPrograms() []Program {
	return slices.DeleteFunc(Programs(), func(p Program) bool {
		_, err := lookPath(p.Name)
		return err == nil
	})
}

func checkPrograms(source string) error {
	var names, packages []string
	for _, p := range MissingPrograms() {
		if p.Name == "mmdebstrap" && source != images.SourceDebian {
			continue
		}
		names = append(names, p.Name)
		packages = append(packages, p.Package)
	}
	if len(names) == 0 {
		return nil
	}
	slices.Sort(packages)
	return core.Errorf(core.FailedPrecondition, CodeMissingProgram,
		"building an image needs %s, which this host lacks; cure: apt-get install --no-install-recommends %s",
		strings.Join(names, ", "), strings.Join(slices.Compact(packages), " "))
}

// lookPath also finds a program in sbin, which is missing in a user's PATH.
func lookPath(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return p, nil
		}
	}
	return "", err
}

// tool is one call of a program.
type tool struct {
	name   string
	args   []string
	dir    string
	env    []string
	stdin  io.Reader
	stdout io.Writer // nil: the log
	log    io.Writer // nil: nowhere

	// leaves removes the loop mounts that the program does not need from its namespace. The program may run for minutes, and the owners unmount
	// them meanwhile. needs are the paths that it needs.
	leaves bool
	needs  []string
}

// killDelay bounds the wait for the pipes of a killed program.
const killDelay = 10 * time.Second

// run calls a program and waits for it. When ctx ends or this process dies, the program and its children in the same
// process group are killed. The error of a program that failed carries its last lines.
func run(ctx context.Context, t tool) error {
	path, err := lookPath(t.name)
	if err != nil {
		return core.Errorf(core.FailedPrecondition, CodeMissingProgram, "this host lacks the program %s", t.name)
	}
	var tail tailBuffer
	var log io.Writer = &tail
	if t.log != nil {
		log = io.MultiWriter(&tail, t.log)
	}
	cmd := exec.CommandContext(ctx, path, t.args...) //nolint:gosec // G204: a fixed set of programs, arguments without a shell
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = t.dir, t.stdin, log, log
	if t.stdout != nil {
		cmd.Stdout = t.stdout
	}
	cmd.Env = append(toolEnv(os.Environ()), t.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killDelay
	err = t.call(cmd)
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", t.name, context.Cause(ctx))
	}
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &exit):
		return core.Wrapf(err, core.FailedPrecondition, images.CodeImageBuildFailed, "%s failed; it said: %s", t.name, tail.String())
	default:
		return fmt.Errorf("%s: %w", t.name, err)
	}
}

// call runs a program. The death signal is sent when the *thread* that started the program ends, so that thread must be kept.
func (t tool) call(cmd *exec.Cmd) error {
	if !t.leaves {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		return cmd.Run()
	}
	needs := make([]string, len(t.needs))
	for i, path := range t.needs {
		var err error
		if needs[i], err = filepath.EvalSymlinks(path); err != nil {
			needs[i] = path // it does not exist yet
		}
	}
	return osthread.Do(func() error {
		if err := mountns.Enter(); err != nil {
			return err
		}
		foreign := func(m mountns.Mount) bool {
			return m.Loop() && !m.Holds("/usr") && !slices.ContainsFunc(needs, m.Holds)
		}
		if err := mountns.Detach(foreign); err != nil {
			return err
		}
		return cmd.Run()
	})
}

// output calls a program and returns what it printed on its standard output.
func output(ctx context.Context, t tool) (string, error) {
	var b bytes.Buffer
	t.stdout = &b
	err := run(ctx, t)
	return b.String(), err
}

// toolEnv drops variables that would change the bytes that tools write.
func toolEnv(env []string) []string {
	env = slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		switch name {
		case "SOURCE_DATE_EPOCH", "TMPDIR", "LANG", "LANGUAGE", "TZ", "APT_CONFIG":
			return true
		}
		return strings.HasPrefix(name, "LC_") || strings.HasPrefix(name, "PYTHON") || strings.HasPrefix(name, "PERL")
	})
	return append(env, "LC_ALL=C.UTF-8", "TZ=UTC", "DEBIAN_FRONTEND=noninteractive")
}

// tailBuffer keeps the end of what was written to it.
type tailBuffer struct{ b []byte }

const tailBytes = 1500

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if len(t.b) > 2*tailBytes {
		t.b = append([]byte(nil), t.b[len(t.b)-tailBytes:]...)
	}
	return len(p), nil
}

// String returns the end of the text, on one line.
func (t *tailBuffer) String() string {
	b := t.b
	if len(b) > tailBytes {
		b = b[len(b)-tailBytes:]
	}
	text := strings.Join(strings.FieldsFunc(string(b), func(r rune) bool { return r < ' ' || r == 0x7f }), " | ")
	if text == "" {
		return "nothing"
	}
	return text
}
