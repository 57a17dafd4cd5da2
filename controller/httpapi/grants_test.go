package httpapi_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

type fields map[string]any

// with is a copy with other values; nil takes a field out.
func (f fields) with(other fields) fields {
	out := maps.Clone(f)
	maps.Copy(out, other)
	maps.DeleteFunc(out, func(_ string, v any) bool { return v == nil })
	return out
}

func (f fields) text(t *testing.T) string {
	t.Helper()
	b, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestKeptSecret changes each field of a grant, wider, narrower and to the same, with its secret given again and kept: a key that may write
// grants, and knows no secret, sends none further than it was given for.
func TestKeptSecret(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var ws api.Workspace
	w.want(201, "POST", "/v1/workspaces", allowing("a.example", "a.example:8443", "b.example", "evil.example"), &ws)
	writer := w.newKey("writer", core.ScopeGrantRead, core.ScopeGrantWrite).Secret
	referrer := w.newKey("referrer", core.ScopeGrantRead, core.ScopeGrantWrite, core.ScopeSecretReference).Secret
	base := fields{
		"mode": "header", "allowed_hosts": []string{"a.example", "b.example"}, "header": "X-Api-Key", "methods": []string{"GET", "POST"}, "paths": []string{"/v1", "/v2/"},
		"ttl_seconds": 3600, "max_bytes": 1000, "requests_per_minute": 5, "env": "KEY",
	}
	again := fields{"ttl_seconds": 1800} // the same for as long would end later
	given := map[string]fields{"a secret of its own": {"secret": "a secret that is given"}, "a secret from outside": {"vault_ref": "env://COPPICE_SECRET_A"}}
	n := 0
	for name, c := range map[string]struct {
		change fields
		beyond string // the fields in which the secret would go further
	}{
		"the same":                    {fields{}, ""},
		"another mode":                {fields{"mode": "base_url"}, "mode"},
		"one host less":               {fields{"allowed_hosts": []string{"b.example"}}, ""},
		"hosts in another order":      {fields{"allowed_hosts": []string{"B.example:443", "a.example"}}, ""},
		"one host more":               {fields{"allowed_hosts": []string{"a.example", "b.example", "evil.example"}}, "allowed_hosts"},
		"another host":                {fields{"allowed_hosts": []string{"evil.example"}}, "allowed_hosts"},
		"another port":                {fields{"allowed_hosts": []string{"a.example:8443"}}, "allowed_hosts"},
		"another header":              {fields{"header": "User-Agent"}, "header"},
		"the header left out":         {fields{"header": nil}, "header"},
		"the header in another case":  {fields{"header": "x-api-key"}, ""},
		"one method less":             {fields{"methods": []string{"POST"}}, ""},
		"one method more":             {fields{"methods": []string{"GET", "POST", "PUT"}}, "methods"},
		"all methods":                 {fields{"methods": nil}, "methods"},
		"no methods listed":           {fields{"methods": []string{}}, "methods"},
		"one path less":               {fields{"paths": []string{"/v1"}}, ""},
		"paths below":                 {fields{"paths": []string{"/v1/chat", "/v1/", "/v2/x/y"}}, ""},
		"one path more":               {fields{"paths": []string{"/v1", "/v2/", "/v3"}}, "paths"},
		"a path above":                {fields{"paths": []string{"/"}}, "paths"},
		"a path without its slash":    {fields{"paths": []string{"/v2"}}, "paths"},
		"a path that begins the same": {fields{"paths": []string{"/v1x"}}, "paths"},
		"all paths":                   {fields{"paths": nil}, "paths"},
		"a later end":                 {fields{"ttl_seconds": 7200}, "ttl_seconds"},
		"no end":                      {fields{"ttl_seconds": nil}, "ttl_seconds"},
		"an earlier end":              {fields{"ttl_seconds": 60}, ""},
		"no budgets":                  {fields{"max_bytes": 0, "requests_per_minute": 0}, ""},
		"another variable":            {fields{"env": "OTHER_KEY"}, ""},
		"all at once":                 {fields{"allowed_hosts": []string{"evil.example"}, "header": "Cookie", "methods": nil, "paths": nil, "ttl_seconds": nil, "mode": "base_url"}, "mode, allowed_hosts, header, methods, paths, ttl_seconds"},
	} {
		for kind, secret := range given {
			n++
			at := fmt.Sprintf("/v1/workspaces/%s/secrets/grants/g%d", ws.ID, n)
			var before, after api.Grant
			w.want(200, "PUT", at, base.with(secret), &before)
			put := func(key string, f fields) reply {
				t.Helper()
				return w.do(call{method: "PUT", path: at, key: key, body: f.text(t)})
			}
			kept := put(writer, base.with(again).with(c.change))
			switch p := kept; {
			case c.beyond == "" && p.status != 200:
				t.Errorf("%s, %s kept: %s", name, kind, p.body)
			case c.beyond != "":
				p := p.problem(t)
				if kept.status != 409 || p.Code != "SECRET_REQUIRED" || !strings.HasPrefix(p.Detail, c.beyond+": ") || !strings.Contains(p.Detail, "secret or vault_ref") {
					t.Errorf("%s, %s kept: %s", name, kind, kept.body)
				}
				w.want(200, "GET", at, nil, &after)
				if diff := cmp.Diff(before, after); diff != "" {
					t.Errorf("%s, %s kept: it was refused, and the grant is another:\n%s", name, kind, diff)
				}
			}
			// Where it is kept may be named by whoever may name any.
			for _, ref := range []string{"env://COPPICE_SECRET_A", "env://COPPICE_SECRET_B"} {
				got := put(writer, base.with(again).with(c.change).with(fields{"vault_ref": ref}))
				if p := got.problem(t); got.status != 403 || p.Code != "PERMISSION_DENIED" || !strings.Contains(p.Detail, "secret:reference") {
					t.Errorf("%s, by %s and a key that may not name it: %s", name, ref, got.body)
				}
			}
			if got := put(writer, base.with(again).with(c.change).with(fields{"secret": "another secret"})); got.status != 200 {
				t.Errorf("%s, with a secret: %s", name, got.body)
			}
			if got := put(referrer, base.with(again).with(c.change).with(fields{"vault_ref": "env://COPPICE_SECRET_B"})); got.status != 200 {
				t.Errorf("%s, with a reference: %s", name, got.body)
			}
			w.want(204, "DELETE", at, nil, nil)
			// A name that is used again has nothing of the grant of before.
			if got := put(writer, base); got.status != 400 || got.problem(t).Code != "INVALID_FIELD" {
				t.Errorf("%s: put again without a secret: %s", name, got.body)
			}
		}
	}
}

// TestSecretsOfParents: a fork's own grant has nothing of its parent's by that name, and a key has secret:reference only where it is named.
func TestSecretsOfParents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var ws api.Workspace
	w.want(201, "POST", "/v1/workspaces", allowing("a.example", "evil.example"), &ws)
	var forked api.ForkResult
	w.want(200, "PUT", "/v1/workspaces/"+ws.ID+"/secrets/grants/a", fields{"secret": "a good secret", "allowed_hosts": []string{"a.example"}}, nil)
	w.want(201, "POST", "/v1/workspaces/"+ws.ID+"/fork", fields{}, &forked)
	at := "/v1/workspaces/" + forked.Children[0].Workspace.ID + "/secrets/grants/a"
	w.want(200, "GET", at, nil, nil)
	for _, hosts := range [][]string{{"a.example"}, {"evil.example"}} {
		if p := w.want(400, "PUT", at, fields{"allowed_hosts": hosts}, nil).problem(t); !strings.Contains(p.Detail, "a grant needs its secret") {
			t.Errorf("a fork's own for %s: %+v", hosts, p)
		}
	}
	if made := w.newKey("any"); slices.Contains(made.Key.Scopes, api.KeyScope(core.ScopeSecretReference)) || !slices.Contains(made.Key.Scopes, api.KeyScope(core.ScopeGrantWrite)) {
		t.Errorf("a key that was made without scopes has %s", made.Key.Scopes)
	}
}

