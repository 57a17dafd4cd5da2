package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// state is any of core's state types.
type state[S any] interface {
	~string
	CanBecome(S) bool
}

const statesIntro = `# State machines

` + "`make generate`" + ` writes this page from the transition tables in ` + "`core/state.go`" + `. A test fails when the
two differ. Every change of state is a compare-and-set in the database. It succeeds only from a state
that may become the new one.
`

func TestStateMachinesDocument(t *testing.T) {
	t.Parallel()
	meaning := stateComments(t)
	doc := statesIntro +
		machine("Workspace", "the durable thing a user works in", core.WorkspaceStates(), meaning) +
		machine("Checkpoint", "an immutable node of the DAG", core.CheckpointStates(), meaning) +
		machine("Operation", "a durable, resumable unit of work", core.OperationStates(), meaning)
	golden(t, "docs/STATE_MACHINES.md", doc)
}

func machine[S state[S]](name, what string, states []S, meaning map[string]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n## %s: %s\n\n| state | meaning | may become |\n|---|---|---|\n", name, what)
	for _, s := range states {
		next := "nothing"
		if to := successors(s, states); len(to) > 0 {
			next = "`" + strings.Join(to, "` `") + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", s, meaning[name+" "+string(s)], next)
	}
	b.WriteString("\n```mermaid\nstateDiagram-v2\n")
	fmt.Fprintf(&b, "    [*] --> %s\n", states[0])
	for _, s := range states {
		to := successors(s, states)
		for _, n := range to {
			fmt.Fprintf(&b, "    %s --> %s\n", s, n)
		}
		if len(to) == 0 {
			fmt.Fprintf(&b, "    %s --> [*]\n", s)
		}
	}
	b.WriteString("```\n")
	return b.String()
}

func successors[S state[S]](s S, all []S) []string {
	var out []string
	for _, t := range all {
		if s.CanBecome(t) {
			out = append(out, string(t))
		}
	}
	return out
}

// TestStatesAreReached checks the tables themselves: every state can be reached from the first, and none leads to
// itself.
func TestStatesAreReached(t *testing.T) {
	t.Parallel()
	reached(t, core.WorkspaceStates())
	reached(t, core.CheckpointStates())
	reached(t, core.OperationStates())
}

func reached[S state[S]](t *testing.T, all []S) {
	t.Helper()
	seen := []S{all[0]}
	for i := 0; i < len(seen); i++ {
		for _, next := range all {
			if seen[i].CanBecome(next) && !slices.Contains(seen, next) {
				seen = append(seen, next)
			}
		}
	}
	for _, s := range all {
		if !slices.Contains(seen, s) {
			t.Errorf("%T %s is never reached", s, s)
		}
		if s.CanBecome(s) {
			t.Errorf("%T %s may become itself", s, s)
		}
	}
}

// stateComments reads what core says of each state, by "<Machine> <state>".
func stateComments(t *testing.T) map[string]string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(rootDir(t), "core", "state.go"), nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	meaning := map[string]string{}
	for _, decl := range f.Decls {
		gen, ok := decl.(*ast.GenDecl)
		if !ok || gen.Tok != token.CONST {
			continue
		}
		for _, spec := range gen.Specs {
			v, ok := spec.(*ast.ValueSpec)
			if !ok || len(v.Values) != 1 {
				continue
			}
			typ, okType := v.Type.(*ast.Ident)
			lit, okLit := v.Values[0].(*ast.BasicLit)
			if !okType || !okLit {
				continue
			}
			text := strings.TrimSpace(v.Comment.Text())
			if text == "" {
				t.Errorf("core/state.go: %s has no comment that says what it means", v.Names[0])
			}
			meaning[strings.TrimSuffix(typ.Name, "State")+" "+strings.Trim(lit.Value, `"`)] = text
		}
	}
	return meaning
}
