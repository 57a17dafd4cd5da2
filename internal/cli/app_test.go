package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// testApp is an app with its own streams and environment, as clitest.App.
func testApp(env map[string]string) (a *App, stdout, stderr *bytes.Buffer) {
	stdout, stderr = new(bytes.Buffer), new(bytes.Buffer)
	return &App{Stdin: strings.NewReader(""), Stdout: stdout, Stderr: stderr, Getenv: func(k string) string { return env[k] }}, stdout, stderr
}

// TestGroups runs the parser over a command with commands below it, as `coppice ws` is.
func TestGroups(t *testing.T) {
	t.Parallel()
	group := func(*App) *cobra.Command {
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
		{[]string{"things"}, exit.OK, ""},
		{[]string{"things", "burn"}, exit.Usage, `unknown command "burn" for "coppice things"`},
		{[]string{"things", "ls", "x"}, exit.Usage, "unknown command"},
		{[]string{"things", "ls"}, exit.NotFound, "no such thing"},
	} {
		a, _, stderr := testApp(nil)
		if got := a.Run(t.Context(), c.args, group); got != c.status || !strings.Contains(stderr.String(), c.says) {
			t.Errorf("%v: exit status %d, %q; want %d and %q", c.args, got, stderr, c.status, c.says)
		}
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	api := &coppice.Error{Code: coppice.CodeNameTaken, Status: 409, Detail: "the name is taken", RequestID: "r1"}
	a, stdout, stderr := testApp(nil)
	a.Report(api)
	if want := "coppice: the name is taken (NAME_TAKEN) [request r1]\n"; stderr.String() != want || stdout.Len() > 0 {
		t.Errorf("got %q, want %q", stderr, want)
	}
	a, _, stderr = testApp(nil)
	a.JSON = true
	a.Report(api)
	var got map[string]map[string]any
	if err := json.Unmarshal(stderr.Bytes(), &got); err != nil || got["error"]["code"] != "NAME_TAKEN" || got["error"]["exit_status"] != float64(exit.Conflict) {
		t.Errorf("got %v, %v", got, err)
	}
	a, _, stderr = testApp(nil)
	if a.Report(exit.StatusError(3)) != 3 || stderr.Len() > 0 {
		t.Errorf("a remote command's status came with %q", stderr)
	}
}

func TestConnection(t *testing.T) {
	t.Parallel()
	home := t.TempDir()
	saver, _, _ := testApp(map[string]string{"HOME": home})
	saved := Connection{Server: "unix:///s", Token: "t"}
	if err := saver.SaveConnection(saved); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(home, ".config", "coppice", "connection.json")
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v; want mode 0600", file, fi, err)
	}
	for _, c := range []struct {
		name string
		env  map[string]string
		flag Connection
		want Connection
		err  error
	}{
		{"file", map[string]string{"HOME": home}, Connection{}, saved, nil},
		{"named file", map[string]string{"COPPICE_CONNECTION": file}, Connection{}, saved, nil},
		{"XDG", map[string]string{"XDG_CONFIG_HOME": filepath.Join(home, ".config")}, Connection{}, saved, nil},
		{"environment wins over the file", map[string]string{"HOME": home, "COPPICE_SERVER": "http://e", "COPPICE_TOKEN": "e"}, Connection{}, Connection{"http://e", "e"}, nil},
		{"flags win over the environment", map[string]string{"COPPICE_SERVER": "http://e", "COPPICE_TOKEN": "e"}, Connection{"http://f", "f"}, Connection{"http://f", "f"}, nil},
		{"another server does not get the file's key", map[string]string{"HOME": home}, Connection{Server: "http://f"}, Connection{Server: "http://f"}, nil},
		{"another key for the file's server", map[string]string{"HOME": home, "COPPICE_TOKEN": "e"}, Connection{}, Connection{"unix:///s", "e"}, nil},
		{"nothing", map[string]string{"HOME": t.TempDir()}, Connection{}, Connection{}, errNoServer},
		{"no home", nil, Connection{}, Connection{}, errNoServer},
	} {
		a, _, _ := testApp(c.env)
		a.server, a.token = c.flag.Server, c.flag.Token
		got, err := a.connection()
		if diff := cmp.Diff(c.want, got); diff != "" || !errors.Is(err, c.err) {
			t.Errorf("%s: %v %s", c.name, err, diff)
		}
	}
	a, _, _ := testApp(map[string]string{"HOME": home})
	if _, err := a.Client(); err != nil {
		t.Error(err)
	}
}
