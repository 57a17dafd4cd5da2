package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

const referenceIntro = "# Command line\n\n" +
	"This page has every command of `coppice`, as `--help` shows it. `make generate` writes it, and a test fails when it is not current.\n" +
	"[The README](../README.md#a-session) shows a session, and [CONCEPTS.md](CONCEPTS.md) explains the words.\n\n" +
	"- A workspace, a checkpoint or another object is named by its name, its id, or the end of its id.\n" +
	"- `--json` prints JSON instead of text. An error is then one line of JSON on standard error.\n" +
	"- `coppice completion bash`, `zsh` or `fish` prints a script that completes commands, flags and names.\n" +
	"- `coppice ws exec` and `coppice ws shell` end with the exit status of the program that they ran.\n\n"

// statuses are the exit statuses of every command.
var statuses = []struct {
	status  int
	meaning string
}{
	{exit.OK, "success"},
	{exit.Failure, "it did not work, or a check found a problem; the message says why"},
	{exit.Usage, "the command line is wrong"},
	{exit.BadInput, "the server refuses what was sent as wrong"},
	{exit.NotFound, "the named object does not exist"},
	{exit.Unavailable, "the server, a runner, a guest or the database cannot be reached"},
	{exit.Internal, "a fault in Coppice"},
	{exit.Exhausted, "a quota, capacity or a disk is used up"},
	{exit.Conflict, "not in this state; it may work later"},
	{exit.Permission, "no key, or a key that may not do this"},
	{exit.Host, "this host cannot do it as it is set up"},
	{exit.TimedOut, "a time ended"},
	{exit.Canceled, "Ctrl-C"},
}

// operators are the commands for those who run servers. All others are for users.
var operators = []string{"image", "doctor", "dev", "controller", "migrate", "runner", "pager", "egress", "runner-token", "runner-trash", "store", "fleet", "authority"}

// TestReference compares docs/CLI.md with the help of all commands. -update writes it.
func TestReference(t *testing.T) {
	t.Parallel()
	a, _, _ := clitest.App(nil)
	root := a.Root(commands...)
	var users, others []*cobra.Command
	for _, c := range root.Commands() {
		switch {
		case c.Hidden || c.Name() == "help" || c.Name() == "completion":
		case slices.Contains(operators, c.Name()):
			others = append(others, c)
		default:
			users = append(users, c)
		}
	}
	var b strings.Builder
	b.WriteString(referenceIntro)
	b.WriteString("Flags of every command:\n\n")
	b.WriteString(flagTable(root.PersistentFlags()))
	b.WriteString("\nExit status of every command:\n\n| status | meaning |\n|---|---|\n")
	for _, s := range statuses {
		fmt.Fprintf(&b, "| %d | %s |\n", s.status, s.meaning)
	}
	for _, half := range []struct {
		title string
		list  []*cobra.Command
	}{{"For users", users}, {"For operators", others}} {
		fmt.Fprintf(&b, "\n%s:\n\n| command | does |\n|---|---|\n", half.title)
		for _, c := range half.list {
			fmt.Fprintf(&b, "| [`%s`](#%s) | %s |\n", c.Name(), anchor(c.CommandPath()), markdown(c.Short))
		}
	}
	for _, c := range append(users, others...) {
		describe(&b, c, "##")
	}
	clitest.Golden(t, "../../../docs/CLI.md", b.String())
}

// describe writes what --help says of a command and of those below it.
func describe(b *strings.Builder, c *cobra.Command, level string) {
	fmt.Fprintf(b, "\n%s %s\n\n%s\n", level, c.CommandPath(), prose(c))
	if !c.HasAvailableSubCommands() || c.Example != "" {
		fmt.Fprintf(b, "\n```\n%s\n```\n", c.UseLine())
	}
	if c.Example != "" {
		fmt.Fprintf(b, "\nExamples:\n\n```\n%s\n```\n", unindent(c.Example))
	}
	if table := flagTable(c.LocalFlags()); table != "" {
		fmt.Fprintf(b, "\n%s", table)
	}
	for _, sub := range c.Commands() {
		if !sub.Hidden && sub.Name() != "help" {
			describe(b, sub, "###")
		}
	}
}

