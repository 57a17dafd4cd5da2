package deploytest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/linter"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// stages parses the Dockerfile as BuildKit does.
func stages(t *testing.T) map[string]instructions.Stage {
	t.Helper()
	f, err := os.Open(root + "/deploy/docker/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	parsed, err := parser.Parse(f)
	if err != nil {
		t.Fatal(err)
	}
	warn := func(rule, description, _, text string, _ []parser.Range) {
		t.Errorf("BuildKit's linter: %s: %s %s", rule, text, description)
	}
	list, args, err := instructions.Parse(parsed.AST, linter.New(&linter.Config{Warn: warn}))
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range parsed.Warnings {
		t.Errorf("BuildKit warns: %s", w.Short)
	}
	for _, a := range args {
		for _, kv := range a.Args {
			if kv.Value == nil || !strings.Contains(*kv.Value, ":") || strings.HasSuffix(*kv.Value, ":latest") {
				t.Errorf("%s has no version", kv.Key)
			}
		}
	}
	out := map[string]instructions.Stage{}
	for _, s := range list {
		if !strings.HasPrefix(s.BaseName, "${") {
			t.Errorf("stage %s is of %s: pin it by an argument at the top", s.Name, s.BaseName)
		}
		out[s.Name] = s
	}
	return out
}

func commands[T any](s instructions.Stage) (list []T) {
	for _, c := range s.Commands {
		if c, ok := any(c).(T); ok {
			list = append(list, c)
		}
	}
	return list
}

func TestDockerfile(t *testing.T) {
	t.Parallel()
	all := stages(t)
	for _, name := range []string{"controller", "runner"} {
		s, ok := all[name]
		if !ok {
			t.Fatalf("there is no stage %s", name)
		}
		if h := commands[*instructions.HealthCheckCommand](s); len(h) != 1 {
			t.Errorf("%s has %d health checks", name, len(h))
		}
		if e := commands[*instructions.EntrypointCommand](s); len(e) != 1 || !slices.Equal(e[0].CmdLine, []string{"coppice"}) {
			t.Errorf("the entry point of %s is %v", name, e)
		}
		if c := commands[*instructions.CmdCommand](s); len(c) != 1 || !slices.Equal(c[0].CmdLine, []string{name}) {
			t.Errorf("%s runs %v", name, c)
		}
		env := map[string]string{}
		for _, e := range commands[*instructions.EnvCommand](s) {
			for _, kv := range e.Env {
				env[kv.Key] = kv.Value
			}
		}
		start{"Dockerfile, " + name, []string{name}, env}.known(t)
	}
	if u := commands[*instructions.UserCommand](all["controller"]); len(u) != 1 || u[0].User != "10001:10001" {
		t.Errorf("the controller's user is %v", u)
	}
	for name, s := range all {
		for _, c := range commands[*instructions.CopyCommand](s) {
			for _, source := range c.SourcePaths {
				if c.From != "" {
					if _, ok := all[c.From]; !ok {
						t.Errorf("%s copies from %s, which is no stage", name, c.From)
					}
				} else if _, err := os.Stat(filepath.Join(root, source)); err != nil {
					t.Errorf("%s copies what is not there: %v", name, err)
				}
			}
		}
		for _, e := range commands[*instructions.EnvCommand](s) {
			for _, kv := range e.Env {
				if strings.Contains(kv.Key, "SECRET") || strings.Contains(kv.Key, "PASSWORD") || strings.Contains(kv.Key, "TOKEN") {
					t.Errorf("%s keeps %s in a layer", name, kv.Key)
				}
			}
		}
	}
}

// TestBuildContext builds coppice of no more than what the ignore file lets into the build.
func TestBuildContext(t *testing.T) {
	t.Parallel()
	needed := map[string]bool{}
	for line := range strings.Lines(goList(t)) {
		dir, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "github.com/coppice-dev/coppice/"), "/")
		if strings.HasPrefix(line, "github.com/coppice-dev/coppice/") {
			needed[dir] = true
		}
	}
	ignore := readFile(t, root+"/deploy/docker/Dockerfile.dockerignore")
	for dir := range needed {
		if !strings.Contains(ignore, "\n!"+dir+"\n") {
			t.Errorf("Dockerfile.dockerignore keeps %s out of the build", dir)
		}
	}
	for line := range strings.Lines(ignore) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "!"); ok {
			if _, err := os.Stat(filepath.Join(root, path)); err != nil {
				t.Error(err)
			}
		}
	}
}
