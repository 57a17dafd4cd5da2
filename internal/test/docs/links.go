// Package docs reads the documents of this tree for tests: the links and headings of Markdown, the links of the built
// site, and the sources of the pictures in docs/img.
package docs

import (
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"unicode"
)

// Link is a link of a document.
type Link struct {
	Line   int
	Target string // as it is written
}

// Document has what other documents can link to, and what it links to.
type Document struct {
	Anchors map[string]bool
	Links   []Link
}

var (
	codeSpan   = regexp.MustCompile("`[^`\n]*`")
	linkTarget = regexp.MustCompile(`\]\(([^()\s]+)(?: "[^"]*")?\)`)
	attribute  = regexp.MustCompile(`(?:src|href|srcset)="([^"]+)"`)
	ownAnchor  = regexp.MustCompile(`<a (?:id|name)="([^"]+)"`)
	linkText   = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

// Parse reads Markdown as far as links and headings go. What is in blocks or spans of code is text.
func Parse(text string) Document {
	doc := Document{Anchors: map[string]bool{}}
	fence := ""
	for n, line := range strings.Split(text, "\n") {
		trimmed := strings.TrimLeft(line, " ")
		if mark := fenceMark(trimmed); mark != "" {
			if fence == "" {
				fence = mark
			} else if strings.HasPrefix(mark, fence) && strings.TrimLeft(trimmed, "`~") == "" {
				fence = ""
			}
			continue
		}
		if fence != "" {
			continue
		}
		if title, ok := heading(line); ok {
			doc.addHeading(title)
		}
		plain := codeSpan.ReplaceAllString(line, "")
		for _, form := range []*regexp.Regexp{linkTarget, attribute} {
			for _, m := range form.FindAllStringSubmatch(plain, -1) {
				doc.Links = append(doc.Links, Link{n + 1, m[1]})
			}
		}
		for _, m := range ownAnchor.FindAllStringSubmatch(plain, -1) {
			doc.Anchors[m[1]] = true
		}
	}
	return doc
}

// fenceMark is the run of marks with which a line begins or ends a block of code.
func fenceMark(line string) string {
	for _, mark := range []string{"```", "~~~"} {
		if strings.HasPrefix(line, mark) {
			return line[:len(line)-len(strings.TrimLeft(line, mark[:1]))]
		}
	}
	return ""
}

func heading(line string) (string, bool) {
	const deepest = 6
	level := len(line) - len(strings.TrimLeft(line, "#"))
	if level == 0 || level > deepest || !strings.HasPrefix(line[level:], " ") {
		return "", false
	}
	return strings.TrimSpace(line[level:]), true
}

// addHeading adds the anchor of a heading. A repeated one gets a number.
func (d *Document) addHeading(title string) {
	slug := Slug(title)
	name := slug
	for n := 1; d.Anchors[name]; n++ {
		name = slug + "-" + strconv.Itoa(n)
	}
	d.Anchors[name] = true
}

// Slug is the anchor that a forge and the site make of a heading.
func Slug(title string) string {
	title = linkText.ReplaceAllString(title, "$1")
	var b strings.Builder
	for _, r := range strings.ToLower(title) {
		switch {
		case r == ' ':
			b.WriteByte('-')
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			b.WriteRune(r)
		}
	}
	return b.String()
}

// Outside reports whether a target is not a file of the tree: another site, or an address of mail.
func Outside(target string) bool {
	u, err := url.Parse(target)
	return err == nil && (u.Scheme != "" || u.Host != "")
}
