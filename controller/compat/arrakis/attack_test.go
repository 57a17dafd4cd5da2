package arrakis_test

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller/compat/arrakis"
	"github.com/coppice-dev/coppice/controller/controllertest"
)

// A listener that needs no key answers nothing but this host, and no web page.
func TestOnlyThisHostWithoutKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start("vm", "")
	cmd := ask{method: "POST", path: "/vms/vm/cmd", body: `{"cmd":"true"}`}
	for name, c := range map[string]struct {
		change func(*ask)
		want   int
	}{
		"a page":                     {func(a *ask) { a.header = map[string]string{"Origin": "https://evil.example"} }, 403},
		"a page of this host":        {func(a *ask) { a.header = map[string]string{"Origin": w.url} }, 403},
		"a page without an origin":   {func(a *ask) { a.header = map[string]string{"Origin": "null"} }, 403},
		"a page's image":             {func(a *ask) { a.method, a.header = "GET", map[string]string{"Sec-Fetch-Site": "cross-site"} }, 403},
		"a page's form":              {func(a *ask) { a.header = map[string]string{"Content-Type": "text/plain"} }, 415},
		"a form without a script":    {func(a *ask) { a.header = map[string]string{"Content-Type": "application/x-www-form-urlencoded"} }, 415},
		"a name bound to this host":  {func(a *ask) { a.host = "evil.example" }, 421},
		"a name below localhost":     {func(a *ask) { a.host = "evil.localhost:7000" }, 421},
		"an address of another host": {func(a *ask) { a.host = "192.0.2.1:7000" }, 421},
		"no name":                    {func(a *ask) { a.host = "." }, 421},
		"a proxy":                    {func(a *ask) { a.header = map[string]string{"X-Forwarded-For": "192.0.2.1"} }, 403},
		"a proxy that says its name": {func(a *ask) { a.header = map[string]string{"Via": "1.1 proxy"} }, 403},
		"a proxy of another kind":    {func(a *ask) { a.header = map[string]string{"X-Forwarded-Host": "coppice.example"} }, 403},
		"a wrong key":                {func(a *ask) { a.header = map[string]string{"Authorization": "Bearer wrong"} }, 401},
		"an empty key":               {func(a *ask) { a.header = map[string]string{"Authorization": "Basic Og=="} }, 401},
		"a person":                   {func(a *ask) { a.header = map[string]string{"Sec-Fetch-Site": "none"} }, 200},
		"localhost":                  {func(a *ask) { a.host = "localhost:7000" }, 200},
		"another loopback address":   {func(a *ask) { a.host = "[::1]:7000" }, 200},
	} {
		a := cmd
		c.change(&a)
		if r := w.do(a); r.Status != c.want {
			t.Errorf("%s: %d %s", name, r.Status, r.Body)
		} else if h := r.Header; h.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: %v", name, h)
		}
	}
	h, err := arrakis.New(arrakis.Config{API: w.cell.API, Key: firstKey, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for from, want := range map[string]int{"127.0.0.1:1": 200, "[::1]:1": 200, "[::ffff:127.0.0.1]:1": 200, "192.0.2.1:1": 403, "[fe80::1%eth0]:1": 403, "@": 403} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:7000/vms", nil)
		r.RemoteAddr = from
		got := httptest.NewRecorder()
		h.ServeHTTP(got, r)
		if got.Code != want {
			t.Errorf("from %s: %d %s", from, got.Code, got.Body)
		}
	}
}

