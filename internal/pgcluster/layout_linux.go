package pgcluster

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// layout is where the parts of a cluster are.
type layout struct {
	lock, log, data, fresh, run string // fresh is data while it is being made
	user                        serverUser
}

// serverUser is who the server runs as. Root never: PostgreSQL refuses.
type serverUser struct {
	name     string
	uid, gid int
	drop     bool // we are root and must become this user
}

// attributes detach the server from our terminal's signals and tie its life to ours.
func (u serverUser) attributes(onDeath syscall.Signal) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: onDeath}
	if u.drop {
		a.Credential = &syscall.Credential{Uid: uint32(u.uid), Gid: uint32(u.gid)} //nolint:gosec // G115: read from the user database as non-negative
	}
	return a
}

// chooseUser returns ourselves, or, for root, an unprivileged user. Other programs may run as nobody too, so it is
// good enough only for data that nobody cares about.
func chooseUser(durable bool) (serverUser, error) {
	if uid := os.Geteuid(); uid != 0 {
		return serverUser{name: strconv.Itoa(uid), uid: uid, gid: os.Getegid()}, nil
	}
	names := []string{"postgres"}
	if !durable {
		names = append(names, "nobody")
	}
	for _, name := range names {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 31)
		if err != nil {
			return serverUser{}, err
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 31)
		if err != nil {
			return serverUser{}, err
		}
		return serverUser{name: name, uid: int(uid), gid: int(gid), drop: true}, nil
	}
	return serverUser{}, core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost,
		"PostgreSQL does not run as root and there is no user postgres to run it as: run `make setup`, or apt-get install --no-install-recommends postgresql")
}

// prepare makes the directories that a server needs before it starts.
func prepare(cfg Config) (layout, error) {
	u, err := chooseUser(cfg.Durable)
	if err != nil {
		return layout{}, err
	}
	lay := layout{
		lock:  filepath.Join(cfg.Dir, "lock"),
		log:   filepath.Join(cfg.Dir, "postgres.log"),
		data:  filepath.Join(cfg.Dir, "data"),
		fresh: filepath.Join(cfg.Dir, "data.new"),
		run:   filepath.Join(cfg.Dir, "run"),
		user:  u,
	}
	if err := os.MkdirAll(cfg.Dir, 0o711); err != nil { //nolint:gosec // G301: the server's user passes through; what is inside is closed
		return layout{}, err
	}
	if len(filepath.Join(lay.run, ".s.PGSQL."+port)) >= len(unix.RawSockaddrUnix{}.Path) {
		// The path of a socket is bounded by the kernel. The name is derived, so that the next start finds it again.
		sum := sha256.Sum256([]byte(cfg.Dir))
		lay.run = filepath.Join(os.TempDir(), "coppice-pg-"+hex.EncodeToString(sum[:6]))
	}
	return lay, privateDir(lay.run, u)
}

// privateDir makes a directory that only the user may enter. One that is there already must be exactly that: in a
// shared parent it could have been planted.
func privateDir(path string, u serverUser) error {
	err := os.Mkdir(path, 0o700)
	switch {
	case err == nil && u.drop:
		return os.Chown(path, u.uid, u.gid)
	case err == nil:
		return nil
	case !errors.Is(err, os.ErrExist):
		return err
	}
	fi, err := os.Lstat(path)
	if err != nil {
		return err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || !fi.IsDir() || fi.Mode().Perm() != 0o700 || int(st.Uid) != u.uid {
		return fmt.Errorf("%s is not a private directory of user %s; remove it", path, u.name)
	}
	return nil
}

// removeStale removes what a server that no longer runs has left behind.
func (l layout) removeStale() error {
	socket := filepath.Join(l.run, ".s.PGSQL."+port)
	var errs []error
	for _, path := range []string{l.fresh, filepath.Join(l.data, pidFile), socket, socket + ".lock"} {
		errs = append(errs, os.RemoveAll(path))
	}
	return errors.Join(errs...)
}

const pidFile = "postmaster.pid"

// remove deletes everything of the cluster. The server must have ended.
func (l layout) remove(dir string) error {
	return errors.Join(os.RemoveAll(dir), os.RemoveAll(l.run))
}
