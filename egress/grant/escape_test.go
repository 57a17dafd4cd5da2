package grant_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/egress/grant"
)

// escapes are ways to write one character.
var escapes = map[string]func(r rune) string{
	"percent": func(r rune) string {
		s := ""
		for _, b := range []byte(string(r)) {
			s += fmt.Sprintf("%%%02x", b)
		}
		return s
	},
	"PERCENT": func(r rune) string {
		s := ""
		for _, b := range []byte(string(r)) {
			s += fmt.Sprintf("%%%02X", b)
		}
		return s
	},
	"json": func(r rune) string {
		if r > 0xffff {
			r -= 0x10000
			return fmt.Sprintf(`\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		}
		return fmt.Sprintf(`\u%04x`, r)
	},
	"JSON": func(r rune) string {
		if r > 0xffff {
			return fmt.Sprintf(`\U%08X`, r)
		}
		return fmt.Sprintf(`\u%04X`, r)
	},
	"decimal": func(r rune) string { return fmt.Sprintf("&#%d;", r) },
	"padded":  func(r rune) string { return fmt.Sprintf("&#%04d;", r) },
	"html":    func(r rune) string { return fmt.Sprintf("&#x%x;", r) },
	"HTML":    func(r rune) string { return fmt.Sprintf("&#X%X;", r) },
}

// TestEscaped: a secret is found when any of its characters are escaped in one way, in plain text, base64 or
// hexadecimal, in pieces of any size.
func TestEscaped(t *testing.T) {
	t.Parallel()
	const secret = `sK/AbC+d=&<x>"y'z%_\9~𝔘-Ω.q!?`
	set := grant.NewSet(one(t, func(g *grant.Grant) { g.Secret = grant.NewSecret(secret) }))
	host := target(t, "api.example.com:443")
	asJSON, _ := json.Marshal(secret)
	forms := map[string]string{
		"query": url.QueryEscape(secret), "path": url.PathEscape(secret), "json of Go": strings.Trim(string(asJSON), `"`), "html of Go": html.EscapeString(secret),
		"names":             strings.NewReplacer("&", "&amp;", "/", "&sol;", "+", "&plus;", "=", "&equals;", "<", "&lt;", ">", "&gt;", `"`, "&quot;", "'", "&apos;").Replace(secret),
		"mixed":             "sK%2fAbC%2Bd%3d%26%3Cx%3E%22y%27z%25_%5c9~%F0%9d%94%98-%ce%a9.q!?",
		"base64 in a query": url.QueryEscape(base64.StdEncoding.EncodeToString([]byte("a" + secret))),
		"base64 in JSON":    strings.ReplaceAll(base64.StdEncoding.EncodeToString([]byte(secret)), "/", `\/`),
	}
	random := rand.New(rand.NewPCG(1, 2))
	for name, escape := range escapes {
		for share := range 4 { // share of characters to escape; a character that begins an escape is always escaped
			var b strings.Builder
			for _, r := range secret {
				if random.IntN(4) <= share || strings.ContainsRune(`%\&`, r) {
					b.WriteString(escape(r))
				} else {
					b.WriteRune(r)
				}
			}
			forms[fmt.Sprint(name, share)] = b.String()
		}
	}
	for name, form := range forms {
		for _, before := range []string{"", "you said ", "100% &amp; ", `a\nb`, "&", `\\`, "sK/A", "sK%2fA"} {
			for _, piece := range []int{1, 2, 5, 13, 1 << 20} {
				s := set.Scanner(host)
				var passed []byte
				found := false
				for chunk := range slices.Chunk([]byte(before+form+" after"), piece) {
					pass, hit := s.Feed(chunk)
					passed = append(passed, pass...)
					if found = hit; found {
						break
					}
				}
				if !found || len(passed) > len(before)+4 { // base64 of the text before it
					t.Errorf("%s behind %q in pieces of %d: found %v, passed %q", name, before, piece, found, passed)
				}
			}
			if !set.Scanner(host).In(before + form) {
				t.Errorf("%s behind %q is not in a header", name, before)
			}
		}
	}
}

// FuzzScanner: a stream without a secret passes whole, in pieces of any size; a secret that is put into it is found.
func FuzzScanner(f *testing.F) {
	for _, s := range []string{"", "plain", `\u00`, `\ud835\u00`, "%2", "%", "&#x2", "&amp", "&" + strings.Repeat("a", 40), "sK/Ab%2", `sK\/AbC+&#`, strings.Repeat("sK/", 9)} {
		f.Add(s, s, uint8(1))
		f.Add("sK/Ab", s, uint8(3))
	}
	const secret = "sK/AbC+d=9q"
	h := grant.NewSet(grant.Grant{Mode: grant.ModeHeader, Secret: grant.NewSecret(secret), Targets: []grant.Target{{Port: 443}}})
	f.Fuzz(func(t *testing.T, a, b string, piece uint8) {
		run := func(text string) (string, bool) {
			s := h.Scanner(grant.Target{Port: 443})
			var passed []byte
			for chunk := range slices.Chunk([]byte(text), int(piece)+1) {
				pass, hit := s.Feed(chunk)
				if passed = append(passed, pass...); hit {
					return string(passed), true
				}
			}
			return string(append(passed, s.Rest()...)), false
		}
		if passed, found := run(a + b); !found && passed != a+b {
			t.Errorf("%q became %q", a+b, passed)
		} else if found != h.Scanner(grant.Target{Port: 443}).In(a+b) {
			t.Errorf("%q: found %v in pieces, and not so as a whole", a+b, found)
		}
		if passed, found := run(a + secret + b); !found || len(passed) > len(a) {
			t.Errorf("%q and the secret and %q: found %v, passed %q", a, b, found, passed)
		}
	})
}

// BenchmarkScanner: the longest secret, in a similar text, in large and in small pieces.
func BenchmarkScanner(b *testing.B) {
	for name, secret := range map[string]string{"short": canary, "longest": strings.Repeat("ab", grant.MaxSecret/2-1) + "cd"} {
		h := grant.NewSet(grant.Grant{Mode: grant.ModeHeader, Secret: grant.NewSecret(secret), Targets: []grant.Target{{Port: 443}}})
		for text, body := range map[string]string{"like it": "ab", "plain": "0123456789 some text, and more of it\n", "escaped": `\u0061b%61&#98;`} {
			long := []byte(strings.Repeat(body, 1<<20/len(body)))
			for _, piece := range []int{8, 32 << 10} {
				b.Run(fmt.Sprintf("%s/%s/%d", name, text, piece), func(b *testing.B) {
					b.SetBytes(int64(len(long)))
					for b.Loop() {
						s := h.Scanner(grant.Target{Port: 443})
						for chunk := range slices.Chunk(long, piece) {
							s.Feed(chunk)
						}
					}
				})
			}
		}
	}
}
