package grant

import (
	"slices"
	"time"
)

// Scope is where, how and until when a secret may be used. It is what somebody who gives a secret agrees to; how much it is used (bytes,
// requests) is no part of it.
type Scope struct {
	Mode    Mode
	Hosts   []string // host:port in their only form
	Header  string   // in its canonical form
	Methods []string // empty: any
	Paths   []string // prefixes; empty: any
	Expires time.Time
}

// Beyond names what of a scope is not within another: in each of these the secret could go where, or when, it could not before.
func (s Scope) Beyond(limit Scope) []string {
	var out []string
	add := func(field string, beyond bool) {
		if beyond {
			out = append(out, field)
		}
	}
	add("mode", s.Mode != limit.Mode)
	add("allowed_hosts", slices.ContainsFunc(s.Hosts, func(h string) bool { return !slices.Contains(limit.Hosts, h) }))
	add("header", s.Header != limit.Header)
	add("methods", wider(s.Methods, limit.Methods, func(m, of string) bool { return m == of }))
	add("paths", wider(s.Paths, limit.Paths, under))
	add("ttl_seconds", !limit.Expires.IsZero() && (s.Expires.IsZero() || s.Expires.After(limit.Expires)))
	return out
}

// wider reports whether something in a list is within nothing of another. An empty list is everything.
func wider(list, limit []string, within func(a, b string) bool) bool {
	if len(limit) == 0 || len(list) == 0 {
		return len(limit) > 0
	}
	return slices.ContainsFunc(list, func(a string) bool {
		return !slices.ContainsFunc(limit, func(b string) bool { return within(a, b) })
	})
}
