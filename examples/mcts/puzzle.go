package main

import (
	"archive/tar"
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"path"
	"strings"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

//go:embed puzzle
var puzzle embed.FS

// reloadRecipes is the action that makes the bench load the module that binds names of another one.
const reloadRecipes = "reload-recipes"

// Where things are in the guest.
const (
	guestDir     = "/workspace"
	guestLibrary = guestDir + "/lib"
	guestSocket  = guestDir + "/bench.sock"
)

// Candidates reads the candidate edits: a first line "SUBJECT: what it does", then a diff of one module.
func Candidates() ([]Action, error) {
	const dir = "puzzle/edits"
	entries, err := puzzle.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []Action
	for _, e := range entries {
		b, err := puzzle.ReadFile(path.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		name := strings.TrimSuffix(e.Name(), ".diff")
		title, diff, _ := strings.Cut(string(b), "\n")
		_, file, ok := strings.Cut(diff, "+++ b/toolz/")
		module, _, isPython := strings.Cut(file, ".py\n")
		if !ok || !isPython {
			return nil, fmt.Errorf("edit %s changes no module of toolz", name)
		}
		out = append(out, Action{Name: name, Title: title, Command: shell(
			"cd " + guestLibrary + " && git apply ../puzzle/edits/" + e.Name() + " && exec " + step("load="+module+"&label="+name),
		)})
	}
	return append(out, Action{
		Name: reloadRecipes, Title: "recipes: load it again, so that it binds what itertoolz has now",
		Command: shell("exec " + step("load=recipes&label="+reloadRecipes)),
	}), nil
}

// setup makes the machine at the root from the image and the uploaded puzzle, and starts the bench, which answers when
// its socket is there.
const setup = `set -eu
cp -r /usr/lib/python3/dist-packages/toolz ` + guestLibrary + `/
cd ` + guestLibrary + `
git apply ../puzzle/regression.diff
setsid python3 ../puzzle/bench.py ` + guestSocket + ` ` + guestLibrary + ` </dev/null >../bench.log 2>&1 &
bench=$!
while ! test -S ` + guestSocket + `; do
	kill -0 $bench || { cat ../bench.log >&2; exit 1; }
	sleep 0.1
done
`

func shell(script string) []string { return []string{"sh", "-c", script} }

// step is a command that asks the bench for a step and prints its observation; a refusal is a failed command.
func step(query string) string {
	return "curl --silent --show-error --fail-with-body --unix-socket " + guestSocket + " --request POST 'http://bench/step?" + query + "'"
}

func defaultSettings() Settings {
	return Settings{Children: 4, Budget: 120, Exploration: 0.1, Widening: 1.5, Patience: 0, Trials: 3}
}

// prepare makes a workspace the root of the game and returns what its bench says first.
func prepare(ctx context.Context, m *Machines, id coppice.WorkspaceID) (Observation, error) {
	if err := upload(ctx, m.Client, id); err != nil {
		return Observation{}, fmt.Errorf("upload the puzzle: %w", err)
	}
	res, err := m.Client.Exec(ctx, id, coppice.ExecRequest{Command: shell(setup), Cwd: "/", TimeoutMS: actionTimeoutMS})
	if err != nil {
		return Observation{}, fmt.Errorf("set up the puzzle: %w", err)
	}
	if res.ExitCode != 0 {
		return Observation{}, fmt.Errorf("set up the puzzle: status %d: %s%s", res.ExitCode, res.Stdout, res.Stderr)
	}
	o, refused, err := m.do(ctx, id, shell("exec "+step("")))
	if err == nil && refused != "" {
		err = errors.New(refused)
	}
	if err != nil {
		return o, fmt.Errorf("first run of the tests: %w", err)
	}
	return o, nil
}

// upload sends the embedded puzzle as one tar.
func upload(ctx context.Context, c *coppice.Client, id coppice.WorkspaceID) error {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.AddFS(puzzle); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	res, err := c.Exec(ctx, id, coppice.ExecRequest{Command: []string{"mkdir", "-p", guestLibrary}, Cwd: "/"})
	if err != nil {
		return err
	}
	if res.ExitCode != 0 {
		return fmt.Errorf("mkdir %s: %s", guestLibrary, res.Stderr)
	}
	_, err = c.UploadTar(ctx, id, guestDir, &b)
	return err
}
