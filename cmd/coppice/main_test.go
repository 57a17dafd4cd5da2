package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/hostcheck"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// testApp is an app with its own streams and environment.
func testApp(env map[string]string) (a *app, stdout, stderr *bytes.Buffer) {
	stdout, stderr = new(bytes.Buffer), new(bytes.Buffer)
	return &app{stdin: strings.NewReader(""), stdout: stdout, stderr: stderr, getenv: func(k string) string { return env[k] }}, stdout, stderr
}

func TestCommandLine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args           []string
		status         int
		stdout, stderr string
	}{
		{[]string{}, exitOK, "Usage:", ""},
		{[]string{"--help"}, exitOK, "--server address", ""},
		{[]string{"--version"}, exitOK, "coppice version ", ""},
		{[]string{"frobnicate"}, exitUsage, "", `unknown command "frobnicate"`},
		{[]string{"--frobnicate"}, exitUsage, "", "unknown flag: --frobnicate"},
		{[]string{"doctor", "extra"}, exitUsage, "", "Try 'coppice --help'."},
		{[]string{"--json", "frobnicate"}, exitUsage, "", `"exit_status":2`},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			t.Parallel()
			a, stdout, stderr := testApp(nil)
			if got := run(t.Context(), a, c.args); got != c.status {
				t.Errorf("exit status %d, want %d", got, c.status)
			}
			if !strings.Contains(stdout.String(), c.stdout) || c.stdout == "" && stdout.Len() > 0 {
				t.Errorf("stdout %q, want %q in it", stdout, c.stdout)
			}
			if !strings.Contains(stderr.String(), c.stderr) || c.stderr == "" && stderr.Len() > 0 {
				t.Errorf("stderr %q, want %q in it", stderr, c.stderr)
			}
		})
	}
}

// TestGroups runs the parser over a command with commands below it, as `coppice ws` is.
func TestGroups(t *testing.T) {
	t.Parallel()
	group := func(*app) *cobra.Command {
		g := &cobra.Command{Use: "things"}
		g.AddCommand(&cobra.Command{Use: "ls", Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error {
			return core.Errorf(core.NotFound, core.CodeWorkspaceNotFound, "no such thing")
		}})
		return g
	}
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"things"}, exitOK, ""},
		{[]string{"things", "burn"}, exitUsage, `unknown command "burn" for "coppice things"`},
		{[]string{"things", "ls", "x"}, exitUsage, "unknown command"},
		{[]string{"things", "ls"}, exitNotFound, "no such thing"},
	} {
		a, _, stderr := testApp(nil)
		if got := a.run(t.Context(), c.args, group); got != c.status || !strings.Contains(stderr.String(), c.says) {
			t.Errorf("%v: exit status %d, %q; want %d and %q", c.args, got, stderr, c.status, c.says)
		}
	}
}

func TestBadFailpoints(t *testing.T) {
	t.Parallel()
	a, _, stderr := testApp(map[string]string{"COPPICE_FAILPOINTS": "absent=kill"})
	if got := run(t.Context(), a, []string{"--version"}); got != exitUsage || !strings.Contains(stderr.String(), `failpoint "absent"`) {
		t.Errorf("exit status %d, %q", got, stderr)
	}
}

func TestExitStatus(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, exitOK},
		{errors.New("plain"), exitFailure},
		{fs.ErrNotExist, exitFailure},
		{fmt.Errorf("wrapped: %w", core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "no")), exitExhausted},
		{core.Errorf(core.Internal, "NEW_CODE", "no"), exitFailure},
		{fmt.Errorf("call: %w", &coppice.Error{Code: coppice.CodeWorkspaceNotFound, Status: 404}), exitNotFound},
		{&coppice.Error{Code: "FROM_THE_FUTURE", Status: 409}, exitConflict},
		{&coppice.Error{Code: "FROM_THE_FUTURE", Status: 503}, exitUnavailable},
		{&coppice.Error{Code: "FROM_THE_FUTURE"}, exitFailure},
		{&coppice.Error{Code: coppice.CodeInternal, Status: 500}, exitInternal},
		{statusError(37), 37},
		{fmt.Errorf("remote: %w", statusError(0)), 0},
		{misuse(errors.New("bad flag")), exitUsage},
	} {
		if got := exitStatus(c.err); got != c.want {
			t.Errorf("exitStatus(%v) = %d, want %d", c.err, got, c.want)
		}
	}
}