// TestGrantBounds: what cannot be sent to a host is not admitted, there and in forks, and nothing is changed.
func TestGrantBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var ws api.Workspace
	w.want(201, "POST", "/v1/workspaces", allowing("a.example"), &ws)
	long := func(n int) fields {
		return fields{"secret": strings.Repeat("\u2028", n/3), "allowed_hosts": []string{"a.example"}}
	}
	state := func() string {
		t.Helper()
		eventually.True(t, "no workspace waits for its rules", func() bool {
			var list api.WorkspaceList
			w.want(200, "GET", "/v1/workspaces", nil, &list)
			return !slices.ContainsFunc(list.Items, func(ws api.Workspace) bool { return ws.Network.RulesPending })
		})
		return regexp.MustCompile(`"grants_until": "[^"]*"`).ReplaceAllString(w.dump(), "") // renewed all the time
	}
	at := func(id, name string) string { return "/v1/workspaces/" + id + "/secrets/grants/" + name }
	w.want(200, "PUT", at(ws.ID, "a"), long(grant.MaxSecret), nil)
	w.want(200, "PUT", at(ws.ID, "b"), long(grant.MaxSecret), nil)
	before := state()
	p := w.want(409, "PUT", at(ws.ID, "c"), long(grant.MaxSecret), nil).problem(t)
	if p.Code != "GRANTS_TOO_LARGE" || !strings.Contains(p.Detail, ws.ID) {
		t.Errorf("%+v", p)
	}
	if d := cmp.Diff(strings.Split(before, "\n"), strings.Split(state(), "\n")); d != "" {
		t.Errorf("rows were written: %s", d)
	}
	var forked api.ForkResult
	w.want(201, "POST", "/v1/workspaces/"+ws.ID+"/fork", fields{}, &forked)
	child := forked.Children[0].Workspace.ID
	w.want(200, "PUT", at(child, "c"), long(9<<10), nil)
	before = state()
	p = w.want(409, "PUT", at(ws.ID, "d"), long(grant.MaxSecret), nil).problem(t)
	if p.Code != "GRANTS_TOO_LARGE" {
		t.Errorf("%+v", p)
	}
	if d := cmp.Diff(strings.Split(before, "\n"), strings.Split(state(), "\n")); d != "" {
		t.Errorf("rows were written: %s", d)
	}
	// What becomes no larger is never refused, and what is revoked makes room.
	w.want(200, "PUT", at(ws.ID, "b"), long(9<<10), nil)
	w.want(200, "PUT", at(ws.ID, "b"), fields{"allowed_hosts": []string{"a.example"}, "requests_per_minute": 1}, nil)
	w.want(204, "DELETE", at(ws.ID, "a"), nil, nil)
	w.want(200, "PUT", at(ws.ID, "d"), long(grant.MaxSecret), nil)
	// Larger for a fork only: it is the fork that is named.
	w.want(200, "PUT", at(child, "e"), long(15<<10), nil)
	w.want(200, "PUT", at(child, "f"), long(6<<10), nil)
	p = w.want(409, "PUT", at(ws.ID, "b"), long(grant.MaxSecret), nil).problem(t)
	if p.Code != "GRANTS_TOO_LARGE" || !strings.Contains(p.Detail, child) {
		t.Errorf("%+v does not name the fork %s", p, child)
	}
	var many []string
	for i := range 256 {
		many = append(many, fmt.Sprintf("h%d.%s.%s.example", i, strings.Repeat("a", 63), strings.Repeat("b", 63)))
	}
	for method, path := range map[string]string{"POST": "/v1/workspaces", "PATCH": "/v1/workspaces/" + ws.ID} {
		p = w.want(400, method, path, allowing(many...), nil).problem(t)
		if p.Code != "INVALID_FIELD" || len(p.Fields) != 1 || p.Fields[0].Field != "network.allow" {
			t.Errorf("%s of rules that are too long: %+v", method, p)
		}
	}
}
