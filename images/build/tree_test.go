package build

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// writeTree writes files below a fresh directory. A text that begins with "-> " makes a symbolic link, a name that ends in
// a slash a directory.
func writeTree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if strings.HasSuffix(name, "/") {
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if to, ok := strings.CutPrefix(text, "-> "); ok {
			err = os.Symlink(to, path)
		} else {
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func openRoot(t *testing.T, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := root.Close(); err != nil {
			t.Error(err)
		}
	})
	return root
}

// messyTree has at least one of everything that a guest must not have.
func messyTree() map[string]string {
	return map[string]string{
		"usr/bin/app":                       "program",
		"etc/machine-id":                    "0123456789abcdef0123456789abcdef\n",
		"var/lib/dbus/machine-id":           "0123456789abcdef0123456789abcdef\n",
		"etc/ssh/ssh_host_ed25519_key":      "secret",
		"etc/ssh/ssh_host_ed25519_key.pub":  "public",
		"etc/ssh/sshd_config":               "kept",
		"etc/resolv.conf":                   "-> ../run/systemd/resolve/stub-resolv.conf",
		"etc/hostname":                      "builder\n",
		"etc/fstab":                         "/dev/sda1 / ext4 defaults 0 1\n/dev/sda2 none swap sw 0 0\n# /dev/sdb none swap\n",
		"swapfile":                          "old secrets",
		"var/lib/systemd/random-seed":       "seed",
		"var/lib/dhcp/dhclient.eth0.leases": "lease",
		"run/lock/left":                     "behind",
		"tmp/build":                         "rubbish",
		"etc/cron.d/job":                    "* * * * * root true\n",
		"etc/cron.daily/.placeholder":       "",
		"etc/systemd/system/timers.target.wants/apt-daily.timer": "-> /lib/systemd/system/apt-daily.timer",
	}
}

func TestPrepareTree(t *testing.T) {
	t.Parallel()
	dir := writeTree(t, messyTree())
	before, err := Lint(dir)
	if err != nil {
		t.Fatal(err)
	}
	fatal := map[string]bool{}
	for _, f := range before {
		if f.Fatal {
			fatal[f.Path] = true
		}
	}
	for _, name := range []string{
		"proc", "etc/machine-id", "var/lib/dbus/machine-id", "etc/ssh/ssh_host_ed25519_key", "etc/ssh/ssh_host_ed25519_key.pub", "etc/fstab", "swapfile",
		"var/lib/systemd/random-seed", "var/lib/dhcp/dhclient.eth0.leases", "etc/coppice/reseal.d",
	} {
		if !fatal[name] {
			t.Errorf("Lint did not find %s", name)
		}
	}
	if err := prepareTree(openRoot(t, dir), sessionDefaults{env: map[string]string{"PATH": "/opt/bin:/bin", "A": "b c=d"}, user: "app:1000", dir: "/srv"}); err != nil {
		t.Fatal(err)
	}
	after, err := Lint(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []Finding{
		{Path: "etc/cron.d/job", Msg: "is a periodic job; every fork would run it"},
		{Path: "etc/systemd/system/timers.target.wants/apt-daily.timer", Msg: "is a periodic job; every fork would run it"},
	}
	if diff := cmp.Diff(want, after); diff != "" {
		t.Errorf("findings after prepareTree (-want +got):\n%s", diff)
	}
	for name, text := range map[string]string{
		"etc/machine-id": "", "etc/hostname": "coppice\n", "etc/resolv.conf": "", "etc/ssh/sshd_config": "kept", "usr/bin/app": "program",
		"etc/coppice/env": "A=b c=d\nPATH=/opt/bin:/bin\n", "etc/coppice/user": "app:1000\n", "etc/coppice/workdir": "/srv\n",
		"etc/fstab": "/dev/sda1 / ext4 defaults 0 1\n# no swap in a sandbox: /dev/sda2 none swap sw 0 0\n# /dev/sdb none swap\n",
	} {
		raw, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(raw) != text {
			t.Errorf("%s = %q, %v, want %q", name, raw, err, text)
		}
	}
	for _, name := range []string{"run/lock", "tmp/build"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there (%v)", name, err)
		}
	}
	if info, err := os.Stat(filepath.Join(dir, "tmp")); err != nil || info.Mode().Perm() != 0o755 && info.Mode() != fs.ModeDir|fs.ModeSticky|0o777 {
		t.Errorf("/tmp has %v, %v", info.Mode(), err)
	}
}

// TestPrepareTreeStaysInside: links in a hostile tree lead to files of the host, which must stay as they are.
func TestPrepareTreeStaysInside(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, link string }{
		{"file", "etc/machine-id"},
		{"directory", "etc/coppice"},
		{"hooks", "etc/coppice/reseal.d"},
		{"mount point", "proc"},
		{"parent", "etc"},
		{"ssh", "etc/ssh"},
		{"seed", "var/lib/systemd"},
		{"fstab", "etc/fstab"},
		{"hostname", "etc/hostname"},
		{"tmp", "tmp"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			outside := writeTree(t, map[string]string{"random-seed": "host's", "ssh_host_rsa_key": "host's", "swap": "/dev/x none swap sw 0 0"})
			before := listing(t, outside)
			for _, target := range []string{outside, filepath.Join(outside, "swap")} {
				files := map[string]string{"usr/bin/app": "program", c.link: "-> " + target}
				err := prepareTree(openRoot(t, writeTree(t, files)), sessionDefaults{env: map[string]string{"A": "b"}, user: "app", dir: "/srv"})
				t.Logf("%s -> %s: %v", c.link, target, err)
				if diff := cmp.Diff(before, listing(t, outside)); diff != "" {
					t.Errorf("files of the host changed (-before +after):\n%s", diff)
				}
			}
		})
	}
}

