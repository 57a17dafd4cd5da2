package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli/connections"
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
		{[]string{"things", "ls", "x"}, exit.Usage, "takes no argument"},
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
	name, current, leave, err := saver.EnterContext(connections.Entry{Server: "unix:///s", Token: "t", DataDir: "/d"})
	if err != nil || name != "dev" || !current {
		t.Fatalf("context %q, current %t, %v", name, current, err)
	}
	if err := saver.ChangeContexts(func(f *connections.File) error {
		f.Contexts["lab"] = connections.Entry{Server: "https://lab", Token: "lab-key"}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(home, ".config", "coppice", "connection.json")
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v; want mode 0600", file, fi, err)
	}
	old := filepath.Join(t.TempDir(), "connection.json")
	if err := os.WriteFile(old, []byte(`{"server": "http://old", "token": "o"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	chosen := filepath.Join(t.TempDir(), "connection.json")
	if err := os.WriteFile(chosen, []byte(`{"server": "https://lab", "token": "lab-key", "current": "lab", "contexts": {"lab": {"server": "https://lab", "token": "lab-key"}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	dev, lab := Connection{Server: "unix:///s", Token: "t"}, Connection{Server: "https://lab", Token: "lab-key"}
	for _, c := range []struct {
		name    string
		env     map[string]string
		flag    Connection
		context string
		want    Connection
		says    string
	}{
		{"file", map[string]string{"HOME": home}, Connection{}, "", dev, ""},
		{"named file", map[string]string{"COPPICE_CONNECTION": file}, Connection{}, "", dev, ""},
		{"XDG", map[string]string{"XDG_CONFIG_HOME": filepath.Join(home, ".config")}, Connection{}, "", dev, ""},
		{"the file of an older version", map[string]string{"COPPICE_CONNECTION": old}, Connection{}, "", Connection{Server: "http://old", Token: "o"}, ""},
		{"environment wins over the file", map[string]string{"HOME": home, "COPPICE_SERVER": "http://e", "COPPICE_TOKEN": "e"}, Connection{}, "", Connection{Server: "http://e", Token: "e"}, ""},
		{"flags win over the environment", map[string]string{"COPPICE_SERVER": "http://e", "COPPICE_TOKEN": "e"}, Connection{Server: "http://f", Token: "f"}, "", Connection{Server: "http://f", Token: "f"}, ""},
		{"another server does not get the environment's key", map[string]string{"COPPICE_SERVER": "http://e", "COPPICE_TOKEN": "e"}, Connection{Server: "http://f"}, "", Connection{Server: "http://f"}, ""},
		{"a server gets a key of the environment that names none", map[string]string{"COPPICE_TOKEN": "e"}, Connection{Server: "http://f"}, "", Connection{Server: "http://f", Token: "e"}, ""},
		{"another server does not get the file's key", map[string]string{"HOME": home}, Connection{Server: "http://f"}, "", Connection{Server: "http://f"}, ""},
		{"another key for the file's server", map[string]string{"HOME": home, "COPPICE_TOKEN": "e"}, Connection{}, "", Connection{Server: "unix:///s", Token: "e"}, ""},
		{"a server of the file by its address", map[string]string{"HOME": home}, Connection{Server: "https://lab"}, "", lab, ""},
		{"an address without a scheme", map[string]string{}, Connection{Server: "127.0.0.1:7070", Token: "f"}, "", Connection{Server: "http://127.0.0.1:7070", Token: "f"}, ""},
		{"an address of another host without a scheme", map[string]string{}, Connection{Server: "ctl-1:7070", Token: "f"}, "", Connection{}, "https://ctl-1:7070"},
		{"a context by flag", map[string]string{"HOME": home, "COPPICE_SERVER": "http://e"}, Connection{}, "lab", lab, ""},
		{"a context by environment", map[string]string{"HOME": home, "COPPICE_CONTEXT": "lab"}, Connection{}, "", lab, ""},
		{"the environment's key is not for a context", map[string]string{"HOME": home, "COPPICE_CONTEXT": "lab", "COPPICE_TOKEN": "e"}, Connection{}, "", lab, ""},
		{"nor for a context by flag", map[string]string{"HOME": home, "COPPICE_SERVER": "http://e", "COPPICE_TOKEN": "e"}, Connection{}, "lab", lab, ""},
		{"nor for the current one, if it was added", map[string]string{"COPPICE_CONNECTION": chosen, "COPPICE_TOKEN": "e"}, Connection{}, "", lab, ""},
		{"an unknown context", map[string]string{"HOME": home}, Connection{}, "absent", Connection{}, `no context "absent"`},
		{"server and context", map[string]string{"HOME": home}, Connection{Server: "http://f"}, "lab", Connection{}, "exclude each other"},
		{"nothing", map[string]string{"HOME": t.TempDir()}, Connection{}, "", Connection{}, errNoServer.Error()},
		{"no home", nil, Connection{}, "", Connection{}, errNoServer.Error()},
	} {
		a, _, _ := testApp(c.env)
		a.server, a.token, a.context = c.flag.Server, c.flag.Token, c.context
		got, err := a.connection()
		got.Origin = ""
		if diff := cmp.Diff(c.want, got); diff != "" || (err != nil) != (c.says != "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v %s", c.name, err, diff)
		}
	}
	a, _, _ := testApp(map[string]string{"HOME": home})
	if _, err := a.Client(); err != nil {
		t.Error(err)
	}
	if err := leave(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.connection(); err == nil || !strings.Contains(err.Error(), "coppice context use") {
		t.Errorf("after the server has ended: %v", err)
	}
}

// TestOldReaders: a program that knows of no contexts finds the current server at the top level.
func TestOldReaders(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "connection.json")
	a, _, _ := testApp(map[string]string{"COPPICE_CONNECTION": path})
	read := func() (out struct{ Server, Token string }) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	_, _, leave, err := a.EnterContext(connections.Entry{Server: "http://127.0.0.1:1", Token: "a", DataDir: "/a"})
	if err != nil {
		t.Fatal(err)
	}
	if got := read(); got.Server != "http://127.0.0.1:1" || got.Token != "a" {
		t.Errorf("%+v", got)
	}
	// Nothing listens at the first one's address, as after a kill -9: the second one takes its place.
	name, current, _, err := a.EnterContext(connections.Entry{Server: "http://127.0.0.1:2", Token: "b", DataDir: "/b"})
	if got := read(); err != nil || name != "dev-2" || !current || got.Token != "b" {
		t.Errorf("%s, current %t, %v, %+v", name, current, err, got)
	}
	if err := leave(); err != nil {
		t.Fatal(err)
	}
	if got := read(); got.Token != "b" {
		t.Errorf("the end of the first changed the second: %+v", got)
	}
}

// TestNobodyAnswers: the error says which server was tried and what to do.
func TestNobodyAnswers(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	_ = l.Close()
	a, _, stderr := testApp(map[string]string{"COPPICE_SERVER": "http://" + address})
	status := a.Run(t.Context(), []string{"look"}, func(a *App) *cobra.Command {
		return &cobra.Command{Use: "look", RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			_, err = client.Self(c.Context())
			return err
		}}
	})
	said := stderr.String()
	for _, want := range []string{"http://" + address, "COPPICE_SERVER", "nobody listens there", "coppice dev"} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not in %q", want, said)
		}
	}
	if status != exit.Unavailable || strings.Contains(said, "dial tcp") {
		t.Errorf("exit status %d, %q", status, said)
	}
}

