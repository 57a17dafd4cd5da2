package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// sweep looks for the secrets in everything that there is of them: memory, disk and device state of each machine, the store as it is and with
// its frames unpacked, the database's files and a dump of it, logs, journals, metrics, and what the API and programs in guests were told. What
// was planted in each machine, and what else must be there, is found in each of these places: the search is not blind.
func (g *granted) sweep(children []coppice.ForkChild) {
	g.t.Helper()
	machines := []coppice.WorkspaceID{g.root}
	for _, c := range children {
		machines = append(machines, c.Workspace.ID)
	}
	began := time.Now()
	m := g.plantAndCapture(machines)
	captured := time.Since(began)
	secrets := newSearch(g.header, g.base)
	checkSearch(g.t, secrets, g.header, g.base)
	look := func(what string, b []byte) {
		for _, form := range secrets.in(b) {
			g.t.Errorf("%s has %s", what, form)
		}
	}
	began = time.Now()
	places := []string{g.s.dir, g.store}
	if log := g.s.logFile(); filepath.Dir(log) != g.s.dir {
		places = append(places, log)
	}
	for _, where := range places {
		if err := readAll(where, func(path string, b []byte) {
			look(path, b)
			m.note(path, b)
		}); err != nil {
			g.t.Fatal(err)
		}
	}
	m.check(g.t, g.s.logFile(), g.root)
	for what, said := range g.said(m) {
		look(what, []byte(said))
	}
	g.t.Logf("%d machines were captured and stored in %s; searched %d MB in %d pieces, for %d forms, in %s; load %s",
		len(machines), captured.Round(time.Millisecond), secrets.bytes>>20, secrets.pieces, len(secrets.forms), time.Since(began).Round(time.Millisecond), load())
}

// checkSearch has a search find each form of the secrets, written by others and in the middle of something.
func checkSearch(t *testing.T, s *search, secrets ...string) {
	t.Helper()
	try := *s // what it counts does not count
	for _, v := range secrets {
		for name, form := range map[string]string{
			"it": v, "hex": hex.EncodeToString([]byte(v)), "HEX": fmt.Sprintf("%X", v), "a query": url.Values{"k": {v}}.Encode(), "a path": (&url.URL{Path: "/" + v}).EscapedPath(),
			"basic": "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+v)), "a token": base64.RawURLEncoding.EncodeToString([]byte("x" + v + "\n")),
			"base64": base64.StdEncoding.EncodeToString([]byte(v)), "a header": "Authorization: Bearer " + v + "\r\n",
		} {
			if len(try.in([]byte("before "+form+" after"))) == 0 {
				t.Errorf("the search does not find %s as %s", v[:12], name)
			}
		}
	}
}

// marks is what was planted, and where it was seen.
type marks struct {
	prefix      string // of all; the number of the machine follows
	machines    int
	checkpoints []coppice.CheckpointID // of the machines
	seen        map[string]map[int]int // how often, by kinds of places and machines
	read        map[string]int64       // bytes, by kinds of places
	logHas      map[string]bool        // of what the log must have
	lines       []string
}

// plantAndCapture writes a mark of its own into each machine's memory and disk, has it ask for something by it, and stores a checkpoint of the machine.
func (g *granted) plantAndCapture(machines []coppice.WorkspaceID) *marks {
	g.t.Helper()
	m := &marks{prefix: "planted-" + rand.Text() + "-", machines: len(machines), seen: map[string]map[int]int{}, read: map[string]int64{}, logHas: map[string]bool{}}
	m.lines = []string{g.root}
	for i, ws := range machines {
		mark := fmt.Sprintf("%s%02d", m.prefix, i)
		shell(g.t, g.s, ws, "printf %s "+mark+" > /root/planted; sync")
		launch(g.t, g.s, ws, "sh", "-c", "P="+mark+"; while sleep 1000; do echo $P; done")
		if got := g.say(ws, "curl -sS -m 20 http://a.example.com/"+mark); !strings.Contains(got, mark) {
			g.t.Errorf("%s asked for what was planted: %s", ws, got)
		}
		m.checkpoints = append(m.checkpoints, checkpoint(g.t, g.s, ws).ID)
	}
	for _, id := range m.checkpoints {
		eventually.True(g.t, "checkpoint "+id+" is in the store", func() bool {
			now, err := g.s.client.Checkpoint(g.t.Context(), id)
			return err == nil && now.State == coppice.CheckpointSealed
		})
	}
	return m
}

