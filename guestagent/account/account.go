//go:build linux

package account

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/coppice-dev/coppice/core"
)

// DefaultPath is the PATH of programs, unless their environment has one.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// DefaultDir is where programs of a user start, and what relative paths of the user mean.
func DefaultDir(home string) string {
	for _, d := range []string{"/workspace", home} {
		if fi, err := os.Stat(d); err == nil && fi.IsDir() {
			return d
		}
	}
	return "/"
}

// Lines yields the lines of at most the first MiB.
func Lines(r io.Reader) func(yield func(string) bool) {
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

// Account is a user of the workload.
type Account struct {
	Name, Home, Shell string
	Cred              *syscall.Credential // nil: root, as the agent itself
}

// Lookup resolves "name", "uid", "name:group" and "uid:gid" with the workload's /etc/passwd and /etc/group. An
// empty user is root. A missing passwd is no error for it and for the name "root": it could only name another shell.
func Lookup(user string) (Account, error) { return lookup(user, "/etc/passwd") }

func lookup(user, passwd string) (Account, error) {
	name, group, hasGroup := strings.Cut(user, ":")
	acc := Account{Name: "root", Home: "/root", Shell: "/bin/sh"}
	if name == "" && !hasGroup {
		scan(passwd, func(f []string) bool {
			found := len(f) >= 7 && f[0] == "root"
			if found && strings.HasPrefix(f[6], "/") {
				acc.Shell = f[6]
			}
			return found
		})
		return acc, nil
	}
	uid, gid, known := uint64(0), uint64(0), false
	scan(passwd, func(f []string) bool {
		if len(f) < 7 || f[0] != name && f[2] != name {
			return false
		}
		u, err1 := strconv.ParseUint(f[2], 10, 32)
		g, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil {
			return false
		}
		uid, gid, known = u, g, true
		acc = Account{Name: f[0], Home: f[5], Shell: f[6]}
		return true
	})
	if !known {
		u, err := strconv.ParseUint(name, 10, 32)
		if name == "root" { // an image without a passwd file has it, too
			u, err = 0, nil
		}
		if err != nil {
			return acc, core.Errorf(core.Invalid, core.CodeInvalidField, "user %q does not exist in the sandbox", core.Clip(name))
		}
		uid = u
		if name != "root" {
			acc = Account{Name: name, Home: "/", Shell: "/bin/sh"}
		}
	}
	groups, err := groupsOf(acc.Name, group, hasGroup, &gid)
	if err != nil {
		return acc, err
	}
	acc.Cred = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid), Groups: groups}
	return acc, nil
}

// groupsOf finds the groups of a user, and the number of the requested group.
func groupsOf(user, group string, asked bool, gid *uint64) ([]uint32, error) {
	var groups []uint32
	found := !asked
	scan("/etc/group", func(f []string) bool {
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

// scan calls use with the fields of each line of a colon-separated file until it returns true.
func scan(path string, use func(fields []string) bool) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	for line := range Lines(f) {
		if use(strings.Split(line, ":")) {
			return
		}
	}
}

// Names has the names of users and groups by number.
type Names struct {
	Users, Groups map[int]string
}

// AllNames reads the names of all users and groups. A number with several names has the first one.
func AllNames() Names {
	read := func(path string) map[int]string {
		out := map[int]string{}
		scan(path, func(f []string) bool {
			if len(f) < 3 {
				return false
			}
			id, err := strconv.Atoi(f[2])
			if _, known := out[id]; err == nil && !known {
				out[id] = f[0]
			}
			return false
		})
		return out
	}
	return Names{Users: read("/etc/passwd"), Groups: read("/etc/group")}
}
