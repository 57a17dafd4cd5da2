package grant_test

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/ca"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

const canary = "sk-canary/7f3+a9=Ω-0123456789"

func target(t *testing.T, s string) grant.Target {
	t.Helper()
	h, port, err := policy.ParseHostPort(s)
	if err != nil {
		t.Fatal(err)
	}
	return grant.Target{Host: h, Port: port}
}

func one(t *testing.T, change ...func(*grant.Grant)) grant.Grant {
	t.Helper()
	g := grant.Grant{
		ID: "api", Mode: grant.ModeHeader, Placeholder: grant.NewPlaceholder(), Secret: grant.NewSecret(canary),
		Targets: []grant.Target{target(t, "api.example.com:443")}, Header: "Authorization",
	}
	for _, c := range change {
		c(&g)
	}
	return g
}

func request(t *testing.T, method, path string, header ...string) *http.Request {
	t.Helper()
	u, err := url.Parse("https://api.example.com" + path)
	if err != nil {
		t.Fatal(err)
	}
	r := &http.Request{Method: method, URL: u, Header: http.Header{}}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return r
}

func TestUse(t *testing.T) {
	t.Parallel()
	now := time.Now()
	g := one(t, func(g *grant.Grant) { g.Methods, g.Paths = []string{"GET", "POST"}, []string{"/v1", "/files/"} })
	raw := one(t, func(g *grant.Grant) { g.ID, g.Header = "raw", "X-Api-Key" })
	old := one(t, func(g *grant.Grant) { g.ID, g.Expires = "old", now.Add(-time.Second) })
	set := grant.NewSet(g, raw, old)
	p := g.Placeholder
	basic := func(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	for _, c := range []struct {
		name   string
		r      *http.Request
		used   string
		header string // the value of the grant's header afterwards
		denied string
	}{
		{"bearer", request(t, "GET", "/v1/x", "Authorization", "Bearer "+p), "api", "Bearer " + canary, ""},
		{"bare", request(t, "GET", "/v1", "X-Api-Key", raw.Placeholder), "raw", canary, ""},
		{"basic", request(t, "POST", "/files/a", "Authorization", basic("user:"+p)), "api", basic("user:" + canary), ""},
		{"none of its own", request(t, "GET", "/v1/x", "Authorization", "Bearer guests-own", "X-Api-Key", "too"), "", "", ""},
		{"expired", request(t, "GET", "/v1/x", "Authorization", "Bearer "+old.Placeholder), "", "", "has expired"},
		{"of another sandbox", request(t, "GET", "/v1/x", "Authorization", "Bearer "+grant.NewPlaceholder()), "", "", "header Authorization"},
		{"basic of another", request(t, "GET", "/v1/x", "Authorization", basic("user:"+grant.NewPlaceholder())), "", "", "header Authorization"},
		{"two in one", request(t, "GET", "/v1/x", "Authorization", "Bearer "+p+" "+grant.NewPlaceholder()), "", "", "more than one"},
		{"other header", request(t, "GET", "/v1/x", "User-Agent", "x "+p), "", "", "header User-Agent"},
		{"as well elsewhere", request(t, "GET", "/v1/x", "Authorization", "Bearer "+p, "Cookie", p), "", "", "header Cookie"},
		{"name of a header", request(t, "GET", "/v1/x", "X-"+p, "1"), "", "", "header X-"},
		{"query", request(t, "GET", "/v1/x?k="+p, "Authorization", "Bearer "+p), "", "", "target"},
		{"query, escaped", request(t, "GET", "/v1/x?k=%63"+p[1:]), "", "", "target"},
		{"query, escaped twice", request(t, "GET", "/v1/x?k=%2563"+p[1:]), "", "", "target"},
		{"path", request(t, "GET", "/v1/"+p), "", "", "target"},
		{"path, hexadecimal", request(t, "GET", "/v1/"+hex.EncodeToString([]byte(p))), "", "", "target"},
		{"base64 of it", request(t, "GET", "/v1/x", "X-A", base64.URLEncoding.EncodeToString([]byte("xy"+p))), "", "", "header X-A"},
	} {
		used, err := set.Use(c.r, target(t, "api.example.com:443"), grant.ModeHeader, "", now)
		var d grant.DeniedError
		switch {
		case c.denied != "":
			if !errors.As(err, &d) || !strings.Contains(strings.ToLower(d.Error()), strings.ToLower(c.denied)) || used != nil {
				t.Errorf("%s: %v %v, want a denial for %q", c.name, used, err, c.denied)
			}
			for h, v := range c.r.Header {
				if strings.Contains(strings.Join(v, ""), canary) {
					t.Errorf("%s: denied with the secret in %s", c.name, h)
				}
			}
		case err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.used == "":
			if used != nil || c.r.Header.Get("Authorization") != "" || c.r.Header.Get("X-Api-Key") != "" {
				t.Errorf("%s: %v, and the guest's own %v", c.name, used, c.r.Header)
			}
		default:
			if used == nil || used.ID != c.used || c.r.Header.Get(used.Header) != c.header {
				t.Errorf("%s: %v, header %v", c.name, used, c.r.Header)
			}
		}
	}
}

// TestScope: methods and paths limit a grant, however a path is written.
func TestScope(t *testing.T) {
	t.Parallel()
	g := one(t, func(g *grant.Grant) { g.Methods, g.Paths = []string{"GET"}, []string{"/v1", "/files/"} })
	set := grant.NewSet(g)
	for path, want := range map[string]bool{
		"/v1": true, "/v1/": true, "/v1/a/b?x=/../": true, "/files/x": true, "/v1/%41": true,
		"/": false, "/v1evil": false, "/v2": false, "/files": false, "/filesx": false, "/V1": false,
		"/v1/../admin": false, "/v1/%2e%2e/admin": false, "/v1/..;/admin": false, "/v1/..%2fadmin": false, "/v1//admin": false, "/v1\\..\\admin": false, "/v1/%5c..": false,
		"//v1": false,
	} {
		_, err := set.Use(request(t, "GET", path, "Authorization", "Bearer "+g.Placeholder), target(t, "api.example.com:443"), grant.ModeHeader, "", time.Now())
		if (err == nil) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := set.Use(request(t, "POST", "/v1"), target(t, "api.example.com:443"), grant.ModeHeader, "", time.Now()); err == nil {
		t.Error("POST is not among the methods")
	}
	for _, other := range []string{"api.example.com:8443", "example.com:443", "x.api.example.com:443"} {
		if set.Granted(target(t, other), grant.ModeHeader) {
			t.Errorf("%s is granted", other)
		}
	}
	if set.Granted(target(t, "api.example.com:443"), grant.ModeBaseURL) {
		t.Error("it is granted in another mode")
	}
}

// written returns the ways in which a server may send a secret back.
func written(s string) map[string]string {
	j, _ := json.Marshal(s)
	out := map[string]string{
		"as it is": s, "query": url.QueryEscape(s), "path": url.PathEscape(s), "lower": strings.ToLower(url.QueryEscape(s)), "hex": hex.EncodeToString([]byte(s)),
		"HEX": fmt.Sprintf("%X", s), "json": strings.ReplaceAll(string(j), "/", `\/`),
	}
	for before := range 4 {
		text := []byte(strings.Repeat("x", before) + s + "after")
		out[fmt.Sprintf("base64 at %d", before)] = base64.StdEncoding.EncodeToString(text)
		out[fmt.Sprintf("base64url at %d", before)] = base64.RawURLEncoding.EncodeToString(text)
	}
	return out
}

// TestScanner: a secret in any form and in any pieces is found before a byte of it has passed, and a text without one
// passes whole.
func TestScanner(t *testing.T) {
	t.Parallel()
	set := grant.NewSet(one(t))
	host := target(t, "api.example.com:443")
	for name, form := range written(canary) {
		for _, piece := range []int{1, 2, 7, 1 << 20} {
			text := "sk-cana before " + form + " after"
			s := set.Scanner(host)
			var passed []byte
			found := false
			for chunk := range slices.Chunk([]byte(text), piece) {
				pass, hit := s.Feed(chunk)
				passed = append(passed, pass...)
				if found = hit; found {
					break
				}
			}
			if !found || len(passed) > len("sk-cana before ")+6 { // base64 of the text before it
				t.Errorf("%s in pieces of %d: found %v, passed %q", name, piece, found, passed)
			}
		}
	}
	for _, text := range []string{"", "nothing", canary[:20], strings.Repeat(canary[:12], 5), strings.Repeat("s", 1000)} {
		for _, piece := range []int{1, 3, 1 << 20} {
			s := set.Scanner(host)
			var passed []byte
			for chunk := range slices.Chunk([]byte(text), piece) {
				pass, hit := s.Feed(chunk)
				if hit {
					t.Errorf("%q in pieces of %d: found", text, piece)
				}
				passed = append(passed, pass...)
			}
			if passed = append(passed, s.Rest()...); string(passed) != text {
				t.Errorf("%q in pieces of %d became %q", text, piece, passed)
			}
		}
	}
	if s := set.Scanner(target(t, "other.example:443")); s != nil {
		t.Error("a host without grants is looked at")
	}
}

// TestEncrypted: only the process and sandbox for which a bundle is encrypted can open it, and it arrives whole.
func TestEncrypted(t *testing.T) {
	t.Parallel()
	keys, err := grant.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	other, err := grant.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	g := one(t, func(g *grant.Grant) {
		g.Methods, g.Paths, g.Expires, g.MaxBytes, g.PerMinute = []string{"GET"}, []string{"/v1"}, time.Now().UTC().Round(0), 10, 20
	})
	b := grant.Bundle{Grants: []grant.Grant{g}, Issuer: &ca.Authority{Certificate: []byte("c"), Key: []byte("k")}}
	encrypted, err := grant.Encrypt(keys.Public(), "sbx_1", 3, b)
	if err != nil {
		t.Fatal(err)
	}
	for name, form := range written(canary) {
		if strings.Contains(string(encrypted), form) {
			t.Errorf("the encrypted bundle has the secret in it (%s)", name)
		}
	}
	got, err := keys.Decrypt(encrypted, "sbx_1", 3)
	if err != nil || !grant.NewSet(got.Grants...).Keeps(&g) || got.Grants[0].MaxBytes != 10 || got.Grants[0].PerMinute != 20 || string(got.Issuer.Key) != "k" {
		t.Errorf("%+v, %v", got, err)
	}
	for name, open := range map[string]func() (grant.Bundle, error){
		"another's keys":  func() (grant.Bundle, error) { return other.Decrypt(encrypted, "sbx_1", 3) },
		"another sandbox": func() (grant.Bundle, error) { return keys.Decrypt(encrypted, "sbx_2", 3) },
		"another version": func() (grant.Bundle, error) { return keys.Decrypt(encrypted, "sbx_1", 2) },
		"changed": func() (grant.Bundle, error) {
			return keys.Decrypt(append(slices.Clone(encrypted[:40]), make([]byte, len(encrypted)-40)...), "sbx_1", 3)
		},
	} {
		if _, err := open(); core.CategoryOf(err) != core.FailedPrecondition || strings.Contains(err.Error(), canary) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := grant.Encrypt([]byte("short"), "sbx_1", 3, b); core.CategoryOf(err) != core.Invalid {
		t.Errorf("a key that is none: %v", err)
	}
}

// TestNeverPrinted: a secret does not show, whatever value it is part of.
func TestNeverPrinted(t *testing.T) {
	t.Parallel()
	g := one(t)
	b, err := json.Marshal(g.Secret)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{fmt.Sprint(g), fmt.Sprintf("%+v %#v %s %q", g, g, g.Secret, g.Secret), string(b)} {
		if strings.Contains(s, canary[3:]) {
			t.Errorf("%s", s)
		}
	}
}