// kindOf is what kind of place a file or a frame in it is. What is of a machine's checkpoint is told by its directory.
func (m *marks) kindOf(path string) (kind string, machine int) {
	file, frame := strings.CutSuffix(path, ", a frame")
	machine = slices.IndexFunc(m.checkpoints, func(id coppice.CheckpointID) bool { return strings.Contains(file, "/"+id+"/") })
	base := filepath.Base(file)
	switch {
	case frame:
		return "frames of packs", -1
	case strings.Contains(base, "pack-"):
		return "packs as they are", -1
	case strings.Contains(file, "/postgres/"):
		return "files of the database", -1
	case strings.HasSuffix(base, ".log"):
		return "logs", -1
	case machine >= 0 && base == "memory.delta":
		return "memory", machine
	case machine >= 0 && base == "overlay.ext4":
		return "disk", machine
	case machine >= 0 && base == "device.state":
		return "device state", machine
	}
	return "other files", -1
}

// note remembers which marks a piece has.
func (m *marks) note(path string, b []byte) {
	kind, machine := m.kindOf(path)
	m.read[kind] += int64(len(b))
	if machine >= 0 {
		m.read[fmt.Sprint(kind, " of ", machine)] += int64(len(b))
	}
	if kind == "logs" {
		for _, l := range m.lines {
			m.logHas[l] = m.logHas[l] || bytes.Contains(b, []byte(l))
		}
	}
	for _, i := range m.in(b) {
		if m.seen[kind] == nil {
			m.seen[kind] = map[int]int{}
		}
		if machine < 0 || machine == i {
			m.seen[kind][i]++
		}
	}
}

// in are the machines whose marks there are.
func (m *marks) in(b []byte) (found []int) {
	for {
		_, rest, ok := bytes.Cut(b, []byte(m.prefix))
		if !ok {
			return found
		}
		if len(rest) >= 2 {
			if i, err := strconv.Atoi(string(rest[:2])); err == nil && !slices.Contains(found, i) {
				found = append(found, i)
			}
		}
		b = rest
	}
}

// check wants each machine's mark in its memory, on its disk, in the store and in the database, and something of every other kind of place.
func (m *marks) check(t *testing.T, log string, root coppice.WorkspaceID) {
	t.Helper()
	t.Logf("read, in bytes: %v", m.read)
	t.Logf("marks of machines: %v", m.seen)
	for _, kind := range []string{"memory", "disk", "frames of packs", "files of the database"} {
		if len(m.seen[kind]) != m.machines {
			t.Errorf("what was planted in %d machines was found in %s of %d: the search is blind", m.machines, kind, len(m.seen[kind]))
		}
	}
	for _, kind := range []string{"packs as they are", "logs", "other files"} {
		if m.read[kind] == 0 {
			t.Errorf("there are no %s: the search is blind", kind)
		}
	}
	for i := range m.machines {
		if kind := fmt.Sprint("device state of ", i); m.read[kind] == 0 {
			t.Errorf("there is no %s: the search is blind", kind)
		}
	}
	if !m.logHas[root] {
		t.Errorf("%s does not have the workspace", log)
	}
}

