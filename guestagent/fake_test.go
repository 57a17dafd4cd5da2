//go:build linux

package guestagent

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/fakeguest"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/guestagent/reseal"
)

// ownOf are the fields of answers that each guest has its own of.
var ownOf = []string{
	"boot_nonce", "capture_id", "created_at", "cwd", "duration_ms", "ended_at", "evidence", "flush_ms", "freeze_ms", "generation", "gid", "group",
	"id", "identity_files", "kernel", "message", "mtime", "owner", "pid", "processes", "rss_bytes", "scan_ms", "stale_prng_processes", "started_at", "steps", "thaw_ms",
	"uid", "uptime_s", "workload",
}

// common removes from a JSON value what each guest has its own of.
func common(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for _, name := range ownOf {
			delete(v, name)
		}
		if v["type"] == "dir" {
			delete(v, "size")
		}
		for name := range v {
			v[name] = common(v[name])
		}
	case []any:
		for i := range v {
			v[i] = common(v[i])
		}
	}
	return v
}

// said is an answer in a form that can be compared.
func said(t *testing.T, url, method, path, body string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(res.Header, res.Trailer)
	out := fmt.Sprintf("%d %s", res.StatusCode, res.Header.Get("Content-Type"))
	for _, name := range []string{guestapi.HeaderOffset, guestapi.HeaderEndOffset, guestapi.HeaderTruncated, guestapi.HeaderEOF} {
		if v := res.Header.Get(name); v != "" {
			out += " " + name + "=" + v
		}
	}
	if method+path == "POST"+guestapi.PathSessions && res.StatusCode < http.StatusBadRequest {
		return out // the program may have ended already
	}
	for _, text := range []string{res.Header.Get(guestapi.HeaderFileInfo), string(b)} {
		var v any
		if json.Unmarshal([]byte(text), &v) == nil {
			list, err := json.Marshal(common(v))
			if err != nil {
				t.Fatal(err)
			}
			text = string(list)
		}
		out += " " + text
	}
	return out
}

// TestFakeGuestAnswersAlike asks the agent and the simulated guest the same. They give the same answers.
func TestFakeGuestAnswersAlike(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	a.withSteps(reseal.Step{Name: guestapi.StepEntropy})
	fake := guesttest.NewClient(t, fakeguest.New(fakeguest.InProcess(fakeguest.NewState()), nil))
	ids := map[string]string{}
	for _, name := range []string{"{a}", "{b}", "{c}", "{d}", "{e}", "{f}"} {
		ids[name] = string(core.NewID[core.SessionID]())
	}
	ids["{dir}"] = t.TempDir() + "/x"
	ids["{entropy}"] = base64.StdEncoding.EncodeToString(guesttest.Entropy())
	again, err := json.Marshal(guesttest.ResealRequest("g1"))
	if err != nil {
		t.Fatal(err)
	}
	ids["{reseal}"] = string(again)
	if again, err = json.Marshal(provisionalRequest("p1")); err != nil {
		t.Fatal(err)
	}
	ids["{provisional}"] = string(again)
	var pairs []string
	for name, value := range ids {
		pairs = append(pairs, name, value)
	}
	for line := range strings.Lines(exchanges) {
		words := strings.SplitN(strings.TrimSpace(line), " ", 3)
		if len(words) < 2 {
			continue
		}
		body := strings.Join(words[2:], "")
		var got [2]string
		for i, url := range []string{a.URL, fake.URL} {
			var h guestapi.Health
			if strings.Contains(body, "{generation}") {
				h = guesttest.Must[guestapi.Health](t)(guesttest.Ask[guestapi.Health](&guesttest.Client{T: t, URL: url}, http.MethodGet, guestapi.PathHealth, nil))
			}
			fill := strings.NewReplacer(append(slices.Clone(pairs), "{generation}", h.Generation)...)
			got[i] = said(t, url, words[0], fill.Replace(words[1]), fill.Replace(body))
		}
		if diff := cmp.Diff(got[0], got[1]); diff != "" {
			t.Errorf("%s (-agent +fake):\n%s", strings.TrimSpace(line), diff)
		}
	}
}

