package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// route is an operation of api/openapi.yaml.
type route struct{ method, path, summary string }

var (
	pathLine   = regexp.MustCompile(`^  (/\S+):$`)
	methodLine = regexp.MustCompile(`^    (get|post|put|patch|delete|head):$`)
	tagsLine   = regexp.MustCompile(`^      tags: \[([a-z]+)`)
	titleLine  = regexp.MustCompile(`^      summary: (.+)$`)
	tagLine    = regexp.MustCompile(`^  - \{name: ([a-z]+), description: "?(.+?)\.?"?\}$`)
)

// routes reads the operations by their first tag, and the tags with their descriptions, in the order of the file.
func routes(text string) (tags [][2]string, byTag map[string][]route) {
	byTag = map[string][]route{}
	var at route
	tag := ""
	for line := range strings.SplitSeq(text, "\n") {
		if m := tagLine.FindStringSubmatch(line); m != nil {
			tags = append(tags, [2]string{m[1], m[2]})
		} else if m := pathLine.FindStringSubmatch(line); m != nil {
			at.path = m[1]
		} else if m := methodLine.FindStringSubmatch(line); m != nil {
			at.method = strings.ToUpper(m[1])
		} else if m := tagsLine.FindStringSubmatch(line); m != nil {
			tag = m[1]
		} else if m := titleLine.FindStringSubmatch(line); m != nil {
			at.summary = strings.Trim(m[1], `"`)
			byTag[tag] = append(byTag[tag], at)
		}
	}
	return tags, byTag
}

const routesHeading = "## Routes\n"

// TestRoutes compares the list of routes at the end of docs/API.md with api/openapi.yaml. -update writes it.
func TestRoutes(t *testing.T) {
	t.Parallel()
	const fewest = 80
	spec, err := os.ReadFile(filepath.Join(root, "api/openapi.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	tags, byTag := routes(string(spec))
	var b strings.Builder
	b.WriteString(routesHeading + "\n`make generate` writes this list from [openapi.yaml](../api/openapi.yaml).\n")
	listed := 0
	for _, tag := range tags {
		if len(byTag[tag[0]]) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n### %s%s\n\n%s.\n\n| request | does |\n|---|---|\n", strings.ToUpper(tag[0][:1]), tag[0][1:], tag[1])
		for _, r := range byTag[tag[0]] {
			listed++
			fmt.Fprintf(&b, "| `%s %s` | %s |\n", r.method, r.path, r.summary)
		}
	}
	if n := strings.Count(string(spec), "operationId:"); listed < fewest || listed != n {
		t.Errorf("%d of %d operations are listed", listed, n)
	}
	page := filepath.Join(root, "docs/API.md")
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, got, ok := strings.Cut(string(text), routesHeading)
	if !ok {
		t.Fatalf("docs/API.md has no heading %q", routesHeading)
	}
	if *update {
		if err := os.WriteFile(page, []byte(before+b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(b.String(), routesHeading+got); diff != "" {
		t.Errorf("docs/API.md is not current (-want +got):\n%s\nrun: make generate", diff)
	}
}

var (
	makeCall   = regexp.MustCompile("`make ([a-z0-9-]+(?: [a-z0-9-]+)*)")
	makeLine   = regexp.MustCompile(`(?m)^(?:sudo -E )?make ([a-z0-9-]+(?: [a-z0-9-]+)*)`)
	fenced     = regexp.MustCompile("(?ms)^```[a-z]*$(.*?)^```$")
	makeTarget = regexp.MustCompile(`(?m)^([a-z0-9-]+):`)
)

// TestMakeTargets wants every `make …` of the documents to be a target of the Makefile.
func TestMakeTargets(t *testing.T) {
	t.Parallel()
	const fewest = 50
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]bool{}
	for _, m := range makeTarget.FindAllStringSubmatch(string(makefile), -1) {
		targets[m[1]] = true
	}
	found := 0
	for _, name := range markdown(t) {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		calls := makeCall.FindAllStringSubmatch(string(text), -1)
		for _, block := range fenced.FindAllStringSubmatch(string(text), -1) {
			calls = append(calls, makeLine.FindAllStringSubmatch(block[1], -1)...)
		}
		for _, call := range calls {
			for target := range strings.FieldsSeq(call[1]) {
				found++
				if !targets[target] {
					t.Errorf("%s: there is no target %q", name, target)
				}
			}
		}
	}
	if found < fewest {
		t.Errorf("only %d targets were found", found)
	}
}