// TestPlainWords: no text of the libraries comes through, and a mistake has the hint of its own command.
func TestPlainWords(t *testing.T) {
	t.Parallel()
	group := func(*App) *cobra.Command {
		g := &cobra.Command{Use: "things"}
		show := &cobra.Command{Use: "show THING", Args: cobra.ExactArgs(1), RunE: func(*cobra.Command, []string) error { return context.Canceled }}
		show.Flags().Int("count", 0, "")
		show.Flags().Duration("ttl", 0, "")
		nothing := func(*cobra.Command, []string) error { return nil }
		g.AddCommand(&cobra.Command{Use: "logs", RunE: nothing}, &cobra.Command{Use: "ls", RunE: nothing})
		g.AddCommand(show, &cobra.Command{Use: "read FILE", Args: cobra.ExactArgs(1), RunE: func(_ *cobra.Command, args []string) error {
			b, err := os.ReadFile(args[0])
			_ = b
			return err
		}})
		return g
	}
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"things", "show"}, exit.Usage, "with no argument; usage: coppice things show THING"},
		{[]string{"things", "show", "a", "b"}, exit.Usage, "with 2 arguments"},
		{[]string{"things", "show", "--count", "many", "a"}, exit.Usage, `--count "many" is not a whole number`},
		{[]string{"things", "show", "--ttl", "5", "a"}, exit.Usage, "is not a duration such as"},
		{[]string{"things", "shwo"}, exit.Usage, `did you mean "coppice things show"?`},
		{[]string{"things", "lss"}, exit.Usage, `did you mean "coppice things ls"?`},
		{[]string{"thing"}, exit.Usage, `did you mean "coppice things"?`},
		{[]string{"things", "show", "--colour", "a"}, exit.Usage, "Try 'coppice things show --help'."},
		{[]string{"things", "show", "a"}, exit.Canceled, "coppice: interrupted\n"},
		{[]string{"things", "read", "/nowhere/f"}, exit.NotFound, "coppice: there is no /nowhere/f on this machine"},
		{[]string{"things", "read", "/"}, exit.BadInput, "/ on this machine is a directory, and a file is needed"},
	} {
		a, _, stderr := testApp(nil)
		status := a.Run(t.Context(), c.args, group)
		said := stderr.String()
		if status != c.status || !strings.Contains(said, c.says) {
			t.Errorf("%v: exit status %d, %q; want %d and %q", c.args, status, said, c.status, c.says)
		}
		for _, raw := range []string{"strconv", "arg(s)", "context canceled", "dial tcp", "time: ", "open /", "read /"} {
			if strings.Contains(said, raw) {
				t.Errorf("%v: %q has raw text", c.args, said)
			}
		}
	}
}