// exchanges are the requests: method, path, body.
const exchanges = `
POST /v1/sessions {"id":"{a}","command":["echo","a","b"]}
GET /v1/sessions/{a}/wait
GET /v1/sessions/{a}
GET /v1/sessions/{a}/output
GET /v1/sessions/{a}/output?offset=2&stream=stdout&follow=1
GET /v1/sessions/{a}/output?offset=99
GET /v1/sessions/{a}/output?from=now
GET /v1/sessions/{a}/output?stream=stderr
GET /v1/sessions/{a}/output?stream=stdin
GET /v1/sessions/{a}/output?offset=-1
POST /v1/sessions/{a}/stdin input
POST /v1/sessions/{a}/signal {"signal":"TERM"}
POST /v1/sessions {"id":"{a}","command":["echo"]}
POST /v1/sessions {}
POST /v1/sessions {"command":["no-such-program"]}
POST /v1/sessions {"command":
POST /v1/sessions {"id":"{b}","command":["cat"],"stdin_open":true}
POST /v1/sessions/{b}/stdin one
POST /v1/sessions/{b}/stdin?close=1 two
GET /v1/sessions/{b}/wait
GET /v1/sessions/{b}/output?follow=1
POST /v1/sessions {"id":"{c}","command":["sh","-c","false; exit 3"],"env":{"A":"b"}}
GET /v1/sessions/{c}/wait
POST /v1/sessions {"id":"{d}","command":["sleep","1000"]}
POST /v1/sessions/{d}/signal {"signal":"NONSENSE"}
POST /v1/sessions/{d}/signal {"signal":"15"}
GET /v1/sessions/{d}/wait
POST /v1/sessions {"id":"{e}","command":["sleep","1000"],"timeout_ms":50}
GET /v1/sessions/{e}/wait
POST /v1/sessions {"id":"{f}","command":["sleep","1000"]}
POST /v1/sessions/{f}/deadline {"timeout_ms":50}
GET /v1/sessions/{f}/wait
POST /v1/sessions/{f}/deadline {"timeout_ms":50}
GET /v1/sessions
DELETE /v1/sessions/{a}
GET /v1/sessions/{a}
DELETE /v1/sessions/{a}
GET /v1/sessions/{a}/wait
GET /v1/sessions/{a}/output
GET /v1/sessions/{a}/attach

POST /v1/files/mkdir {"path":"{dir}","parents":true}
POST /v1/files/mkdir {"path":"{dir}"}
POST /v1/files/mkdir {"path":"{dir}","parents":true}
PUT /v1/files?path={dir}/f&mode=0600 hello
PUT /v1/files?path={dir} hello
GET /v1/files?path={dir}/f
HEAD /v1/files?path={dir}/f
GET /v1/files?path={dir}/f&stat=1
GET /v1/files?path={dir}
GET /v1/files?path={dir}/none
GET /v1/files?path={dir}&list=1
GET /v1/files?path={dir}/f&list=1
PUT /v1/files/content?path={dir}/f&in_place=1&offset=1 ELL
PUT /v1/files/content?path={dir}/f&in_place=1&append=1 !
GET /v1/files?path={dir}/f
PUT /v1/files/content?path={dir}/f&in_place=1 new
POST /v1/files/mkdir {"path":"{dir}/sub/g","parents":true}
POST /v1/files/rename {"from":"{dir}/f","to":"{dir}/sub/f"}
POST /v1/files/rename {"from":"{dir}/f","to":"{dir}/sub/f"}
POST /v1/files/rename {"from":"{dir}/sub/f","to":"{dir}/sub/g","no_replace":true}
GET /v1/files/content?path={dir}&list=1&depth=3
DELETE /v1/files?path={dir}/f
DELETE /v1/files?path={dir}/sub
DELETE /v1/files?path={dir}/sub&recursive=1
GET /v1/files?path={dir}&list=1

POST /v1/watches {"path":"{dir}"}
POST /v1/watches {"path":"{dir}/none"}
GET /v1/watches
GET /v1/watches/none/events
DELETE /v1/watches/none
GET /v1/none

GET /v1/health
POST /v1/quiesce {}
POST /v1/quiesce {"capture_id":"c1"}
POST /v1/quiesce {"capture_id":"c1"}
POST /v1/quiesce {"capture_id":"c2"}
POST /v1/release {"generation":"{generation}"}
POST /v1/reseed {"generation":"another","entropy":"{entropy}"}
POST /v1/reseed {"generation":"{generation}"}
POST /v1/reseed {"generation":"{generation}","entropy":"{entropy}"}
POST /v1/reseal {reseal}
GET /v1/health
POST /v1/release {"generation":"another"}
POST /v1/release {"generation":"{generation}"}
POST /v1/reseal {reseal}
POST /v1/quiesce {"capture_id":"c3"}
POST /v1/reseal {provisional}
POST /v1/reseal {provisional}
GET /v1/health
POST /v1/quiesce {"capture_id":"c3"}
POST /v1/reseed {"generation":"{generation}","entropy":"{entropy}"}
POST /v1/release {"generation":"{generation}"}
POST /v1/reseal {}
POST /v1/reseal {reseal}
POST /v1/reseal {reseal}
GET /v1/health
GET /v1/sessions
POST /v1/quiesce {"capture_id":"c4"}
POST /v1/release {"generation":"g1"}
POST /v1/release {"generation":"g1"}
GET /v1/health
`