// prose is the long help as Markdown: indented lines become blocks of code.
func prose(c *cobra.Command) string {
	text := c.Long
	if text == "" {
		text = c.Short + "."
	}
	var out []string
	for block := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		if strings.HasPrefix(block, "  ") {
			block = "```\n" + unindent(block) + "\n```"
		} else {
			block = markdown(block)
		}
		out = append(out, block)
	}
	return strings.Join(out, "\n\n")
}

func flagTable(flags *pflag.FlagSet) string {
	var b strings.Builder
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		if b.Len() == 0 {
			b.WriteString("| flag | meaning |\n|---|---|\n")
		}
		value, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if value != "" {
			name += " " + value
		}
		usage = markdown(usage)
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "[]" && f.DefValue != "0" && f.DefValue != "0s" && f.DefValue != "-1" {
			usage += fmt.Sprintf(" (default `%s`)", f.DefValue)
		}
		fmt.Fprintf(&b, "| `%s` | %s |\n", strings.ReplaceAll(name, "|", `\|`), usage)
	})
	return b.String()
}

var special = regexp.MustCompile("[<>*_|`\\[\\]]")

// markdown escapes what Markdown would read as a mark.
func markdown(s string) string { return special.ReplaceAllString(s, `\$0`) }

func unindent(s string) string {
	lines := strings.Split(strings.Trim(s, "\n"), "\n")
	for i := range lines {
		lines[i] = strings.TrimPrefix(lines[i], "  ")
	}
	return strings.Join(lines, "\n")
}

func anchor(path string) string { return strings.ReplaceAll(path, " ", "-") }

var (
	fence   = regexp.MustCompile("(?ms)^```[a-z]*$(.*?)^```$")
	command = regexp.MustCompile(`^(?:\$ )?(?:sudo (?:-E )?)?(?:[A-Z_]+=\S+ )*(?:bin/)?coppice ([a-z].*)$`)
	word    = regexp.MustCompile(`'[^']*'|"[^"]*"|[^\s'"]+`)
	cut     = regexp.MustCompile(`\s(?:#|\||&&|>|<|;).*$`)
)

// TestDocumentedCommands wants every command line of the documents to be one that this program takes: its command and its flags exist.
func TestDocumentedCommands(t *testing.T) {
	t.Parallel()
	const fewest = 50
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, page := range append(pages, "../../README.md", "../../deploy/README.md") {
		text, err := os.ReadFile(page)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range fence.FindAllStringSubmatch(string(text), -1) {
			for line := range strings.SplitSeq(strings.ReplaceAll(block[1], "\\\n", ""), "\n") {
				m := command.FindStringSubmatch(line)
				if m == nil || strings.Contains(line, "…") || strings.HasSuffix(page, "CLI.md") && strings.HasSuffix(line, "[flags]") {
					continue
				}
				found++
				if err := understand(word.FindAllString(cut.ReplaceAllString(m[1], ""), -1)); err != nil {
					t.Errorf("%s: %s: %v", filepath.Base(page), line, err)
				}
			}
		}
	}
	if found < fewest {
		t.Errorf("only %d command lines were found", found)
	}
}

// understand finds the command of some words and reads its flags, as the program would.
func understand(words []string) error {
	a, _, _ := clitest.App(nil)
	c, rest, err := a.Root(commands...).Find(words)
	if err != nil {
		return err
	}
	if !c.Runnable() || c.HasAvailableSubCommands() && len(rest) > 0 && !strings.HasPrefix(rest[0], "-") {
		return fmt.Errorf("%q is not a command", strings.Join(words, " "))
	}
	return c.ParseFlags(rest)
}
