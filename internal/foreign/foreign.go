// Package foreign makes text of guests and of other users harmless to a terminal.
package foreign

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Text of guests and of other users reaches terminals only through this package. A terminal obeys escape sequences, and bidirectional
// marks change how a line looks to a reader. This package shows both as visible text instead.
//
//   - Results and errors for people go through Writer. Cells of tables lose line breaks and tabs, too (Visible).
//   - `ws logs` and `ws logs --console` are shown this way on a terminal, unless --raw is given. A pipe gets the bytes as they are.
//   - `ws exec` and `ws shell` pass everything on: it is the user's own terminal session with that machine.
//   - JSON (--json) says the same with other escapes: its encoder escapes only some of what does not print (EncodeJSON).

// Visible makes text of one line harmless to a terminal. It shows unprintable characters as escapes, such as \x1b.
func Visible(s string) string { return Escape(s, "") }

// Escape shows every unprintable character as an escape, except those in kept.
func Escape(s, kept string) string {
	clean := true
	for _, r := range s {
		if r == utf8.RuneError || !strconv.IsPrint(r) && !strings.ContainsRune(kept, r) {
			clean = false
			break
		}
	}
	if clean {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case strconv.IsPrint(r) || strings.ContainsRune(kept, r):
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		}
		i += n
	}
	return b.String()
}

// Writer passes on line breaks and tabs, and shows all other unprintable characters as escapes.
type Writer struct {
	w    io.Writer
	rest []byte // the beginning of a character, or of a line break of DOS
}

// NewWriter returns a Writer to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Write implements io.Writer.
func (f *Writer) Write(p []byte) (int, error) {
	b := append(f.rest, p...) //nolint:gocritic // rest is replaced below
	end := len(b)
	for back := 1; back <= utf8.UTFMax && back <= len(b); back++ {
		if c := b[len(b)-back]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-back:]) || c == '\r' && back == 1 {
				end = len(b) - back
			}
			break
		}
	}
	f.rest = append([]byte(nil), b[end:]...)
	text := strings.ReplaceAll(string(b[:end]), "\r\n", "\n")
	if _, err := io.WriteString(f.w, Escape(text, "\n\t")); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close writes the buffered rest. It does not close the writer below.
func (f *Writer) Close() error {
	text := Escape(string(f.rest), "\n\t")
	f.rest = nil
	_, err := io.WriteString(f.w, text)
	return err
}

// EncodeJSON writes a value as JSON. Unprintable characters are escaped, which does not change the value.
func EncodeJSON(w io.Writer, v any, indent string) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", indent)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	var out strings.Builder
	for _, r := range b.String() {
		if r == '\n' || strconv.IsPrint(r) {
			out.WriteRune(r)
			continue
		}
		for _, unit := range utf16.Encode([]rune{r}) { // outside of its texts, JSON is ASCII
			fmt.Fprintf(&out, `\u%04x`, unit)
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}
