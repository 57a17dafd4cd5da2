package docs

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
)

const root = "../../.."

// markdown lists the Markdown files of the tree: those that git has, and those that it would take.
func markdown(t *testing.T) []string {
	t.Helper()
	git := require.Program(t, "git", "git")
	cmd := exec.CommandContext(t.Context(), git, "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard", "*.md")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	var names []string
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		if _, err := os.Stat(filepath.Join(root, name)); err == nil && !strings.Contains(name, "testdata/") {
			names = append(names, name)
		}
	}
	return names
}

// TestLinks follows every relative link of every Markdown file, to its file and to its heading.
func TestLinks(t *testing.T) {
	t.Parallel()
	const fewest = 100
	parsed := map[string]Document{}
	for _, name := range markdown(t) {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		parsed[name] = Parse(string(text))
	}
	followed := 0
	for name, doc := range parsed {
		for _, l := range doc.Links {
			if Outside(l.Target) {
				continue
			}
			followed++
			if err := follow(parsed, name, l.Target); err != nil {
				t.Errorf("%s:%d: %v", name, l.Line, err)
			}
		}
	}
	if followed < fewest {
		t.Errorf("only %d links were followed", followed)
	}
}

func follow(parsed map[string]Document, from, target string) error {
	u, err := url.Parse(target)
	if err != nil {
		return err
	}
	to := path.Join(path.Dir(from), u.Path)
	if u.Path == "" {
		to = from
	}
	info, err := os.Stat(filepath.Join(root, to))
	switch {
	case strings.HasPrefix(to, "..") || strings.HasPrefix(u.Path, "/"):
		return fmt.Errorf("%s is outside of the tree", target)
	case err != nil:
		return fmt.Errorf("%s: there is no %s", target, to)
	case u.Fragment == "":
		return nil
	case info.IsDir():
		return fmt.Errorf("%s is a heading of a directory", target)
	}
	doc, ok := parsed[to]
	if !ok {
		return fmt.Errorf("%s is a heading of a file that is not Markdown", target)
	}
	if !doc.Anchors[u.Fragment] {
		return fmt.Errorf("%s: %s has no heading #%s", target, to, u.Fragment)
	}
	return nil
}

func TestParse(t *testing.T) {
	t.Parallel()
	doc := Parse("# A `b` & [c](d.md)\n\n## Same\n## Same\n```\n[no](no.md)\n# No\n```\nText [x](y.md#z) `[no](no.md)` <img src=\"p.svg\"> <a id=\"own\">\n")
	for _, anchor := range []string{"a-b--c", "same", "same-1", "own"} {
		if !doc.Anchors[anchor] {
			t.Errorf("there is no anchor %q in %v", anchor, doc.Anchors)
		}
	}
	want := []Link{{1, "d.md"}, {9, "y.md#z"}, {9, "p.svg"}}
	if !slices.Equal(doc.Links, want) || doc.Anchors["no"] {
		t.Errorf("got %v and %v, want %v", doc.Links, doc.Anchors, want)
	}
}

// TestIndex wants every page of docs in its index, docs/README.md, or in the index's pages of decisions and verifications.
func TestIndex(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(root, "docs/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	linked := map[string]bool{}
	for _, l := range Parse(string(text)).Links {
		linked[path.Join("docs", l.Target)] = true
	}
	for _, name := range markdown(t) {
		dir := path.Dir(name)
		if strings.HasPrefix(name, "docs/") && name != "docs/README.md" && !linked[name] && (dir == "docs" || !linked[dir]) {
			t.Errorf("docs/README.md does not link to %s", name)
		}
	}
}

var (
	figureRow = regexp.MustCompile(`(?m)^\|[^|]*\|([^|]*)\|[^|]*\| \[[^\]]*\]\(([^)#]*)[^)]*\) \|$`)
	figure    = regexp.MustCompile(`\d+(?:,\d{3})*(?:\.\d+)?`)
)

// TestFigures wants every measured figure of the README on the page that its row links to.
func TestFigures(t *testing.T) {
	t.Parallel()
	const fewest = 10
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, row := range figureRow.FindAllStringSubmatch(string(readme), -1) {
		text, err := os.ReadFile(filepath.Join(root, row[2]))
		if err != nil {
			t.Fatal(err)
		}
		measured := figure.FindAllString(string(text), -1)
		for _, f := range figure.FindAllString(row[1], -1) {
			found++
			if !slices.Contains(measured, f) {
				t.Errorf("%s does not have the figure %s of the README", row[2], f)
			}
		}
	}
	if found < fewest {
		t.Errorf("only %d figures were found", found)
	}
}
