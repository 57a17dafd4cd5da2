package grant

import (
	"slices"
	"time"
)

// Scope says where, how and until when a secret may be used. The owner of the secret agrees to it. The amount of use
// (bytes, requests) is not part of it.
type Scope struct {
	Mode    Mode
	Hosts   []string // host:port in canonical form
	Header  string   // in canonical form
	Methods []string // empty: any
	Paths   []string // prefixes; empty: any
	Expires time.Time
}

// Beyond names the parts of a scope that another scope does not contain. In each of them the secret could be used
// where, or when, it could not before.
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

// wider reports whether an element of list is within no element of limit. An empty list means everything.
func wider(list, limit []string, within func(a, b string) bool) bool {
	if len(limit) == 0 || len(list) == 0 {
		return len(limit) > 0
	}
	return slices.ContainsFunc(list, func(a string) bool {
		return !slices.ContainsFunc(limit, func(b string) bool { return within(a, b) })
	})
}
