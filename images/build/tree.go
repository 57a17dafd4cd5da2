package build

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// guestHostname is the host name before a sandbox has its own.
const guestHostname = "coppice"

// The files that Coppice puts into a root file system.
const (
	hooksDir = "etc/coppice/reseal.d" // executables run at every reseal
	envFile  = "etc/coppice/env"      // KEY=VALUE lines, the default environment of sessions
	userFile = "etc/coppice/user"     // one line, the user of sessions that name none
	dirFile  = "etc/coppice/workdir"  // one line, the directory of sessions that name none
)

// sessionDefaults is what sessions have unless they say otherwise.
type sessionDefaults struct {
	env       map[string]string
	user, dir string
}

// mountPoints must be directories in every root file system.
var mountPoints = []struct {
	name string
	perm fs.FileMode
}{
	{"dev", 0o755},
	{"proc", 0o555},
	{"sys", 0o555},
	{"run", 0o755},
	{"tmp", 0o777 | fs.ModeSticky},
	{"etc", 0o755},
	{"root", 0o700},
	{"var", 0o755},
}

// identityFiles would be shared by all sandboxes: keys, ids and seeds that a machine makes for itself once. They are
// removed, never kept; patterns are path.Match's, relative to the root.
var identityFiles = []string{
	"etc/ssh/ssh_host_*_key", "etc/ssh/ssh_host_*_key.pub",
	"var/lib/systemd/random-seed", "var/lib/urandom/random-seed", "var/lib/random-seed", "boot/loader/random-seed",
	"var/lib/dhcp/*.leases", "var/lib/dhcp/*.lease", "var/lib/dhclient/*.leases", "var/lib/dhcpcd/*", "var/lib/NetworkManager/*.lease",
	"var/lib/systemd/credential.secret", "etc/hostid", "swapfile", "swap.img",
}

// prepareTree makes an unpacked root file system fit for a guest: mount points, an identity that is empty until the
// first reseal, Coppice's own files.
func prepareTree(root *os.Root, defaults sessionDefaults) error {
	for _, m := range mountPoints {
		if err := ensureDir(root, m.name, m.perm); err != nil {
			return err
		}
	}
	for _, dir := range []string{"dev", "proc", "sys", "run", "tmp"} {
		if err := emptyDir(root, dir); err != nil {
			return err
		}
	}
	for _, pattern := range identityFiles {
		if err := removeMatching(root, pattern); err != nil {
			return err
		}
	}
	if info, err := root.Lstat("var/lib/dbus/machine-id"); err == nil && info.Mode().IsRegular() {
		if err := root.Remove("var/lib/dbus/machine-id"); err != nil {
			return err
		}
	}
	if err := dropSwap(root); err != nil {
		return err
	}
	hosts := "127.0.0.1\tlocalhost\n127.0.1.1\t" + guestHostname + "\n"
	for name, text := range map[string]string{"etc/machine-id": "", "etc/hostname": guestHostname + "\n", "etc/resolv.conf": "", "etc/hosts": hosts} {
		if err := replaceFile(root, name, text); err != nil {
			return err
		}
	}
	if err := root.MkdirAll(hooksDir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", hooksDir, err)
	}
	return writeDefaults(root, defaults)
}

func ensureDir(root *os.Root, name string, perm fs.FileMode) error {
	info, err := root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := root.Mkdir(name, 0o755); err != nil {
			return fmt.Errorf("make /%s: %w", name, err)
		}
		return root.Chmod(name, perm)
	case err != nil:
		return err
	case !info.IsDir():
		return core.Errorf(core.Invalid, CodeInvalidTar, "/%s is not a directory in the root file system, and a guest needs it as one", name)
	}
	return nil
}

