package firsthour

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// root is the directory of the tree.
const root = "../../.."

// command is a line of a document that a reader would type, with what the document says that it prints.
type command struct {
	line   string
	prints string // "" if the document does not say
}

var (
	fence     = regexp.MustCompile("(?ms)^```([a-z]*)$(.*?)^```$")
	comment   = regexp.MustCompile(`\s+#\s.*$`)
	notInPage = []string{"python", "ts", "json", "toml", "yaml", "mermaid", "sql", "go"} // languages of blocks that are not typed into a shell
)

// commandsOf returns the commands of the fenced blocks of a document. In a block with prompts, other lines are output.
func commandsOf(text string) []command {
	var out []command
	for _, block := range fence.FindAllStringSubmatch(text, -1) {
		if slices.Contains(notInPage, block[1]) {
			continue
		}
		body := strings.TrimLeft(block[2], "\n")
		recorded := strings.HasPrefix(body, "$ ")
		open := false // the last line goes on
		for line := range strings.SplitSeq(strings.TrimRight(body, "\n"), "\n") {
			typed, prompt := strings.CutPrefix(line, "$ ")
			switch {
			case open:
				last := &out[len(out)-1]
				last.line = strings.TrimSuffix(last.line, "\\") + strings.TrimSpace(line)
			case recorded && !prompt:
				out[len(out)-1].prints += line + "\n"
				continue
			case strings.TrimSpace(typed) == "":
				continue
			default:
				out = append(out, command{line: typed})
			}
			last := &out[len(out)-1]
			last.line = strings.TrimSpace(comment.ReplaceAllString(last.line, ""))
			open = strings.HasSuffix(last.line, "\\") || strings.HasSuffix(last.line, "|")
			if strings.HasSuffix(last.line, "|") {
				last.line += " "
			}
		}
	}
	return out
}

// programs are what the documents run here, as root. A line that begins with another word is a mistake, such as output without a prompt.
var programs = []string{"coppice", "bin/coppice", "curl", "tar", "make", "sudo"}

var assignments = regexp.MustCompile(`^([A-Z_][A-Z0-9_]*=(\$\([^()]*\)|[^\s$()])*\s+)*`)

// firstWord is the program of a line, behind variables that are set for it.
func firstWord(line string) string {
	word, _, _ := strings.Cut(line[len(assignments.FindString(line)):], " ")
	return word
}

func TestFirstWord(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"coppice ws ls": "coppice", "A=b C=$(coppice x y) make z": "make", "rm -rf x": "rm", "A=$(rm -rf x": "A=$(rm", "A=1; rm": "rm", "{": "{", "": "",
	} {
		if got := firstWord(line); got != want {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
}

func TestCommandsOf(t *testing.T) {
	t.Parallel()
	got := commandsOf("# x\n```\n$ one -a \\\n    b   # why\nprinted\n$ two\n```\n```json\n{}\n```\n```\nthree |   # piped\n  four\n\nfive 'a # b'x\n```\n")
	want := []command{{"one -a b", "printed\n"}, {"two", ""}, {"three | four", ""}, {"five 'a", ""}}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// readPage returns the commands of a document.
func readPage(t *testing.T, name string) []command {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return commandsOf(string(b))
}

// usage is the synopsis of a command in docs/CLI.md, which nobody types.
var usage = regexp.MustCompile(`\[flags\]|^coppice( [a-z-]+)+( [A-Z:]+(\.\.\.)?| \[[A-Z:]+\](\.\.\.)?)+$`)

// skipUsage leaves the synopses of docs/CLI.md out.
func skipUsage(page string, list []command) []command {
	if page != "docs/CLI.md" {
		return list
	}
	groups := map[string]bool{} // commands that are printed as a synopsis have a heading of their own
	b, err := os.ReadFile(filepath.Join(root, page))
	if err == nil {
		for _, m := range regexp.MustCompile("(?m)^#+ `?(coppice[a-z -]*)`?$").FindAllStringSubmatch(string(b), -1) {
			groups[m[1]] = true
		}
	}
	return slices.DeleteFunc(list, func(c command) bool { return usage.MatchString(c.line) || groups[c.line] })
}

// TestEveryPageIsKnown wants every document with commands to be among the pages, and every rule to be about a command that is there.
func TestEveryPageIsKnown(t *testing.T) {
	t.Parallel()
	var files []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/verification/*.md", "deploy/*.md", "deploy/*/*.md", "sdk/*/*.md", "sdk/*.md", "examples/*.md", "examples/*/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	if len(files) < 30 {
		t.Fatalf("only %d documents were found", len(files))
	}
	known := map[string]page{}
	for _, p := range pages {
		known[p.file] = p
	}
	for _, file := range files {
		name, err := filepath.Rel(root, file)
		if err != nil {
			t.Fatal(err)
		}
		p, ok := known[name]
		list := skipUsage(name, readPage(t, name))
		delete(known, name)
		if !ok {
			if len(list) > 0 {
				t.Errorf("%s has commands, such as %q, and no entry in pages", name, list[0].line)
			}
			continue
		}
		if len(list) == 0 {
			t.Errorf("%s has no commands; take it out of pages", name)
		}
		for _, c := range list {
			if r := p.rules[c.line]; p.all == "" && r.skip == "" && r.instead == "" && !slices.Contains(programs, firstWord(c.line)) {
				t.Errorf("%s has the line %q, whose program is not among those that may run as root", name, c.line)
			}
		}
		for line := range p.rules {
			if !slices.ContainsFunc(list, func(c command) bool { return c.line == line }) {
				t.Errorf("%s has no command %q any more; take the rule away", name, line)
			}
		}
	}
	for name := range known {
		t.Errorf("pages has %s, which is not there", name)
	}
}