// TestEveryCodeHasAStatus reads the codes out of core, so that a new one is not forgotten.
func TestEveryCodeHasAStatus(t *testing.T) {
	t.Parallel()
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join("..", "..", "core", "error.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{codeUsage: true}
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && len(v.Values) == 1 {
			typ, okType := v.Type.(*ast.Ident)
			lit, okLit := v.Values[0].(*ast.BasicLit)
			if okType && okLit && typ.Name == "Code" {
				code := strings.Trim(lit.Value, `"`)
				seen[code] = true
				if _, ok := exitOfCode[code]; !ok {
					t.Errorf("%s has no exit status", code)
				}
			}
		}
		return true
	})
	for code := range exitOfCode {
		if !seen[code] {
			t.Errorf("%s is in the table and not in core", code)
		}
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	api := &coppice.Error{Code: coppice.CodeNameTaken, Status: 409, Detail: "the name is taken", RequestID: "r1"}
	a, stdout, stderr := testApp(nil)
	a.report(api)
	if want := "coppice: the name is taken (NAME_TAKEN) [request r1]\n"; stderr.String() != want || stdout.Len() > 0 {
		t.Errorf("got %q, want %q", stderr, want)
	}
	a, _, stderr = testApp(nil)
	a.json = true
	a.report(api)
	var got map[string]map[string]any
	if err := json.Unmarshal(stderr.Bytes(), &got); err != nil || got["error"]["code"] != "NAME_TAKEN" || got["error"]["exit_status"] != float64(exitConflict) {
		t.Errorf("got %v, %v", got, err)
	}
	a, _, stderr = testApp(nil)
	if a.report(statusError(3)) != 3 || stderr.Len() > 0 {
		t.Errorf("a remote command's status came with %q", stderr)
	}
}

func TestConnection(t *testing.T) {
	t.Parallel()
	home := t.TempDir()
	saver, _, _ := testApp(map[string]string{"HOME": home})
	saved := connection{Server: "unix:///s", Token: "t"}
	if err := saver.saveConnection(saved); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(home, ".config", "coppice", "connection.json")
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v; want mode 0600", file, fi, err)
	}
	for _, c := range []struct {
		name string
		env  map[string]string
		flag connection
		want connection
		err  error
	}{
		{"file", map[string]string{"HOME": home}, connection{}, saved, nil},
		{"named file", map[string]string{"COPPICE_CONNECTION": file}, connection{}, saved, nil},
		{"XDG", map[string]string{"XDG_CONFIG_HOME": filepath.Join(home, ".config")}, connection{}, saved, nil},
		{"environment wins over the file", map[string]string{"HOME": home, "COPPICE_SERVER": "http://e", "COPPICE_TOKEN": "e"}, connection{}, connection{"http://e", "e"}, nil},
		{"flags win over the environment", map[string]string{"COPPICE_SERVER": "http://e", "COPPICE_TOKEN": "e"}, connection{"http://f", "f"}, connection{"http://f", "f"}, nil},
		{"another server does not get the file's key", map[string]string{"HOME": home}, connection{Server: "http://f"}, connection{Server: "http://f"}, nil},
		{"another key for the file's server", map[string]string{"HOME": home, "COPPICE_TOKEN": "e"}, connection{}, connection{"unix:///s", "e"}, nil},
		{"nothing", map[string]string{"HOME": t.TempDir()}, connection{}, connection{}, errNoServer},
		{"no home", nil, connection{}, connection{}, errNoServer},
	} {
		a, _, _ := testApp(c.env)
		a.server, a.token = c.flag.Server, c.flag.Token
		got, err := a.connection()
		if diff := cmp.Diff(c.want, got); diff != "" || !errors.Is(err, c.err) {
			t.Errorf("%s: %v %s", c.name, err, diff)
		}
	}
	a, _, _ := testApp(map[string]string{"HOME": home})
	if _, err := a.client(); err != nil {
		t.Error(err)
	}
}

func TestPrintReport(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	err := printReport(&b, hostcheck.Report{OK: false, Checks: []hostcheck.Result{
		{Name: "one", Status: hostcheck.OK, Detail: "fine"},
		{Name: "second", Status: hostcheck.Fail, Detail: strings.Repeat("long words ", 12), Cure: "do this"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := `ok    one     fine
fail  second  long words long words long words long words long words long words long words long words
              long words long words long words long words
              cure: do this

coppice dev cannot run on this host yet: see the lines that begin with "fail".
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

func TestDoctor(t *testing.T) {
	t.Parallel()
	a, stdout, stderr := testApp(nil)
	status := run(t.Context(), a, []string{"doctor", "--json", "--data-dir", t.TempDir()})
	var report hostcheck.Report
	if err := json.Unmarshal(stdout.Bytes(), &report); err != nil {
		t.Fatalf("%v: %s%s", err, stdout, stderr)
	}
	if want := map[bool]int{true: exitOK, false: exitFailure}[report.OK]; status != want || len(report.Checks) < 10 {
		t.Errorf("exit status %d with ok %v and %d checks", status, report.OK, len(report.Checks))
	}
}
