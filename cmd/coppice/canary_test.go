package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestNoCommandTellsItsToken runs every command with a key and a server's password that must not be shown, against a server that
// refuses, one that breaks off, one that is not there and an address that is none.
func TestNoCommandTellsItsToken(t *testing.T) {
	t.Parallel()
	a, _, _ := clitest.App(nil)
	var leaves [][]string
	var walk func(c *cobra.Command, path []string)
	walk = func(c *cobra.Command, path []string) {
		for _, sub := range c.Commands() {
			if len(path) > 0 || !notSwept[sub.Name()] {
				walk(sub, append(slices.Clip(path), sub.Name()))
			}
		}
		if !c.HasSubCommands() {
			leaves = append(leaves, path)
		}
	}
	walk(a.Root(commands...), nil)
	broken := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	t.Cleanup(broken.Close)
	gone := httptest.NewServer(nil)
	gone.Close()
	const token, password = "sk-canary-token", "sk-canary-password"
	withPassword := func(address string) string {
		return strings.Replace(address, "http://", "http://user:"+password+"@", 1)
	}
	ws := clitest.ID("ws", 1)
	for what, server := range map[string]string{
		"refuses": evilServer(t, true), "breaks off": broken.URL, "is not there": gone.URL, "has a password": withPassword(gone.URL), "breaks off, with a password": withPassword(broken.URL),
		"is none": "http://user:" + password + "@[::1:bad", "has a bad scheme": "ftp://user:" + password + "@host",
	} {
		some := leaves
		if what != "refuses" { // whoever is not answered tries again for a while
			some = [][]string{{"ws", "ls"}, {"ws", "show"}, {"ckpt", "create"}}
		}
		for _, leaf := range some {
			for _, args := range [][]string{{ws}, {ws, "--json"}} {
				a, stdout, stderr := clitest.App(map[string]string{"COPPICE_SERVER": server, "COPPICE_TOKEN": token})
				line := append(slices.Clip(leaf), args...)
				if leaf[0] == "events" {
					continue // it goes on until it is ended
				}
				run(t.Context(), a, line)
				for _, secret := range []string{token, password} {
					if strings.Contains(stdout.String()+stderr.String(), secret) {
						t.Errorf("%v shows %s when the server %s: %.300s", line, secret, what, stdout.String()+stderr.String())
					}
				}
			}
		}
	}
}

// TestAttachTokenIsNotTold breaks off where the token of an attachment is in the address.
func TestAttachTokenIsNotTold(t *testing.T) {
	t.Parallel()
	const token = "sk-canary-attach"
	for what, answer := range map[string]http.HandlerFunc{
		"refuses":    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) },
		"breaks off": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"redirects": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://127.0.0.1:1/?"+r.URL.RawQuery, http.StatusFound)
		},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			switch {
			case strings.HasPrefix(r.URL.Path, "/v1/attach/"):
				answer(w, r)
			case strings.HasSuffix(r.URL.Path, "/attach"):
				_ = json.NewEncoder(w).Encode(api.Attachment{Token: token, Transport: "websocket", URL: "/v1/attach/" + clitest.ID("ses", 1), ExpiresAt: clitest.Dawn})
			case strings.Contains(r.URL.Path, "/workspaces/") && r.Method == http.MethodGet && !strings.HasSuffix(r.URL.Path, "/sessions"):
				_ = json.NewEncoder(w).Encode(clitest.Workspace(1, "demo", "ready"))
			default:
				_ = json.NewEncoder(w).Encode(api.Session{ID: clitest.ID("ses", 1), State: "running", Command: []string{"sh"}, PTY: true, StartedAt: clitest.Dawn})
			}
		}))
		t.Cleanup(s.Close)
		a, _, _ := clitest.App(map[string]string{"COPPICE_SERVER": s.URL, "COPPICE_TOKEN": "k"})
		client, err := a.Client()
		if err != nil {
			t.Fatal(err)
		}
		_, err = client.Attach(t.Context(), clitest.ID("ses", 1), coppice.AttachOptions{})
		if err == nil {
			t.Errorf("%s: attached", what)
			continue
		}
		if strings.Contains(err.Error(), token) || strings.Contains(err.Error(), url.QueryEscape(token)) {
			t.Errorf("the token of an attachment is told when the server %s: %v", what, err)
		}
	}
}
