package mcp_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/coppice-dev/coppice/mcp"
)

// TestToolTable compares the table of docs/MCP.md with the server's tools, and looks at what every tool must have.
func TestToolTable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	list, err := s.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(list.Tools); n < 14 || n > 20 {
		t.Errorf("%d tools", n)
	}
	table := "| tool | changes | does |\n|---|---|---|\n"
	for _, tool := range list.Tools {
		a := tool.Annotations
		if a == nil || a.DestructiveHint == nil || a.OpenWorldHint == nil || a.Title == "" || tool.Description == "" || tool.OutputSchema == nil {
			t.Errorf("%s lacks something: %+v", tool.Name, tool)
			continue
		}
		changes := "adds"
		if a.ReadOnlyHint {
			changes = "nothing"
		} else if *a.DestructiveHint {
			changes = "loses"
		}
		table += fmt.Sprintf("| `%s` | %s | %s |\n", tool.Name, changes, a.Title)
		for name, p := range properties(tool) {
			if p["description"] == nil {
				t.Errorf("the argument %s of %s has no description", name, tool.Name)
			}
		}
	}
	doc, err := os.ReadFile("../docs/MCP.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(doc), table) {
		t.Errorf("docs/MCP.md does not have this table:\n%s", table)
	}
	for _, version := range mcp.Versions() {
		if !strings.Contains(string(doc), version) {
			t.Errorf("docs/MCP.md does not name the version %s", version)
		}
	}
}

func properties(tool *sdk.Tool) map[string]map[string]any {
	out := map[string]map[string]any{}
	schema, _ := tool.InputSchema.(map[string]any)
	all, _ := schema["properties"].(map[string]any)
	for name, p := range all {
		out[name], _ = p.(map[string]any)
	}
	return out
}
