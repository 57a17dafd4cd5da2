package build

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// debianOrigin is the Origin that Debian's archives and their mirrors declare. Other archives on the host (a
// vendor's, a company's) take no part in an image.
const debianOrigin = "Debian"

// Archive is a package archive that the host's apt is configured with.
type Archive struct {
	URI        string
	Release    string // as in the sources: a suite or a codename
	Components []string
	SignedBy   string // as in the sources; may be empty
}

// aptConfig is the apt configuration of a build: the host's Debian archives and the indexes that the host has fetched,
// but neither the host's installed packages nor its pins.
type aptConfig struct {
	suite   string
	arch    string
	sources []Archive
	// indexes are the files with the lists of packages; their state is part of the key under which a resolution is
	// cached.
	indexes []string
	dir     string // a private directory for apt's cache, the sources file and an empty package status
	log     io.Writer
}

// osRelease and aptIndexFormat are seams for tests: hosts differ in both.
const osReleaseFile = "/etc/os-release"

const aptIndexFormat = "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(CODENAME)\t$(ORIGIN)\t$(ARCHITECTURE)\t$(SOURCESENTRY)\t$(FILENAME)"

// readAptConfig reads how the host's apt is configured. suite may be empty: the host's own. dir must exist and be
// private to the build.
func readAptConfig(ctx context.Context, suite, dir string, log io.Writer) (*aptConfig, error) {
	arch, err := output(ctx, tool{name: "dpkg", args: []string{"--print-architecture"}, log: log})
	if err != nil {
		return nil, err
	}
	if suite == "" {
		if suite, err = hostSuite(osReleaseFile); err != nil {
			return nil, err
		}
	}
	targets, err := output(ctx, tool{name: "apt-get", args: []string{"indextargets", "--format", aptIndexFormat, "Created-By: Packages"}, log: log})
	if err != nil {
		return nil, err
	}
	a := &aptConfig{suite: suite, arch: strings.TrimSpace(arch), dir: dir, log: log}
	a.parseTargets(targets)
	if len(a.sources) == 0 {
		return nil, core.Errorf(core.FailedPrecondition, images.CodeImageBuildFailed,
			"this host's apt has no package index of Debian %s for %s; cure: add a Debian archive of that suite to the host's apt sources, then run apt-get update", suite, a.arch)
	}
	if err := os.WriteFile(a.sourcesFile(), a.deb822(), 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "status"), nil, 0o600); err != nil {
		return nil, err
	}
	return a, os.MkdirAll(filepath.Join(dir, "cache", "archives", "partial"), 0o700)
}

// hostSuite reads the codename of the host's Debian release.
func hostSuite(osRelease string) (string, error) {
	values := map[string]string{}
	err := eachLine(osRelease, func(line string) error {
		k, v, _ := strings.Cut(line, "=")
		values[k] = strings.Trim(v, `"'`)
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("read which release this host runs: %w", err)
	}
	if values["ID"] != "debian" || values["VERSION_CODENAME"] == "" {
		return "", core.Errorf(core.FailedPrecondition, core.CodeUnsupported,
			"images are built on Debian, and this host says it is %q; cure: build on a Debian host, or name a suite that the host's apt sources have", core.Clip(cmp.Or(values["PRETTY_NAME"], values["ID"])))
	}
	return values["VERSION_CODENAME"], nil
}

// parseTargets keeps the archives of the suite (with its updates, security and backports) that are Debian's own.
func (a *aptConfig) parseTargets(targets string) {
	type key struct{ uri, release, signedBy string }
	components := map[key][]string{}
	var order []key
	for line := range strings.Lines(targets) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != 8 || f[4] != debianOrigin || f[5] != a.arch || !ofSuite(f[3], a.suite) || strings.HasPrefix(f[0], "cdrom:") {
			continue
		}
		k := key{f[0], f[1], signedBy(f[6], f[0], f[1])}
		if components[k] == nil {
			order = append(order, k)
		}
		components[k] = append(components[k], f[2])
		a.indexes = append(a.indexes, f[7])
	}
	for _, k := range order {
		slices.Sort(components[k])
		a.sources = append(a.sources, Archive{k.uri, k.release, slices.Compact(components[k]), k.signedBy})
	}
}

func ofSuite(codename, suite string) bool {
	return codename == suite || strings.HasPrefix(codename, suite+"-")
}

// signedBy finds the keyring that the host's sources name for an archive. entry is apt's "file:number".
func signedBy(entry, uri, release string) string {
	file := entry
	if i := strings.LastIndexByte(entry, ':'); i > 0 {
		file = entry[:i]
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		return "" // apt's trusted keys then decide, as for any source without the field
	}
	if filepath.Ext(file) != ".sources" {
		return signedByOneLine(raw, uri, release)
	}
	for _, stanza := range stanzas(raw) {
		if hasWord(stanza["uris"], strings.TrimSuffix(uri, "/")) && hasWord(stanza["suites"], release) {
			return stanza["signed-by"]
		}
	}
	return ""
}

var oneLineSource = regexp.MustCompile(`^deb\s+\[([^\]]*)\]\s+(\S+)\s+(\S+)`)

