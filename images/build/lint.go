package build

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// Finding is something in a root file system that a guest should not have, or something that is missing.
type Finding struct {
	Path string // relative to the root
	Msg  string
	// Fatal findings break a promise (shared identity, swapped secrets); the others only make an idle guest dirty
	// memory, which makes its checkpoints larger.
	Fatal bool
}

// String returns the finding for a person.
func (f Finding) String() string { return "/" + f.Path + ": " + f.Msg }

// Lint checks an unpacked root file system. An image made from Debian packages has no findings; one made from a user's
// archive may have some that are not fatal.
func Lint(dir string) ([]Finding, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("lint: %w", err)
	}
	defer root.Close()
	var out []Finding
	fatal := func(name, msg string) { out = append(out, Finding{name, msg, true}) }
	for _, m := range mountPoints {
		if info, err := root.Lstat(m.name); err != nil || !info.IsDir() {
			fatal(m.name, "is missing, and a guest mounts or writes there")
		}
	}
	for _, pattern := range identityFiles {
		found, err := matching(root, pattern)
		if err != nil {
			return nil, err
		}
		for _, name := range found {
			fatal(name, "would be the same in every sandbox")
		}
	}
	for _, name := range []string{"etc/machine-id", "var/lib/dbus/machine-id"} {
		info, err := root.Lstat(name)
		switch {
		case err != nil && name == "etc/machine-id":
			fatal(name, "is missing; it must be an empty file")
		case err == nil && info.Mode().IsRegular() && info.Size() > 0:
			fatal(name, "is not empty: it would be the same in every sandbox")
		}
	}
	if raw, err := readPlain(root, "etc/fstab"); err == nil {
		for line := range strings.Lines(string(raw)) {
			if isSwapLine(line) {
				fatal("etc/fstab", "has a swap area")
			}
		}
	}
	if info, err := root.Lstat(hooksDir); err != nil || !info.IsDir() {
		fatal(hooksDir, "is missing; the hooks of a reseal live there")
	}
	jobs, err := periodicJobs(root)
	return append(out, jobs...), err
}

// periodicJobs finds jobs that would run at certain times if the image's own init or cron were started.
func periodicJobs(root *os.Root) ([]Finding, error) {
	var out []Finding
	for _, pattern := range []string{
		"etc/cron.d/*", "etc/cron.hourly/*", "etc/cron.daily/*", "etc/cron.weekly/*", "etc/cron.monthly/*", "var/spool/cron/crontabs/*",
		"etc/systemd/system/timers.target.wants/*", "usr/lib/systemd/system/timers.target.wants/*", "var/spool/cron/atjobs/*",
	} {
		found, err := matching(root, pattern)
		if err != nil {
			return nil, err
		}
		for _, name := range found {
			if base := path.Base(name); base == ".placeholder" || base == ".SEQ" {
				continue
			}
			out = append(out, Finding{Path: name, Msg: "is a periodic job; every fork would run it"})
		}
	}
	return out, nil
}

// lintTree fails on fatal findings and, for a tree that Coppice made itself, on any.
func lintTree(dir, source string, warn func(string)) error {
	found, err := Lint(dir)
	if err != nil {
		return err
	}
	bad := slices.Collect(func(yield func(string) bool) {
		for _, f := range found {
			if f.Fatal || source == images.SourceDebian {
				if !yield(f.String()) {
					return
				}
			} else {
				warn(f.String())
			}
		}
	})
	if len(bad) == 0 {
		return nil
	}
	return core.Errorf(core.FailedPrecondition, images.CodeImageBuildFailed, "the root file system is not fit for a guest: %s", core.Clip(strings.Join(bad, "; ")))
}

// newestShipped returns the newest modification time (Unix seconds) in the tree that is not from the build itself,
// that is, older than start. Debian's packages carry the time of their last change, so equal packages give an equal
// time; what the build made is newer and will be clamped to it.
func newestShipped(root *os.Root, start int64) (int64, error) {
	var newest int64
	err := fs.WalkDir(root.FS(), ".", func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if t := info.ModTime().Unix(); t < start {
			newest = max(newest, t)
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("find the newest file: %w", err)
	}
	return newest, nil
}
