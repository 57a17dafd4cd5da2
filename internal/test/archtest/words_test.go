package archtest

import (
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// removedWord is a private word that the code has given up for a term of the field. It must not come back.
type removedWord struct {
	row   string         // the word of the row in docs/GLOSSARY.md
	use   string         // what to write
	names *regexp.Regexp // identifiers that have the word; nil: none
	text  []string       // words in comments and strings; none: any text is right
	in    []string       // the directories without the word; none: all that are checked
}

// removedWords follow the tables "Words with several meanings" and "Private dialect".
var removedWords = []removedWord{
	{row: "anew", use: "again or new", names: regexp.MustCompile(`^anew$|Anew`), text: []string{"anew", "Anew"}},
	{row: "comes of it", use: "result, available or destination", names: regexp.MustCompile(`(?i)^whereto$`), text: []string{"whereto", "to be had", "comes of it", "come of it", "came of it"}},
	{row: "in clear", use: "unencrypted or without TLS", text: []string{"in clear"}},
	{row: "away", use: "unreachable", names: regexp.MustCompile(`^noteAway$`), text: []string{
		"controller is away", "store is away", "Vault is away", "database is away", "one is away", "service is away",
		"controller was away", "store was away", "Vault was away", "database was away", "one was away", "service was away",
	}},
	{row: "bring", use: "ensure local", names: regexp.MustCompile(`^([Bb]ring|[Bb]ring[A-Z]\w*)$`)},
	{row: "tell", use: "report, send or describe", names: regexp.MustCompile(`^(tell|told|tell[A-Z]\w*|\w+Told)$`), in: []string{
		"runner", "egress", "guestagent/watch", "mcp", "internal/sidecar", "controller/runnertest",
	}},
	{row: "plant", use: "insert", names: regexp.MustCompile(`^([Pp]lant|planting|plant[A-Z]\w*)$`)},
	{row: "growth", use: "fork options", names: regexp.MustCompile(`^(growth|(end|fail|finish)Grown)$`)},
	{row: "chore", use: "periodic job", names: regexp.MustCompile(`^chore([A-Z]\w*)?$`)},
	{row: "Rest", use: "idle policy", names: regexp.MustCompile(`^rest(In|Time)$|^resting$`)},
	{row: "grow", use: "fork, or descend from", names: regexp.MustCompile(`^growable$`), text: []string{"grew from it", "grew from them", "grew from one", "grew from a", "grew from which", "grew from what"}},
	{row: "box", use: "sandbox", names: regexp.MustCompile(`(?i)^(box|boxes|newBox)$`), in: []string{"egress"}},
	{row: "admit", use: "allow, of a frame or an address", names: regexp.MustCompile(`^admit$`), in: []string{"runner", "internal/boundjson"}},
	{row: "hold", use: "stop, of a machine", names: regexp.MustCompile(`^([Hh]old|LetGo)$`), in: []string{"runner/vmm"}},
	{row: "hold", use: "has, of what a runner reports; lock, of a row", names: regexp.MustCompile(`^(HeldSandboxes|HoldCheckpoint)$`)},
	{row: "seal", use: "freeze, of a memfd", names: regexp.MustCompile(`^(seal|sealed|findSealed)$`), in: []string{"runner/memory"}},
	{row: "seal", use: "encrypt", names: regexp.MustCompile(`^(seal|[Ss]ealed)$`), in: []string{"egress/grant", "egress/host", "internal/masterkey", "snapshotstore/envelope"}},
}

// unchecked are the files whose words are not compared with the list: generated ones, and programs and tests of the whole system.
var unchecked = regexp.MustCompile(`^(cmd|sdk|examples|migrations|internal/cli|internal/test|controller/compat)/|\.(gen|pb)\.go$`)

// onTheWire are texts that other programs read, so they keep their words.
var onTheWire = map[string]bool{`"set up anew"`: true}

// TestRemovedWords finds the words that the code has given up. Each is in the glossary.
func TestRemovedWords(t *testing.T) {
	t.Parallel()
	inGlossary := map[string]bool{}
	for _, row := range rows(t, "docs/GLOSSARY.md") {
		for word := range strings.SplitSeq(row[0], ",") {
			inGlossary[strings.TrimSpace(strings.SplitN(strings.Trim(strings.TrimSpace(word), "`"), " (", 2)[0])] = true
		}
	}
	for _, w := range removedWords {
		if !inGlossary[w.row] {
			t.Errorf("docs/GLOSSARY.md has no row for %q", w.row)
		}
	}
	for text, want := range map[string]bool{"anew": true, "do anew.": true, "(anew)": true, "canew": false, "anewt": false, "anew_": false, "an anew1 anew": true} {
		if hasWord(text, "anew") != want {
			t.Errorf("the word in %q: want %t", text, want)
		}
	}
	checked := 0
	for _, path := range tracked(t) {
		if !strings.HasSuffix(path, ".go") || unchecked.MatchString(path) {
			continue
		}
		checked++
		checkWords(t, path)
	}
	if checked == 0 {
		t.Error("no file was checked")
	}
}

// checkWords compares the identifiers, comments and strings of a file with the removed words.
func checkWords(t *testing.T, path string) {
	t.Helper()
	source, err := os.ReadFile(filepath.Join(rootDir(t), path))
	if err != nil {
		t.Fatal(err)
	}
	file := token.NewFileSet().AddFile(path, -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, scanner.ScanComments)
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return
		}
		if tok != token.IDENT && tok != token.COMMENT && tok != token.STRING || onTheWire[lit] {
			continue
		}
		for i := range removedWords {
			w := &removedWords[i]
			if found := w.find(tok, lit); found != "" && w.has(path) {
				t.Errorf("%s:%d: %q: write %s", path, file.Line(pos), found, w.use)
			}
		}
	}
}

// seen are the identifiers that were compared: the tree has few of them, each many times, and the race detector makes expressions slow.
var seen = map[*removedWord]map[string]string{}

// find returns the removed word in a token, if it is there.
func (w *removedWord) find(tok token.Token, lit string) string {
	if tok != token.IDENT {
		for _, word := range w.text {
			if hasWord(lit, word) {
				return word
			}
		}
		return ""
	}
	if w.names == nil {
		return ""
	}
	found, ok := seen[w][lit]
	if !ok {
		found = w.names.FindString(lit)
		if seen[w] == nil {
			seen[w] = map[string]string{}
		}
		seen[w][lit] = found
	}
	return found
}

// hasWord reports whether a text has a word or phrase that is not a part of a longer word.
func hasWord(text, word string) bool {
	inWord := func(b byte) bool { return b == '_' || b >= '0' && b <= '9' || b|0x20 >= 'a' && b|0x20 <= 'z' }
	for at := 0; ; at++ {
		i := strings.Index(text[at:], word)
		if i < 0 {
			return false
		}
		at += i
		end := at + len(word)
		if (at == 0 || !inWord(text[at-1])) && (end == len(text) || !inWord(text[end])) {
			return true
		}
	}
}

// has reports whether a file is in a directory that is without the word.
func (w *removedWord) has(path string) bool {
	for _, dir := range w.in {
		if strings.HasPrefix(path, dir+"/") {
			return true
		}
	}
	return len(w.in) == 0
}