// Where a key is needed, it comes as py-arrakis can send it, and it sees its own project only.
func TestKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	foreign := w.cell.Tenant(t, "other")
	w.start("vm", "")
	w.snapshot("vm", "s")
	in := func(user, password string) string {
		return strings.Replace(w.keyed, "://", "://"+user+":"+password+"@", 1)
	}
	for name, c := range map[string]struct {
		at     string
		header map[string]string
		want   int
	}{
		"none":                   {w.keyed, nil, 401},
		"password":               {in("any", firstKey), nil, 200},
		"user":                   {in(firstKey, ""), nil, 200},
		"bearer":                 {w.keyed, map[string]string{"Authorization": "Bearer " + firstKey}, 200},
		"another scheme":         {w.keyed, map[string]string{"Authorization": "Digest " + firstKey}, 401},
		"wrong":                  {in("any", "wrong"), nil, 401},
		"long":                   {w.keyed, map[string]string{"Authorization": "Bearer " + strings.Repeat("x", 60_000)}, 401},
		"right, but from a page": {w.keyed, map[string]string{"Authorization": "Bearer " + firstKey, "Origin": "https://evil.example"}, 403},
	} {
		for _, path := range []string{"/vms", "/v1/vms/vm", "/vms/vm/files?paths=f"} {
			if r := w.do(ask{method: "GET", path: path, at: c.at, header: c.header}); r.Status != c.want {
				t.Errorf("%s: %s: %d %s", name, path, r.Status, r.Body)
			}
		}
	}
	// A client without a good key is refused before it has sent its body.
	for _, route := range []string{"POST /v1/vms", "POST /vms/vm/files", "POST /v1/vms/vm/cmd"} {
		method, path, _ := strings.Cut(route, " ")
		controllertest.WantRefusedBeforeBody(t, method, w.keyed+path, "", nil)
		controllertest.WantRefusedBeforeBody(t, method, w.keyed+path, "", http.Header{"Authorization": {"Bearer wrong"}})
	}
	w.do(ask{method: "POST", path: "/vms/vm/files", body: `{"files":[]}`, at: in("any", "wrong")}).want(t, http.StatusUnauthorized, nil)

	// What a foreign key gets for a VM is what it gets for one that does not exist.
	for _, a := range []ask{
		{method: "GET", path: "/vms/VM"},
		{method: "DELETE", path: "/vms/VM"},
		{method: "PATCH", path: "/vms/VM", body: `{"status":"paused"}`},
		{method: "POST", path: "/vms/VM/snapshots", body: `{"snapshotId":"x"}`},
		{method: "POST", path: "/vms/VM/cmd", body: `{"cmd":"true"}`},
		{method: "POST", path: "/vms/VM/files", body: `{"files":[{"path":"a","content":"b"}]}`},
		{method: "GET", path: "/vms/VM/files?paths=a"},
		{method: "POST", path: "/vms", body: `{"vmName":"mine","snapshotId":"SNAP"}`},
		{method: "GET", path: "/vms"},
		{method: "DELETE", path: "/vms"},
	} {
		seen := func(vm, snapshot string) string {
			r := strings.NewReplacer("VM", vm, "SNAP", snapshot)
			got := w.do(ask{method: a.method, path: r.Replace(a.path), body: strings.ReplaceAll(a.body, `"SNAP"`, `"`+snapshot+`"`), at: in("any", foreign)})
			return fmt.Sprint(got.Status, strings.NewReplacer(`\"`+vm+`\"`, "VM", `\"`+snapshot+`\"`, "SNAP").Replace(got.Body))
		}
		if theirs, none := seen("vm", "s"), seen("mv", "z"); theirs != none {
			t.Errorf("%s %s: for a foreign one %s, for none %s", a.method, a.path, theirs, none)
		}
	}
	if w.info("vm").Status != "RUNNING" {
		t.Error("a foreign key has changed the VM")
	}
	// Another project uses the same name for a VM of its own.
	w.do(ask{method: "POST", path: "/vms", body: `{"vmName":"vm"}`, at: in("any", foreign)}).want(t, http.StatusOK, nil)
}

// Every error is JSON in Arrakis' form, also where no route answers; nothing redirects, for clients repeat a POST as a GET.
func TestErrorsHaveTheirForm(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{"GET", "/", 404},
		{"GET", "/vms/", 404},
		{"GET", "/v1/v1/vms", 404},
		{"POST", "/vms//cmd", 404},
		{"POST", "/vms/a/../b/cmd", 404},
		{"GET", "/v2/vms", 404},
		{"GET", "/vms/a%2Fb", 404},
		{"GET", "/vms/%ff", 404},
		{"PUT", "/vms", 405},
		{"OPTIONS", "/v1/vms/x", 405},
		{"GET", "/vms/x/cmd", 405},
		{"DELETE", "/vms/x/snapshots", 405},
		{"POST", "/health", 405},
	} {
		w.do(ask{method: c.method, path: c.path}).want(t, c.want, nil)
	}
	broken := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/workspaces" {
			panic(errors.New("secret of the server"))
		}
		w.WriteHeader(http.StatusBadGateway)
		_, _ = io.WriteString(w, "<html>")
	}
	h, err := arrakis.New(arrakis.Config{API: http.HandlerFunc(broken), Key: firstKey, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	at := controllertest.Serve(t, h)
	for _, path := range []string{"/vms", "/vms/x", "/health", "/vms/x/files?paths=a"} {
		r := w.do(ask{method: "GET", path: path, at: at})
		if r.want(t, r.Status, nil); r.Status < 500 || strings.Contains(r.Body, "secret") {
			t.Errorf("%s: %d %s", path, r.Status, r.Body)
		}
	}
}
