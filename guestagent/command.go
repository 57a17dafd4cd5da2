//go:build linux

package guestagent

import (
	"bufio"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// envFile has the image's default environment, one KEY=VALUE per line. Images made from a container have its ENV there.
const envFile = "/etc/coppice/env"

// command prepares a process. It is called inside the workload, where it looks up every path.
func command(spec guestapi.SessionSpec, sandbox map[string]string) (*exec.Cmd, error) {
	who, err := lookupUser(spec.User)
	if err != nil {
		return nil, err
	}
	env := map[string]string{
		"PATH": defaultPath, "HOME": who.home, "USER": who.name, "LOGNAME": who.name, "SHELL": who.shell, "LANG": "C.UTF-8",
	}
	if spec.PTY {
		env["TERM"] = "xterm-256color"
	}
	readEnv(envFile, env)
	for _, set := range []map[string]string{sandbox, spec.Env} {
		maps.Copy(env, set)
	}
	dir := spec.Cwd
	if dir == "" {
		dir = defaultDir(who.home)
	}
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(defaultDir(who.home), dir)
	}
	if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "cwd %s is not a directory in the sandbox", core.Clip(dir))
	}
	path, err := lookPath(spec.Command[0], env["PATH"], dir)
	if err != nil {
		return nil, err
	}
	cmd := &exec.Cmd{Path: path, Args: spec.Command, Dir: dir, SysProcAttr: &syscall.SysProcAttr{Setsid: true, Credential: who.cred}}
	cmd.Env = make([]string, 0, len(env))
	for k, v := range env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	return cmd, nil
}

func defaultDir(home string) string {
	for _, d := range []string{"/workspace", home} {
		if fi, err := os.Stat(d); err == nil && fi.IsDir() {
			return d
		}
	}
	return "/"
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
	for line := range lines(f) {
		if k, v, ok := strings.Cut(line, "="); ok && k != "" && k[0] != '#' {
			env[k] = v
		}
	}
}

// lines yields the lines of at most the first MiB.
func lines(r io.Reader) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		sc := bufio.NewScanner(io.LimitReader(r, 1<<20))
		sc.Buffer(nil, 64<<10)
		for sc.Scan() {
			if !yield(sc.Text()) {
				return
			}
		}
	}
}

// account is the user that a session runs as.
type account struct {
	name, home, shell string
	cred              *syscall.Credential
}

// lookupUser resolves "name", "uid", "name:group" and "uid:gid" with the workload's /etc/passwd and /etc/group. An
// empty user is root, for which passwd is not needed.
func lookupUser(user string) (account, error) {
	name, group, hasGroup := strings.Cut(user, ":")
	acc := account{name: "root", home: "/root", shell: "/bin/sh"}
	if name == "" && !hasGroup {
		return acc, nil
	}
	uid, gid, known := uint64(0), uint64(0), false
	scanFile("/etc/passwd", func(f []string) bool {
		if len(f) < 7 || f[0] != name && f[2] != name {
			return false
		}
		u, err1 := strconv.ParseUint(f[2], 10, 32)
		g, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil {
			return false
		}
		uid, gid, known = u, g, true
		acc = account{name: f[0], home: f[5], shell: f[6]}
		return true
	})
	if !known {
		u, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			return acc, core.Errorf(core.Invalid, core.CodeInvalidField, "user %q does not exist in the sandbox", core.Clip(name))
		}
		uid, acc = u, account{name: name, home: "/", shell: "/bin/sh"}
	}
	groups, err := groupsOf(acc.name, group, hasGroup, &gid)
	if err != nil {
		return acc, err
	}
	acc.cred = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid), Groups: groups}
	return acc, nil
}

// groupsOf finds the groups of a user, and the number of the requested group.
func groupsOf(user, group string, asked bool, gid *uint64) ([]uint32, error) {
	var groups []uint32
	found := !asked
	scanFile("/etc/group", func(f []string) bool {
		if len(f) < 4 {
			return false
		}
		g, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil {
			return false
		}
		if asked && (f[0] == group || f[2] == group) {
			*gid, found = g, true
		}
		for m := range strings.SplitSeq(f[3], ",") {
			if m == user {
				groups = append(groups, uint32(g))
			}
		}
		return false
	})
	if !found {
		g, err := strconv.ParseUint(group, 10, 32)
		if err != nil {
			return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "group %q does not exist in the sandbox", core.Clip(group))
		}
		*gid = g
	}
	return groups, nil
}

// scanFile calls use with the fields of each line of a colon-separated file until it returns true.
func scanFile(path string, use func(fields []string) bool) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	for line := range lines(f) {
		if use(strings.Split(line, ":")) {
			return
		}
	}
}
