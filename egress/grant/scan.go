package grant

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// forms are the ways in which a value is written: as it is, escaped, in hexadecimal, and in base64 wherever it begins in what is encoded.
func forms(value string) [][]byte {
	out := [][]byte{[]byte(value)}
	add := func(s string) {
		if s != "" && !slices.ContainsFunc(out, func(b []byte) bool { return string(b) == s }) {
			out = append(out, []byte(s))
		}
	}
	add(url.QueryEscape(value))
	add(url.PathEscape(value))
	add(strings.ToLower(url.QueryEscape(value)))
	add(strings.ReplaceAll(value, "/", `\/`)) // JSON
	h := hex.EncodeToString([]byte(value))
	add(h)
	add(strings.ToUpper(h))
	for before := range 3 {
		padded := append(make([]byte, before), value...)
		from, to := (before*8+5)/6, len(padded)*8/6 // the characters that nothing around it has a part in
		for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			add(enc.EncodeToString(padded)[from:to])
		}
	}
	return out
}

// Scanner looks for values in a stream, however it comes in pieces, and lets nothing pass that may be the beginning of one.
type Scanner struct {
	needles [][]byte
	longest int
	kept    []byte
}

var placeholders = forms(Prefix)

// NewPlaceholderScanner looks for any placeholder.
func NewPlaceholderScanner() *Scanner { return newScanner(placeholders) }

// Scanner looks for the secrets that may be used towards a host; nil when there are none.
func (s Set) Scanner(t Target) *Scanner {
	var needles [][]byte
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

func newScanner(needles [][]byte) *Scanner {
	s := &Scanner{needles: needles}
	for _, n := range needles {
		s.longest = max(s.longest, len(n))
	}
	return s
}

// Feed takes the next bytes. It returns those that may pass, good until the next call, and whether a value was found: then nothing passes.
func (s *Scanner) Feed(p []byte) (pass []byte, found bool) {
	b := append(s.kept, p...)
	for _, n := range s.needles {
		if bytes.Contains(b, n) {
			s.kept = nil
			return nil, true
		}
	}
	keep := s.begun(b)
	s.kept = slices.Clone(b[len(b)-keep:])
	return b[:len(b)-keep], false
}

// begun is how many of the last bytes may be the beginning of a value.
func (s *Scanner) begun(b []byte) int {
	for k := min(len(b), s.longest-1); k > 0; k-- {
		end := b[len(b)-k:]
		for _, n := range s.needles {
			if len(n) > k && bytes.Equal(n[:k], end) {
				return k
			}
		}
	}
	return 0
}

// Rest are the bytes that were kept, when there are no more.
func (s *Scanner) Rest() []byte {
	b := s.kept
	s.kept = nil
	return b
}

// In reports whether a value is in a text.
func (s *Scanner) In(text string) bool {
	return slices.ContainsFunc(s.needles, func(n []byte) bool { return strings.Contains(text, string(n)) })
}

// inName is In for the name of a header, which has lost its case.
func (s *Scanner) inName(name string) bool {
	name = strings.ToLower(name)
	return slices.ContainsFunc(s.needles, func(n []byte) bool { return strings.Contains(name, strings.ToLower(string(n))) })
}

// InHeader reports whether a value is in a header's names or values.
func (s *Scanner) InHeader(h http.Header) bool {
	for name, values := range h {
		if s.inName(name) || slices.ContainsFunc(values, s.In) {
			return true
		}
	}
	return false
}

// Find says where in a request's target and headers a placeholder is; empty: nowhere.
func Find(r *http.Request) string {
	s := NewPlaceholderScanner()
	for text, times := r.URL.RequestURI(), 0; times < 3; times++ { // escaped as often as a server may undo it
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
			return "there is a placeholder in the header " + name + ", where no grant of this sandbox puts it"
		}
	}
	return ""
}
