package pgcluster

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"github.com/coppice-dev/coppice/core"
)

// Superuser is the name of the cluster's owner role.
const Superuser = "postgres"

// debianBins is where Debian keeps each major version's programs.
const debianBins = "/usr/lib/postgresql/*/bin"

// Config says what to run and where.
type Config struct {
	// Dir is the cluster's own directory, absolute. It is made if it is not there.
	Dir string
	// Binaries are the programs to use; see Find.
	Binaries Binaries
	// Durable clusters survive a power cut. One that is not is faster and fit for tests only.
	Durable bool
	// MaxConnections bounds the sessions; 0 means 100.
	MaxConnections int
	// Settings are given to the server besides, or instead of, those of this package. One with an empty value is left to the files in the
	// data directory, so that ALTER SYSTEM can change it.
	Settings map[string]string
	// Log gets one line per start, stop and repair.
	Log *slog.Logger
}

// Binaries are the server programs of one PostgreSQL version.
type Binaries struct {
	Initdb   string // absolute path
	Postgres string // absolute path
	Major    int    // for example 15
	Version  string // for example 15.18
}

// Find looks for the programs in hint (a directory; may be empty), in Debian's directories from the newest version
// down, and on PATH. An absent server is an INCOMPATIBLE_HOST error with the cure.
func Find(ctx context.Context, hint string) (Binaries, error) {
	all, err := findAll(ctx, hint)
	if err != nil {
		return Binaries{}, err
	}
	return all[0], nil
}

// FindMajor is Find for one major version.
func FindMajor(ctx context.Context, hint string, major int) (Binaries, error) {
	all, err := findAll(ctx, hint)
	if err != nil {
		return Binaries{}, err
	}
	i := slices.IndexFunc(all, func(b Binaries) bool { return b.Major == major })
	if i < 0 {
		return Binaries{}, core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost,
			"PostgreSQL %d is not installed (%s is): install postgresql-%d", major, all[0].Version, major)
	}
	return all[i], nil
}

func findAll(ctx context.Context, hint string) ([]Binaries, error) {
	dirs, err := places(hint)
	if err != nil {
		return nil, err
	}
	return inspectAll(ctx, dirs)
}

// places lists the directories to look in, best first.
func places(hint string) ([]string, error) {
	var dirs []string
	if hint != "" {
		dirs = append(dirs, hint)
	}
	debian, err := filepath.Glob(debianBins)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(debian, func(a, b string) int { return cmp.Compare(majorOfDir(b), majorOfDir(a)) })
	dirs = append(dirs, debian...)
	if path, err := exec.LookPath("initdb"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil { // the server finds its files beside its real place
			dirs = append(dirs, filepath.Dir(path))
		}
	}
	return dirs, nil
}

func inspectAll(ctx context.Context, dirs []string) ([]Binaries, error) {
	var found []Binaries
	var faults []error
	for _, dir := range dirs {
		b, err := inspect(ctx, dir)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		found = append(found, b)
	}
	if len(found) == 0 {
		return nil, core.Wrapf(errors.Join(faults...), core.FailedPrecondition, core.CodeIncompatibleHost,
			"no PostgreSQL server programs (initdb, postgres) found: run `make setup`, or apt-get install --no-install-recommends postgresql, or set PGBIN to their directory")
	}
	return found, nil
}

// majorOfDir reads the version from /usr/lib/postgresql/15/bin.
func majorOfDir(dir string) int {
	n, err := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
	if err != nil {
		return 0
	}
	return n
}

var versionForm = regexp.MustCompile(`\(PostgreSQL\) ((\d+)[.\w]*)`)

func inspect(ctx context.Context, dir string) (Binaries, error) {
	b := Binaries{Initdb: filepath.Join(dir, "initdb"), Postgres: filepath.Join(dir, "postgres")}
	if _, err := os.Stat(b.Initdb); err != nil {
		return Binaries{}, err
	}
	out, err := exec.CommandContext(ctx, b.Postgres, "--version").Output() //nolint:gosec // G204: a fixed list of places and the operator's own PGBIN
	if err != nil {
		return Binaries{}, err
	}
	m := versionForm.FindStringSubmatch(string(out))
	if m == nil {
		return Binaries{}, errors.New(b.Postgres + " --version printed " + strconv.Quote(core.Clip(string(out))))
	}
	b.Version = m[1]
	b.Major, err = strconv.Atoi(m[2])
	return b, err
}

// dsn is the connection string of a database behind a socket directory, as a URL, which pgx and golang-migrate both
// read.
func dsn(socketDir, database string) string {
	q := url.Values{"host": {socketDir}, "port": {port}, "sslmode": {"disable"}}
	u := url.URL{Scheme: "postgres", User: url.User(Superuser), Path: "/" + database, RawQuery: q.Encode()}
	return u.String()
}

// port only names the socket file; no TCP port is opened.
const port = "5432"