func emptyDir(root *os.Root, name string) error {
	entries, err := fs.ReadDir(root.FS(), name)
	if err != nil {
		return fmt.Errorf("empty /%s: %w", name, err)
	}
	for _, e := range entries {
		if err := root.RemoveAll(path.Join(name, e.Name())); err != nil {
			return fmt.Errorf("empty /%s: %w", name, err)
		}
	}
	return nil
}

// removeMatching removes what matches a pattern whose last element may have wildcards.
func removeMatching(root *os.Root, pattern string) error {
	found, err := matching(root, pattern)
	for _, name := range found {
		err = errors.Join(err, root.RemoveAll(name))
	}
	if err != nil {
		return fmt.Errorf("remove /%s: %w", pattern, err)
	}
	return nil
}

func matching(root *os.Root, pattern string) ([]string, error) {
	dir := path.Dir(pattern)
	f, err := openDir(root, dir)
	if err != nil {
		return nil, nil // no such directory, or a link that leads nowhere inside: nothing of ours there
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, nil // not a directory
	}
	slices.Sort(names)
	var out []string
	for _, n := range names {
		if ok, err := path.Match(path.Base(pattern), n); err != nil {
			return nil, err
		} else if ok {
			out = append(out, path.Join(dir, n))
		}
	}
	return out, nil
}

// maxPlain bounds a file of a root file system that is read as a whole, in bytes.
const maxPlain = 4 << 20

// readPlain reads a regular file of a root file system. An archive may have put anything into its place. Nobody writes
// there any more, so the file that was checked is the file that is opened.
func readPlain(root *os.Root, name string) ([]byte, error) {
	info, err := root.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxPlain {
		return nil, core.Errorf(core.Invalid, CodeInvalidTar, "/%s of the root file system is not a regular file, or has more than %d MiB", name, maxPlain>>20)
	}
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxPlain))
}

// dropSwap comments out swap areas: swapped pages would keep old secrets on the overlay disk.
func dropSwap(root *os.Root) error {
	raw, err := readPlain(root, "etc/fstab")
	if err != nil {
		return nil //nolint:nilerr // there is none
	}
	var out bytes.Buffer
	changed := false
	for line := range strings.Lines(string(raw)) {
		if isSwapLine(line) {
			out.WriteString("# no swap in a sandbox: ")
			changed = true
		}
		out.WriteString(line)
	}
	if !changed {
		return nil
	}
	return replaceFile(root, "etc/fstab", out.String())
}

func isSwapLine(line string) bool {
	f := strings.Fields(line)
	return len(f) >= 3 && !strings.HasPrefix(f[0], "#") && f[2] == "swap"
}

// replaceFile writes a regular file in place of whatever is there, never through a link.
func replaceFile(root *os.Root, name, text string) error {
	if err := root.RemoveAll(name); err != nil {
		return fmt.Errorf("write /%s: %w", name, err)
	}
	if err := root.WriteFile(name, []byte(text), 0o644); err != nil {
		return fmt.Errorf("write /%s: %w", name, err)
	}
	return root.Chmod(name, 0o644)
}

// writeDefaults stores what sessions have unless they say otherwise. A file that the archive brought is kept where there is
// nothing to store.
func writeDefaults(root *os.Root, d sessionDefaults) error {
	var lines []string
	for k, v := range d.env {
		lines = append(lines, k+"="+v+"\n")
	}
	slices.Sort(lines)
	for name, text := range map[string]string{envFile: strings.Join(lines, ""), userFile: d.user, dirFile: d.dir} {
		if text == "" {
			continue
		}
		if err := replaceFile(root, name, strings.TrimSuffix(text, "\n")+"\n"); err != nil {
			return err
		}
	}
	return nil
}

// maxVariable bounds a variable of an image, in bytes. The agent reads the file by lines of at most 64 KiB.
const maxVariable = 32 << 10

