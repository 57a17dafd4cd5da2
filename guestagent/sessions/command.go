//go:build linux

package sessions

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/account"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// The image's defaults for sessions: the environment, one KEY=VALUE per line; the user; the directory. An image of a registry
// has its ENV, USER and WORKDIR there.
const (
	envFile  = "/etc/coppice/env"
	userFile = "/etc/coppice/user"
	dirFile  = "/etc/coppice/workdir"
)

// withDefaults fills in the image's user and directory. A directory that does not exist counts as none.
func withDefaults(spec guestapi.SessionSpec, userFile, dirFile string) guestapi.SessionSpec {
	if spec.User == "" {
		spec.User = readLine(userFile)
	}
	if !filepath.IsAbs(spec.Cwd) && !strings.HasPrefix(spec.Cwd, "~") {
		if dir := readLine(dirFile); filepath.IsAbs(dir) {
			if fi, err := os.Stat(dir); err == nil && fi.IsDir() {
				spec.Cwd = filepath.Join(dir, spec.Cwd)
			}
		}
	}
	return spec
}

// readLine is the first line of a regular file, or empty. It does not wait for the writer of a FIFO.
func readLine(path string) string {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return ""
	}
	for line := range account.Lines(f) {
		return line
	}
	return ""
}

// command prepares a process. It is called inside the workload, where it looks up every path.
func command(spec guestapi.SessionSpec, sandbox map[string]string) (*exec.Cmd, error) {
	who, err := account.Lookup(spec.User)
	if err != nil {
		return nil, err
	}
	env := map[string]string{
		"PATH": account.DefaultPath, "HOME": who.Home, "USER": who.Name, "LOGNAME": who.Name, "SHELL": who.Shell, "LANG": "C.UTF-8",
	}
	if spec.PTY {
		env["TERM"] = "xterm-256color"
	}
	readEnv(envFile, env)
	for _, set := range []map[string]string{sandbox, spec.Env} {
		maps.Copy(env, set)
	}
	dir := spec.Cwd
	if rest, ok := strings.CutPrefix(dir, "~"); ok && (rest == "" || rest[0] == '/') {
		dir = filepath.Join("/", who.Home, rest)
	}
	if dir == "" {
		dir = account.DefaultDir(who.Home)
	}
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(account.DefaultDir(who.Home), dir)
	}
	if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "cwd %s is not a directory in the sandbox", core.Clip(dir))
	}
	path, err := lookPath(spec.Command[0], env["PATH"], dir)
	if err != nil {
		return nil, err
	}
	cmd := &exec.Cmd{Path: path, Args: spec.Command, Dir: dir, SysProcAttr: &syscall.SysProcAttr{Setsid: true, Credential: who.Cred}}
	cmd.Env = make([]string, 0, len(env))
	for k, v := range env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	return cmd, nil
}

// lookPath finds a program as execvp does.
func lookPath(name, path, dir string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil // relative to cwd, because the kernel looks it up after chdir
	}
	denied := false
	for _, d := range filepath.SplitList(path) {
		if d == "" {
			d = "."
		}
		p := filepath.Join(d, name)
		if !filepath.IsAbs(p) {
			p = filepath.Join(dir, p)
		}
		fi, err := os.Stat(p)
		if err != nil || fi.IsDir() {
			continue
		}
		if fi.Mode()&0o111 != 0 {
			return p, nil
		}
		denied = true
	}
	if denied {
		return "", core.Errorf(core.PermissionDenied, guestapi.CodeCommandFailed, "%s: found in PATH, but not executable", core.Clip(name))
	}
	return "", core.Errorf(core.NotFound, guestapi.CodeCommandNotFound, "%s: there is no such program in PATH (%s)", core.Clip(name), core.Clip(path))
}

// readEnv adds the lines of a file to env. A missing file adds nothing.
func readEnv(path string, env map[string]string) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	for line := range account.Lines(f) {
		if k, v, ok := strings.Cut(line, "="); ok && k != "" && k[0] != '#' {
			env[k] = v
		}
	}
}