// said is what is told of all this: by the API, in events, metrics and errors, by a dump of the database, and to the guests. Each has what it must.
func (g *granted) said(m *marks) map[string]string {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), 2*time.Minute)
	defer cancel()
	out := map[string]string{}
	has := func(what, said string, wants ...string) {
		g.t.Helper()
		out[what] = said
		for _, want := range wants {
			if !strings.Contains(said, want) {
				g.t.Errorf("%s (%d bytes) do not have %s: the search is blind", what, len(said), want)
			}
		}
	}
	mark := func(i int) string { return fmt.Sprintf("%s%02d", m.prefix, i) }
	var flows []coppice.Flow
	for f, err := range g.s.client.Egress(ctx, g.root, coppice.EgressFilter{}) {
		if err != nil {
			g.t.Fatal(err)
		}
		flows = append(flows, f)
	}
	b, err := json.Marshal(flows)
	if err != nil {
		g.t.Fatal(err)
	}
	has("flows", string(b), mark(0), `"grant_id":"one"`, `"path":"/used"`)
	has("audit records", g.cli.ok("audit", "--limit", "0", "--json"), `"one"`)
	has("events", g.get(ctx, g.s.server+"/v1/events?follow=false", "Last-Event-ID", "0"), m.checkpoints...)
	has("metrics", g.get(ctx, "http://"+g.metrics+"/metrics"), `coppice_controller_flows_total{outcome="allowed"`, `coppice_egress_flows_total{outcome="allowed"`, "coppice_runner_sandboxes")
	marksOfAll := make([]string, m.machines)
	for i := range marksOfAll {
		marksOfAll[i] = mark(i)
	}
	has("a dump of the database", g.dump(ctx), append(marksOfAll, "COPY public.grants ", "COPY public.events_", "COPY public.audit_records_")...)
	has("answers to guests", strings.Join(g.answers, "\n"), "coppice egress: ", mark(0))
	has("errors", g.errors(ctx), "INVALID", "GRANT_HOST_DENIED")
	return out
}

// get asks for a page, with the key of the stack.
func (g *granted) get(ctx context.Context, target string, header ...string) string {
	g.t.Helper()
	_, body := g.do(ctx, http.MethodGet, target, "", header...)
	return body
}

func (g *granted) do(ctx context.Context, method, target, body string, header ...string) (int, string) {
	g.t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, target, strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+g.s.token)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(r)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	var all bytes.Buffer
	_ = resp.Header.Write(&all)
	if _, err := io.Copy(&all, resp.Body); err != nil {
		g.t.Fatal(err)
	}
	return resp.StatusCode, all.String()
}

// errors are what the API and the command line say to somebody who grants a secret in a way that they refuse.
func (g *granted) errors(ctx context.Context) string {
	g.t.Helper()
	secret, err := json.Marshal(g.header)
	if err != nil {
		g.t.Fatal(err)
	}
	var all strings.Builder
	at := g.s.server + "/v1/workspaces/" + g.root + "/secrets/grants/bad"
	for _, body := range []string{
		`{"secret": ` + string(secret), `{"secret": [` + string(secret) + `]}`, `{"secret": ` + string(secret) + `, "mode": "odd"}`,
		`{"secret": ` + string(secret) + `, "allowed_hosts": ["c.example.com"], "provider": "custom", "header": "Authorization"}`, `{"secret": ` + string(secret) + `, "ttl_seconds": -1}`,
		`{"secret": ` + string(secret) + `, "vault_ref": "vault://a/b#c"}`,
	} {
		status, said := g.do(ctx, http.MethodPut, at, body, "Content-Type", "application/json")
		if status < 400 {
			g.t.Errorf("%s is taken", body)
		}
		all.WriteString(said + "\n")
	}
	status, stdout, stderr := g.cli.run(g.header+"\nin two lines", "grant", "put", g.root, "bad", "--host", "a.example.com", "--secret-file", "-")
	if status == 0 {
		g.t.Error("a secret of two lines was taken")
	}
	return all.String() + stdout + stderr
}

// dump is the stack's database as text.
func (g *granted) dump(ctx context.Context) string {
	g.t.Helper()
	dir := filepath.Join(g.s.data, "postgres", "data")
	pid, err := os.ReadFile(filepath.Join(dir, "postmaster.pid"))
	if err != nil {
		g.t.Fatal(err)
	}
	lines := strings.Split(string(pid), "\n") // its fourth is the port, its fifth the directory of the socket
	binaries, err := pgcluster.Find(ctx, os.Getenv("PGBIN"))
	if err != nil || len(lines) < 5 {
		g.t.Fatal(err, lines)
	}
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(binaries.Postgres), "pg_dump"), "-h", lines[4], "-p", lines[3], "-U", pgcluster.Superuser, "postgres")
	cmd.Stderr = &errs
	b, err := cmd.Output()
	if err != nil {
		g.t.Fatalf("pg_dump: %v: %s", err, errs.String())
	}
	return string(b)
}