func signedByOneLine(raw []byte, uri, release string) string {
	for line := range strings.Lines(string(raw)) {
		m := oneLineSource.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil || strings.TrimSuffix(m[2], "/") != strings.TrimSuffix(uri, "/") || m[3] != release {
			continue
		}
		for option := range strings.FieldsSeq(m[1]) {
			if v, ok := strings.CutPrefix(option, "signed-by="); ok {
				return v
			}
		}
	}
	return ""
}

func hasWord(text, word string) bool {
	for w := range strings.FieldsSeq(text) {
		if strings.TrimSuffix(w, "/") == word {
			return true
		}
	}
	return false
}

// stanzas parses RFC 822-like paragraphs, as in apt's sources and indexes. Field names are lower-cased; continuation
// lines keep their newline and lose their first blank.
func stanzas(raw []byte) []map[string]string {
	var out []map[string]string
	var cur map[string]string
	field := ""
	lines := bufio.NewScanner(bytes.NewReader(raw))
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		line := lines.Text()
		switch {
		case strings.TrimSpace(line) == "":
			cur = nil
		case line[0] == '#':
		case line[0] == ' ' || line[0] == '\t':
			if cur != nil && field != "" {
				cur[field] += "\n" + line[1:]
			}
		default:
			k, v, _ := strings.Cut(line, ":")
			if cur == nil {
				cur = map[string]string{}
				out = append(out, cur)
			}
			field = strings.ToLower(strings.TrimSpace(k))
			cur[field] = strings.TrimSpace(v)
		}
	}
	return out
}

// HostArchives returns Debian's archives of the host's release from the configuration of its apt; dir is an empty
// directory for apt.
func HostArchives(ctx context.Context, dir string) (suite string, archives []Archive, err error) {
	a, err := readAptConfig(ctx, "", dir, nil)
	if err != nil {
		return "", nil, err
	}
	return a.suite, a.sources, nil
}

// deb822 renders the archives in apt's own format.
func (a *aptConfig) deb822() []byte { return Deb822(a.sources) }

// Deb822 renders archives in apt's own format, for a file whose name ends in .sources.
func Deb822(archives []Archive) []byte {
	var b bytes.Buffer
	for i, s := range archives {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\n", s.URI, s.Release, strings.Join(s.Components, " "))
		if s.SignedBy != "" {
			fmt.Fprintf(&b, "Signed-By: %s\n", strings.ReplaceAll(s.SignedBy, "\n", "\n "))
		}
	}
	return b.Bytes()
}

func (a *aptConfig) sourcesFile() string { return filepath.Join(a.dir, "coppice.sources") }

// args are the options with which apt uses nothing of the host except its sources and indexes.
func (a *aptConfig) args(rest ...string) []string {
	set := map[string]string{
		"APT::Architecture":       a.arch,
		"APT::Architectures":      a.arch,
		"APT::Install-Recommends": "false",
		"APT::Sandbox::User":      "root", // the private directory is closed to other users
		"Debug::NoLocking":        "true",
		"Dir::Cache":              filepath.Join(a.dir, "cache"),
		// A host that is a container image has these caches turned off, and each command would then read all indexes again.
		"Dir::Cache::pkgcache":       "pkgcache.bin",
		"Dir::Cache::srcpkgcache":    "srcpkgcache.bin",
		"Dir::Etc::preferences":      "/dev/null",
		"Dir::Etc::preferencesparts": "/dev/null",
		"Dir::Etc::sourcelist":       a.sourcesFile(),
		"Dir::Etc::sourceparts":      "/dev/null",
		"Dir::State::status":         filepath.Join(a.dir, "status"),
	}
	var out []string
	for _, k := range slices.Sorted(maps.Keys(set)) {
		out = append(out, "-o", k+"="+set[k])
	}
	return append(out, rest...)
}

// indexState identifies the state of the host's package indexes without reading them.
func (a *aptConfig) indexState() ([]string, error) {
	out := []string{a.suite, a.arch, string(a.deb822())}
	for _, path := range a.indexes {
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, core.Errorf(core.FailedPrecondition, images.CodeImageBuildFailed,
				"this host's apt has not fetched the index %s; cure: apt-get update", filepath.Base(path))
		}
		if err != nil {
			return nil, err
		}
		out = append(out, fmt.Sprintf("%s %d %d", path, info.Size(), info.ModTime().UnixNano()))
	}
	return out, nil
}

var instLine = regexp.MustCompile(`(?m)^Inst (\S+) (?:\[[^\]]*\] )?\((\S+) `)

// resolve returns every package of a root file system with the requested packages, as name=version, sorted.
func (a *aptConfig) resolve(ctx context.Context, requested []string) ([]string, error) {
	args := append([]string{"--simulate", "install", "?essential", "?priority(required)", "apt"}, requested...)
	text, err := output(ctx, tool{name: "apt-get", args: a.args(args...), log: a.log})
	if err != nil {
		return nil, fmt.Errorf("resolve packages: %w", err)
	}
	var out []string
	for _, m := range instLine.FindAllStringSubmatch(text, -1) {
		out = append(out, m[1]+"="+m[2])
	}
	if len(out) == 0 {
		return nil, core.Errorf(core.FailedPrecondition, images.CodeImageBuildFailed, "apt resolved the packages to nothing; cure: apt-get update")
	}
	slices.Sort(out)
	return out, nil
}