// checkEnv refuses names and values that the file's format cannot hold.
func checkEnv(env map[string]string) error {
	for k, v := range env {
		if len(k)+len(v) > maxVariable {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "the environment variable %q has %d bytes; an image can have at most %d for one variable", core.Clip(k), len(k)+len(v), maxVariable)
		}
		if k == "" || strings.ContainsAny(k, "=\n\x00 #") || strings.ContainsAny(v, "\n\x00") {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "the environment variable %q cannot be stored: a name must have no blank, '#' or '=', a value no line break", core.Clip(k))
		}
	}
	return nil
}

// trimDebian removes parts of a fresh Debian that a quiet, reproducible guest must not have: jobs that an init would
// run, caches, logs, backups, and times of the build.
func trimDebian(root *os.Root) error {
	for _, dir := range []string{"var/log", "var/cache/apt", "var/cache/ldconfig", "var/cache/debconf", "var/lib/apt/lists", "boot", "var/tmp"} {
		if _, err := root.Lstat(dir); err == nil {
			if err := removeFilesBelow(root, dir); err != nil {
				return err
			}
		}
	}
	for _, pattern := range []string{
		"etc/cron.*/*", "etc/systemd/system/*.wants", "etc/*-", "var/lib/dpkg/*-old", "var/cache/man/*",
		"etc/rc?.d/*", "etc/.pwd.lock",
	} {
		if err := removeGlob(root, pattern); err != nil {
			return err
		}
	}
	if err := plainShadow(root); err != nil {
		return err
	}
	return guestSources(root)
}

// removeGlob removes what matches a pattern with wildcards in its last two elements.
func removeGlob(root *os.Root, pattern string) error {
	dirs, err := matching(root, path.Dir(pattern))
	for _, d := range dirs {
		err = errors.Join(err, removeMatching(root, path.Join(d, path.Base(pattern))))
	}
	return err
}

func removeFilesBelow(root *os.Root, dir string) error {
	err := fs.WalkDir(root.FS(), dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return root.Remove(name)
	})
	if err != nil {
		return fmt.Errorf("empty /%s: %w", dir, err)
	}
	return nil
}

// plainShadow drops the day of each password's last change: it is the day of the build.
func plainShadow(root *os.Root) error {
	raw, err := readPlain(root, "etc/shadow")
	if err != nil {
		return fmt.Errorf("read /etc/shadow: %w", err)
	}
	var out bytes.Buffer
	for line := range strings.Lines(string(raw)) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), ":")
		if len(f) == 9 {
			f[2] = ""
		}
		out.WriteString(strings.Join(f, ":") + "\n")
	}
	// Written in place: owner and mode (root:shadow 0640) stay.
	f, err := root.OpenFile("etc/shadow", os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return fmt.Errorf("write /etc/shadow: %w", err)
	}
	_, err = f.Write(out.Bytes())
	return errors.Join(err, f.Close())
}

// guestSources keeps the archives in the guest's apt configuration, without credentials of the host and without
// keyrings that only the host has.
func guestSources(root *os.Root) error {
	names, err := matching(root, "etc/apt/sources.list.d/*.sources")
	if err != nil {
		return err
	}
	var out strings.Builder
	for _, name := range names {
		raw, err := readPlain(root, name)
		if err != nil {
			return err
		}
		for _, s := range stanzas(raw) {
			fmt.Fprintf(&out, "Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\n", withoutCredentials(s["uris"]), s["suites"], s["components"])
			if key := s["signed-by"]; strings.HasPrefix(key, "/") {
				if _, err := root.Stat(strings.TrimPrefix(key, "/")); err == nil {
					out.WriteString("Signed-By: " + key + "\n")
				}
			}
			out.WriteString("\n")
		}
		if err := root.Remove(name); err != nil {
			return err
		}
	}
	return replaceFile(root, "etc/apt/sources.list.d/debian.sources", out.String())
}

func withoutCredentials(uri string) string {
	u, err := url.Parse(uri)
	if err != nil || u.User == nil {
		return uri
	}
	u.User = nil
	return u.String()
}
