package build

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
)

const debianSources = `Types: deb deb-src
# a comment inside
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/archive.gpg

Types: deb
URIs: http://mirror.example/debian-security/
Suites: bookworm-security
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
 -----END PGP PUBLIC KEY BLOCK-----
`

const oneLineSources = `# deb http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/etc/apt/keyrings/a.gpg] http://mirror.example/debian/ bookworm main
deb http://mirror.example/debian bookworm-updates main
`

func TestParseTargets(t *testing.T) {
	t.Parallel()
	dir := writeIndex(t, map[string]string{"debian.sources": debianSources, "one.list": oneLineSources})
	deb, list := filepath.Join(dir, "debian.sources"), filepath.Join(dir, "one.list")
	line := func(uri, release, component, codename, origin, arch, entry string) string {
		return uri + "\t" + release + "\t" + component + "\t" + codename + "\t" + origin + "\t" + arch + "\t" + entry + "\t/lists/" + release + "_" + component + "\n"
	}
	targets := line("http://mirror.example/debian/", "bookworm", "main", "bookworm", "Debian", "amd64", deb+":1") +
		line("http://mirror.example/debian/", "bookworm-updates", "main", "bookworm-updates", "Debian", "amd64", deb+":1") +
		line("http://mirror.example/debian-security/", "bookworm-security", "main", "bookworm-security", "Debian", "amd64", deb+":3") +
		line("http://mirror.example/debian-security/", "bookworm-security", "contrib", "bookworm-security", "Debian", "amd64", deb+":3") +
		line("http://mirror.example/debian/", "bookworm", "main", "bookworm", "Debian", "i386", deb+":1") +
		line("http://mirror.example/debian/", "trixie", "main", "trixie", "Debian", "amd64", deb+":1") +
		line("http://vendor.example/apt/", "bookworm", "main", "bookworm", "Vendor", "amd64", list+":9") +
		line("cdrom:[Debian]/", "bookworm", "main", "bookworm", "Debian", "amd64", list+":9") +
		"a line of something else\n"
	a := &aptConfig{suite: "bookworm", arch: "amd64"}
	a.parseTargets(targets)
	const key = "\n-----BEGIN PGP PUBLIC KEY BLOCK-----\n.\nabc\n-----END PGP PUBLIC KEY BLOCK-----"
	want := []Archive{
		{"http://mirror.example/debian/", "bookworm", []string{"main"}, "/usr/share/keyrings/archive.gpg"},
		{"http://mirror.example/debian/", "bookworm-updates", []string{"main"}, "/usr/share/keyrings/archive.gpg"},
		{"http://mirror.example/debian-security/", "bookworm-security", []string{"contrib", "main"}, key},
	}
	if diff := cmp.Diff(want, a.sources); diff != "" {
		t.Errorf("sources (-want +got):\n%s", diff)
	}
	if want := []string{"/lists/bookworm_main", "/lists/bookworm-updates_main", "/lists/bookworm-security_main", "/lists/bookworm-security_contrib"}; !cmp.Equal(want, a.indexes) {
		t.Errorf("indexes are %q, want %q", a.indexes, want)
	}
	// The rendered text means the same when it is read again.
	parsed := stanzas(a.deb822())
	if len(parsed) != 3 || parsed[2]["signed-by"] != key || parsed[2]["components"] != "contrib main" || parsed[0]["signed-by"] != want[0].SignedBy {
		t.Errorf("rendered sources read as %q", parsed)
	}
	for release, want := range map[string]string{"bookworm": "/etc/apt/keyrings/a.gpg", "bookworm-updates": "", "sid": ""} {
		if got := signedBy(list+":2", "http://mirror.example/debian/", release); got != want {
			t.Errorf("signedBy(one line, %s) = %q, want %q", release, got, want)
		}
	}
	if got := signedBy(filepath.Join(dir, "gone.sources:1"), "http://mirror.example/", "bookworm"); got != "" {
		t.Errorf("signedBy of a missing file = %q", got)
	}
}

func TestHostSuite(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, text, want string
		code             core.Code
	}{
		{"debian", "ID=debian\nVERSION_CODENAME=bookworm\n", "bookworm", ""},
		{"quoted", "ID=\"debian\"\nVERSION_CODENAME='trixie'\n", "trixie", ""},
		{"another", "PRETTY_NAME=\"Fedora 40\"\nID=fedora\n", "", core.CodeUnsupported},
		{"nameless", "ID=debian\n", "", core.CodeUnsupported},
	} {
		file := filepath.Join(t.TempDir(), "os-release")
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := hostSuite(file)
		if got != c.want || core.CodeOf(err) != c.code {
			t.Errorf("%s: hostSuite = %q, %v", c.name, got, err)
		}
	}
}

func TestOfSuite(t *testing.T) {
	t.Parallel()
	for codename, want := range map[string]bool{"bookworm": true, "bookworm-security": true, "bookworm-backports": true, "bookwormish": false, "trixie": false, "": false} {
		if got := ofSuite(codename, "bookworm"); got != want {
			t.Errorf("ofSuite(%q) = %v", codename, got)
		}
	}
}

func TestInstLine(t *testing.T) {
	t.Parallel()
	const text = "Reading...\nInst libc6 (2.36-9 Debian:12/oldstable [amd64]) []\nInst git [1:2.3] (1:2.39.5-0 Debian:12 [amd64])\nConf libc6 (2.36-9 Debian:12)\n"
	var got []string
	for _, m := range instLine.FindAllStringSubmatch(text, -1) {
		got = append(got, m[1]+"="+m[2])
	}
	if diff := cmp.Diff([]string{"libc6=2.36-9", "git=1:2.39.5-0"}, got); diff != "" {
		t.Errorf("packages (-want +got):\n%s", diff)
	}
}

func TestVersionGreater(t *testing.T) {
	t.Parallel()
	require.Program(t, "dpkg", "dpkg")
	for _, c := range []struct {
		a, b string
		want bool
	}{{"6.12.95-1~bpo12+1", "6.1.192-2", true}, {"6.1.192-2", "6.12.95-1~bpo12+1", false}, {"6.1.192-2", "6.1.192-2", false}, {"6.1.192-2", "6.1.192-2~rc1", true}} {
		got, err := versionGreater(t.Context(), c.a, c.b)
		if err != nil || got != c.want {
			t.Errorf("versionGreater(%s, %s) = %v, %v", c.a, c.b, got, err)
		}
	}
}
