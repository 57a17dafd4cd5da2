package grant

import (
	"encoding/base64"
	"encoding/hex"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// forms returns the ways in which a value may be written: as it is, in hexadecimal, and in base64 at any offset of the
// encoded text. Each form is found with any of its characters escaped ([view]).
func forms(value string) []needle {
	var out []needle
	add := func(s string) {
		if s != "" && !slices.ContainsFunc(out, func(n needle) bool { return string(n.text) == s }) {
			out = append(out, newNeedle([]byte(s)))
		}
	}
	add(value)
	add(strings.ReplaceAll(value, " ", "+")) // as in a query string
	add(strings.Map(func(c rune) rune {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		return c
	}, value))
	h := hex.EncodeToString([]byte(value))
	add(h)
	add(strings.ToUpper(h))
	for before := range 3 {
		padded := append(make([]byte, before), value...)
		from, to := (before*8+5)/6, len(padded)*8/6 // the characters that depend on the value alone, not on the bytes around it
		for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			add(enc.EncodeToString(padded)[from:to])
		}
	}
	return out
}

// Scanner searches a stream for values, in pieces of any size. It lets nothing pass that may be the beginning of a
// value. Its work grows linearly with the length of the stream, whatever the stream contains.
type Scanner struct {
	needles  []needle
	shortest int
	views    []looking
	kept     []byte
}

var placeholders = forms(Prefix)

// NewPlaceholderScanner searches for any placeholder.
func NewPlaceholderScanner() *Scanner { return newScanner(placeholders) }

// Scanner searches for the secrets that may be used for a host; nil when there are none.
func (s Set) Scanner(t Target) *Scanner {
	var needles []needle
	for i := range s.grants {
		if s.grants[i].is(t) {
			needles = append(needles, s.needles[i]...)
		}
	}
	if needles == nil {
		return nil
	}
	return newScanner(needles)
}

func newScanner(needles []needle) *Scanner {
	s := &Scanner{needles: needles, shortest: len(needles[0].text)}
	for _, n := range needles {
		s.shortest = min(s.shortest, len(n.text))
	}
	for _, v := range views {
		s.views = append(s.views, looking{view: v, begun: make([]int, len(needles))})
	}
	return s
}

// Feed takes the next bytes. It returns the bytes that may pass, and whether a value was found: then nothing passes.
// pass is valid until the next call, and only while p is unchanged.
func (s *Scanner) Feed(p []byte) (pass []byte, found bool) {
	keep := 0
	for i := range s.views {
		v := &s.views[i]
		if i > 0 && v.idle(p) && s.views[0].ends(len(p)) {
			v.begin(&s.views[0])
			continue // it reads the same as the first view
		}
		k, found := v.feed(s.needles, p)
		if found {
			s.kept = nil
			return nil, true
		}
		keep = max(keep, k)
	}
	if len(s.kept) == 0 {
		s.kept = slices.Clone(p[len(p)-keep:])
		return p[: len(p)-keep : len(p)-keep], false
	}
	b := append(s.kept, p...) // after the bytes that pass now, which nobody overwrites
	n := len(b) - keep
	s.kept = b[n:]
	return b[:n:n], false
}

// Rest returns the bytes that were kept, at the end of the stream.
func (s *Scanner) Rest() []byte {
	b := s.kept
	s.kept = nil
	return b
}

// In reports whether a value is in a text.
func (s *Scanner) In(text string) bool {
	if len(text) < s.shortest { // an escape is longer than the bytes that it stands for
		return false
	}
	_, found := newScanner(s.needles).Feed([]byte(text))
	return found
}

// inName is In for the name of a header, where upper and lower case are lost.
func (s *Scanner) inName(name string) bool {
	name = strings.ToLower(name)
	return slices.ContainsFunc(s.needles, func(n needle) bool { return strings.Contains(name, strings.ToLower(string(n.text))) })
}

// InHeader reports whether a header's names or values contain a value.
func (s *Scanner) InHeader(h http.Header) bool {
	for name, values := range h {
		if s.inName(name) || slices.ContainsFunc(values, s.In) {
			return true
		}
	}
	return false
}

// Find says where a request's target or headers contain a placeholder; empty: nowhere.
func Find(r *http.Request) string {
	s := NewPlaceholderScanner()
	for text, times := r.URL.RequestURI(), 0; times < 3; times++ { // a server may decode it more than once
		if s.In(text) {
			return "there is a placeholder in the request's target"
		}
		more, err := url.PathUnescape(text)
		if err != nil || more == text {
			break
		}
		text = more
	}
	for name, values := range r.Header {
		if s.inName(name) || slices.ContainsFunc(values, s.In) {
			return "there is a placeholder in the header " + core.Clip(name) + ", where no grant of this sandbox puts it"
		}
	}
	return ""
}