func listing(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			out[path] = "directory"
			return err
		}
		raw, err := os.ReadFile(path)
		out[path] = string(raw)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestTrimDebian(t *testing.T) {
	t.Parallel()
	dir := writeTree(t, map[string]string{
		"etc/shadow":              "root:*:20778:0:99999:7:::\nnobody:*:20778:0:99999:7:::\n",
		"etc/passwd":              "root:x:0:0::/root:/bin/sh\n",
		"etc/passwd-":             "old",
		"etc/cron.daily/dpkg":     "#!/bin/sh\n",
		"etc/cron.d/e2scrub_all":  "30 3 * * 0 root true\n",
		"etc/rc0.d/K01hwclock.sh": "-> ../init.d/hwclock.sh",
		"etc/systemd/system/timers.target.wants/fstrim.timer": "-> /lib/x",
		"var/log/dpkg.log":                "log",
		"var/log/apt/history.log":         "log",
		"var/cache/ldconfig/aux-cache":    "cache",
		"var/cache/apt/pkgcache.bin":      "cache",
		"var/lib/apt/lists/some_Packages": "list",
		"var/lib/dpkg/status":             "Package: dpkg\n",
		"var/lib/dpkg/status-old":         "",
		"usr/share/keyrings/known.gpg":    "key",
		"etc/apt/sources.list.d/0000coppice.sources": "Types: deb\nURIs: http://user:secret@mirror.example/debian/\nSuites: bookworm\nComponents: main\nSigned-By: /usr/share/keyrings/known.gpg\n\n" +
			"Types: deb\nURIs: http://mirror.example/security\nSuites: bookworm-security\nComponents: main\nSigned-By: /usr/share/keyrings/only-on-the-host.gpg\n",
	})
	if err := trimDebian(openRoot(t, dir)); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for path, text := range listing(t, dir) {
		if rel, _ := filepath.Rel(dir, path); text != "directory" {
			got[rel] = text
		}
	}
	want := map[string]string{
		"etc/shadow":                   "root:*::0:99999:7:::\nnobody:*::0:99999:7:::\n",
		"etc/passwd":                   "root:x:0:0::/root:/bin/sh\n",
		"var/lib/dpkg/status":          "Package: dpkg\n",
		"usr/share/keyrings/known.gpg": "key",
		"etc/apt/sources.list.d/debian.sources": "Types: deb\nURIs: http://mirror.example/debian/\nSuites: bookworm\nComponents: main\nSigned-By: /usr/share/keyrings/known.gpg\n\n" +
			"Types: deb\nURIs: http://mirror.example/security\nSuites: bookworm-security\nComponents: main\n\n",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files after trimDebian (-want +got):\n%s", diff)
	}
}

func TestNewestShippedIgnoresTheBuild(t *testing.T) {
	t.Parallel()
	dir := writeTree(t, map[string]string{"old": "", "new": "", "built": ""})
	start := time.Now().Add(-time.Minute)
	for name, at := range map[string]time.Time{"old": time.Unix(1000, 0), "new": time.Unix(2000, 5e8), "built": time.Now()} {
		if err := os.Chtimes(filepath.Join(dir, name), at, at); err != nil {
			t.Fatal(err)
		}
	}
	got, err := newestShipped(openRoot(t, dir), start.Unix())
	if err != nil || got != 2000 {
		t.Errorf("newestShipped = %d, %v, want 2000", got, err)
	}
}

func TestLintTree(t *testing.T) {
	t.Parallel()
	dir := writeTree(t, messyTree())
	if err := prepareTree(openRoot(t, dir), sessionDefaults{}); err != nil {
		t.Fatal(err)
	}
	var warned []string
	warn := func(s string) { warned = append(warned, s) }
	if err := lintTree(dir, images.SourceTar, warn); err != nil {
		t.Errorf("a user's tree with cron jobs was refused: %v", err)
	}
	if len(warned) != 2 || !slices.ContainsFunc(warned, func(s string) bool { return strings.HasPrefix(s, "/etc/cron.d/job:") }) {
		t.Errorf("warnings are %q", warned)
	}
	if err := lintTree(dir, images.SourceDebian, warn); core.CodeOf(err) != images.CodeImageBuildFailed {
		t.Errorf("our own tree with cron jobs: err = %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "etc/machine-id"), []byte("0123"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := lintTree(dir, images.SourceTar, warn); core.CodeOf(err) != images.CodeImageBuildFailed || !strings.Contains(err.Error(), "machine-id") {
		t.Errorf("a machine id: err = %v", err)
	}
}

func TestCheckEnv(t *testing.T) {
	t.Parallel()
	for _, env := range []map[string]string{{"": "x"}, {"A=B": "x"}, {"A\nB": "x"}, {"A": "x\ny"}, {"A B": "x"}, {"#A": "x"}, {"A": "\x00"}, {"A": strings.Repeat("x", maxVariable)}} {
		if err := checkEnv(env); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("checkEnv(%q) = %v", env, err)
		}
	}
	if err := checkEnv(map[string]string{"PATH": "/bin", "X_1": "a=b # c", "L": strings.Repeat("x", maxVariable-1)}); err != nil {
		t.Error(err)
	}
}