// TestInterruptedRequest: if a signal ends a request, the message says only that.
func TestInterruptedRequest(t *testing.T) {
	t.Parallel()
	ctx, end := context.WithCancelCause(t.Context())
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		end(errors.New("interrupt signal received"))
		<-r.Context().Done()
	}))
	defer server.Close()
	for before, want := range map[string]string{"": "coppice: interrupted\n", "copy a file": "coppice: copy a file: interrupted\n"} {
		a, _, stderr := testApp(nil)
		status := a.Run(ctx, []string{"ask"}, func(*App) *cobra.Command {
			return &cobra.Command{Use: "ask", RunE: func(c *cobra.Command, _ []string) error {
				req, err := http.NewRequestWithContext(c.Context(), http.MethodGet, server.URL, nil)
				if err != nil {
					return err
				}
				res, err := http.DefaultClient.Do(req)
				if err == nil {
					return res.Body.Close()
				}
				if before != "" {
					err = fmt.Errorf("%s: %w", before, err)
				}
				return err
			}}
		})
		if status != exit.Canceled || stderr.String() != want {
			t.Errorf("status %d, %q; want %q", status, stderr, want)
		}
	}
}

// TestNoKey: who has no key, or a wrong one, is told where keys come from.
func TestNoKey(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = w.Write([]byte(`{"status":401,"code":"UNAUTHENTICATED","detail":"this route needs an API key: Authorization: Bearer <key>"}`))
	}))
	defer server.Close()
	for token, want := range map[string]string{"": "wants a key, and this command has none; --token", "cpk_x": "does not know the key of this command"} {
		args := []string{"ask", "--server", server.URL}
		if token != "" {
			args = append(args, "--token", token)
		}
		a, _, stderr := testApp(nil)
		status := a.Run(t.Context(), args, func(a *App) *cobra.Command {
			return &cobra.Command{Use: "ask", RunE: func(c *cobra.Command, _ []string) error {
				client, err := a.Client()
				if err == nil {
					_, err = client.Checkpoint(c.Context(), "ckpt_1")
				}
				return err
			}}
		})
		if status != exit.Permission || !strings.Contains(stderr.String(), want) || strings.Contains(stderr.String(), "Bearer") {
			t.Errorf("token %q: status %d, %s", token, status, stderr)
		}
	}
}

// TestInterruptSaysHowToFollow: work that goes on without the command is named, with how to follow it.
func TestInterruptSaysHowToFollow(t *testing.T) {
	t.Parallel()
	a, _, stderr := testApp(nil)
	status := a.Run(t.Context(), []string{"grow"}, func(*App) *cobra.Command {
		return &cobra.Command{Use: "grow", RunE: func(*cobra.Command, []string) error {
			return &coppice.UnfinishedError{OperationID: "op_x", Err: context.Canceled}
		}}
	})
	if status != exit.Canceled || !strings.Contains(stderr.String(), "coppice op show --wait op_x") || strings.Contains(stderr.String(), "context canceled") {
		t.Errorf("exit status %d, %q", status, stderr)
	}
}
