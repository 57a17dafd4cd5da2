package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// evil clears a screen, sets a title, turns a line around and breaks it, in text and in bytes that are no text.
const evil = "e\x1b[2J\x1b]0;t\x07\u009b31m\u202edcba\u2066\u200b\rx\x00\x7f\u2028z"

// fill puts evil into every string of a value.
func fill(v reflect.Value, depth int) {
	if v.Type() == reflect.TypeFor[time.Time]() {
		v.Set(reflect.ValueOf(clitest.Dawn))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(evil)
	case reflect.Int, reflect.Int32, reflect.Int64, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uint:
		if v.CanInt() {
			v.SetInt(1)
		} else {
			v.SetUint(1)
		}
	case reflect.Float64, reflect.Float32:
		v.SetFloat(1)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		if depth < 8 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem(), depth+1)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes([]byte(`{"x":"` + "y" + `"}`))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), depth+1)
	case reflect.Map:
		if depth < 8 {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			fill(key, depth+1)
			fill(value, depth+1)
			v.Set(reflect.MakeMap(v.Type()))
			v.SetMapIndex(key, value)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).Name != "NextCursor" {
				fill(v.Field(i), depth+1)
			}
		}
	case reflect.Interface:
		if v.NumMethod() == 0 {
			v.Set(reflect.ValueOf(any(evil)))
		}
	default:
	}
}

// evilTypes are what each kind of route answers with; the last element of a path decides, or the one before an id.
var evilTypes = map[string]any{
	"workspaces": coppice.Workspace{}, "checkpoints": coppice.Checkpoint{}, "sessions": coppice.Session{}, "ports": coppice.Port{}, "processes": coppice.Process{},
	"runners": coppice.Runner{}, "projects": coppice.Project{}, "keys": coppice.APIKey{}, "images": coppice.Image{}, "grants": coppice.Grant{}, "flows": coppice.Flow{},
	"audit": coppice.AuditRecord{}, "operations": coppice.Operation{}, "tree": coppice.TreeNode{}, "ancestors": coppice.Ancestor{}, "effects": coppice.Effect{}, "reseals": coppice.ResealRecord{}, "diff": coppice.FileChange{},
}

// evilServer answers every request with as much hostile text as its type holds. With fail it is a refusal.
func evilServer(t *testing.T, fail bool) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if fail {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusConflict)
			_ = json.NewEncoder(w).Encode(map[string]any{"type": evil, "title": evil, "status": 409, "code": "STATE_CONFLICT" + evil, "detail": evil, "request_id": evil})
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if strings.HasSuffix(r.URL.Path, "/events") {
			w.Header().Set("Content-Type", "text/event-stream")
			b, _ := json.Marshal(map[string]any{"id": "1", "type": evil, "created_at": clitest.Dawn, "workspace_id": evil, "data": map[string]string{"name": evil, "kind": evil, "from": evil, "code": evil}})
			_, _ = fmt.Fprintf(w, "id: 1\ndata: %s\n\n", b)
			return
		}
		parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
		kind, one := parts[len(parts)-1], false
		if _, ok := evilTypes[kind]; !ok && len(parts) > 1 {
			kind, one = parts[len(parts)-2], true
		}
		sample, ok := evilTypes[kind]
		if !ok {
			sample = coppice.Workspace{}
		}
		v := reflect.New(reflect.TypeOf(sample))
		fill(v.Elem(), 0)
		b, err := json.Marshal(v.Interface())
		if err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		if !one && r.Method == http.MethodGet {
			b = []byte(`{"items":[` + string(b) + `],"truncated":true,"complete":true}`)
		}
		_, _ = w.Write(b)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// notSwept are the commands that start servers or change this machine, and those whose output is the user's own terminal.
var notSwept = map[string]bool{
	"dev": true, "server": true, "controller": true, "runner": true, "pager": true, "egress": true, "migrate": true, "doctor": true, "image": true, "completion": true, "help": true, "exec": true,
	"shell": true, "logs": true, "store": true, "export": true, "import": true, "cp": true,
}

// TestNoCommandObeysATerminal runs every command against a server whose every text is hostile.
func TestNoCommandObeysATerminal(t *testing.T) {
	t.Parallel()
	a, _, _ := clitest.App(nil)
	var leaves [][]string
	var walk func(c *cobra.Command, path []string)
	walk = func(c *cobra.Command, path []string) {
		for _, sub := range c.Commands() {
			if !notSwept[sub.Name()] || len(path) > 0 && (sub.Name() == "runner" || sub.Name() == "egress") {
				walk(sub, append(slices.Clip(path), sub.Name()))
			}
		}
		if !c.HasSubCommands() {
			leaves = append(leaves, path)
		}
	}
	walk(a.Root(commands...), nil)
	ws, ckpt := clitest.ID("ws", 1), clitest.ID("ckpt", 1)
	shown := 0
	for _, fail := range []bool{false, true} {
		url := evilServer(t, fail)
		for _, leaf := range leaves {
			for _, args := range [][]string{nil, {ws}, {ckpt}, {ckpt, ckpt}, {ws, "80"}, {ws, "--json"}, {ckpt, "--json"}, {"--json"}} {
				a, stdout, stderr := clitest.App(map[string]string{"COPPICE_SERVER": url, "COPPICE_TOKEN": "k"})
				line := append(slices.Clip(leaf), args...)
				if leaf[0] == "events" || strings.Join(leaf, " ") == "ws forward" {
					continue // they go on until they are ended; the test below has events
				}
				status := run(t.Context(), a, line)
				for _, out := range []string{stdout.String(), stderr.String()} {
					if foreign.Escape(out, "\n\t") != out {
						t.Errorf("%v (status %d) sends a terminal %q", line, status, out)
					}
					if strings.Contains(out, `\x1b[2J`) {
						shown++
					}
				}
			}
		}
	}
	t.Logf("%d commands, hostile text was shown %d times", len(leaves), shown)
	if shown < 30 {
		t.Errorf("hostile text was shown %d times only: the sweep reaches little", shown)
	}
}
