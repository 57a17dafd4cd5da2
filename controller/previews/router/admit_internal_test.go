package router

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/core"
)

// judge counts the credentials that it is asked about, and takes none.
type judge struct {
	Previews
	Keys

	asked int
}

func (j *judge) Token(previews.Preview, string) bool {
	j.asked++
	return false
}

func (j *judge) Known(string) bool { return false }

func (j *judge) Queue(context.Context) (func(), error) { return func() {}, nil }

func (j *judge) Authenticate(context.Context, string) (model.Key, error) {
	j.asked++
	return model.Key{}, core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "no")
}

// TestCredentials: a key or a token that is too long is not looked at, and of many cookies only the first few are.
func TestCredentials(t *testing.T) {
	t.Parallel()
	const longest, cookies = 2048, 4 // the bounds, not as the code has them
	fits := strings.Repeat("x", longest)
	for name, c := range map[string]struct {
		visibility model.Visibility
		target     string
		header     http.Header
		asked      int
	}{
		"a key":                 {model.VisibilityPrivate, "/", http.Header{headerKey: {fits}}, 1},
		"a long key":            {model.VisibilityPrivate, "/", http.Header{headerKey: {fits + "x"}}, 0},
		"a header":              {model.VisibilitySigned, "/", http.Header{headerToken: {fits}}, 1},
		"a long header":         {model.VisibilitySigned, "/", http.Header{headerToken: {fits + "x"}}, 0},
		"a parameter":           {model.VisibilitySigned, "/?" + previews.TokenParameter + "=" + fits, nil, 1},
		"a long parameter":      {model.VisibilitySigned, "/?" + previews.TokenParameter + "=" + fits + "x", nil, 0},
		"a cookie":              {model.VisibilitySigned, "/", http.Header{"Cookie": {cookie + "=" + fits}}, 1},
		"a long cookie":         {model.VisibilitySigned, "/", http.Header{"Cookie": {cookie + "=" + fits + "x"}}, 0},
		"cookies":               {model.VisibilitySigned, "/", http.Header{"Cookie": {strings.Repeat(cookie+"=x; ", cookies)}}, cookies},
		"more cookies than fit": {model.VisibilitySigned, "/", http.Header{"Cookie": {strings.Repeat(cookie+"=x; ", cookies+5)}}, cookies},
	} {
		j := &judge{}
		r := &Router{cfg: Config{Previews: j, Keys: j}}
		q := httptest.NewRequestWithContext(t.Context(), http.MethodGet, c.target, http.NoBody)
		maps.Copy(q.Header, c.header)
		if _, _, err := r.admit(q, previews.Preview{Port: model.Port{Visibility: c.visibility}}); err == nil {
			t.Errorf("%s: it is admitted", name)
		}
		if j.asked != c.asked {
			t.Errorf("%s: %d credentials are judged, want %d", name, j.asked, c.asked)
		}
	}
}

// TestPlaces: one workspace, one project, and all projects together have so many requests at the same time, and one visitor has a part of
// each. A request that has ended makes room.
func TestPlaces(t *testing.T) {
	t.Parallel()
	const ofWorkspace, ofProject, ofAll = 128, 512, 4096 // the bounds, not as the code has them
	for name, c := range map[string]struct {
		workspaces, projects, visitors, bound int // how many share the requests
	}{
		"a workspace": {1, 1, 99, ofWorkspace}, "a project": {ofProject, 1, 99, ofProject}, "a controller": {ofAll, 100, 99, ofAll},
		"a visitor of a workspace": {1, 1, 1, ofWorkspace / 2}, "a visitor of a project": {ofProject, 1, 1, ofProject / 2}, "a visitor": {ofAll, 100, 1, ofAll / 4},
	} {
		p := places{open: map[*visit]struct{}{}}
		enter := func(i int, from byte) (func(), bool) {
			return p.enter(&visit{visitor: visitor(netip.AddrFrom4([4]byte{10, 0, 0, from})), preview: previews.Preview{Port: model.Port{
				WorkspaceID: core.WorkspaceID(fmt.Sprint("ws", i%c.workspaces)), ProjectID: core.ProjectID(fmt.Sprint("pr", i%c.projects)),
			}}})
		}
		leaves := make([]func(), c.bound)
		for i := range leaves {
			var full bool
			if leaves[i], full = enter(i, byte(i%c.visitors)); full {
				t.Fatalf("%s: it is full after %d requests, want %d", name, i, c.bound)
			}
		}
		if _, full := enter(c.bound, 0); !full {
			t.Errorf("%s: there is room for more than %d requests", name, c.bound)
		}
		leave, full := enter(0, 200)
		if full != (c.visitors > 1) {
			t.Errorf("%s: it is full for another visitor: %v", name, full)
		}
		if !full {
			leave()
		}
		leaves[0]()
		again, full := enter(0, 0)
		if full {
			t.Fatalf("%s: the end of a request makes no room", name)
		}
		again()
		for _, leave := range leaves[1:] {
			leave()
		}
		if len(p.open)+len(p.of) > 0 {
			t.Errorf("%s: %d requests and %d counts are left", name, len(p.open), len(p.of))
		}
	}
}
