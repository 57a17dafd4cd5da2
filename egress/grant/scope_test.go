package grant_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/egress/grant"
)

// TestScopeBeyond compares random scopes by the requests that they cover: a scope that is not beyond another one covers
// no additional request.
func TestScopeBeyond(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	some := func(of ...string) (out []string) {
		for _, s := range of {
			if r.IntN(3) == 0 {
				out = append(out, s)
			}
		}
		return out
	}
	now := time.Unix(1_000_000, 0)
	made := func() grant.Scope {
		s := grant.Scope{
			Mode: []grant.Mode{grant.ModeHeader, grant.ModeBaseURL}[r.IntN(2)], Hosts: some("a.test:443", "a.test:80", "b.test:443"), Header: []string{"A", "B"}[r.IntN(2)],
			Methods: some("GET", "PUT"), Paths: some("/", "/a", "/a/", "/a/b", "/ab"),
		}
		if r.IntN(3) > 0 {
			s.Expires = now.Add(time.Duration(r.IntN(3)) * time.Hour)
		}
		return s
	}
	covers := func(s grant.Scope, host, method, path string, at time.Time) bool {
		under := func(p string) bool {
			return path == p || len(path) > len(p) && path[:len(p)] == p && (p[len(p)-1] == '/' || path[len(p)] == '/')
		}
		return slices.Contains(s.Hosts, host) && (len(s.Methods) == 0 || slices.Contains(s.Methods, method)) && (len(s.Paths) == 0 || slices.ContainsFunc(s.Paths, under)) &&
			(s.Expires.IsZero() || at.Before(s.Expires))
	}
	within := 0
	for range 20_000 {
		s, limit := made(), made()
		if s.Beyond(limit) != nil {
			continue
		}
		within++
		if s.Mode != limit.Mode || s.Header != limit.Header {
			t.Fatalf("%+v is within %+v", s, limit)
		}
		for _, host := range []string{"a.test:443", "a.test:80", "b.test:443"} {
			for _, method := range []string{"GET", "PUT", "POST"} {
				for _, path := range []string{"/", "/a", "/a/", "/a/b", "/a/bc", "/a/b/c", "/ab", "/abc", "/c"} {
					for h := range 4 {
						at := now.Add(time.Duration(h)*time.Hour - time.Minute)
						if covers(s, host, method, path, at) && !covers(limit, host, method, path, at) {
							t.Fatalf("%+v is within %+v, and covers %s %s%s more", s, limit, method, host, path)
						}
					}
				}
			}
		}
	}
	if within < 100 {
		t.Errorf("%d scopes were within others: this shows nothing", within)
	}
	s := made()
	if beyond := s.Beyond(s); beyond != nil {
		t.Errorf("%+v is beyond itself in %q", s, beyond)
	}
}
