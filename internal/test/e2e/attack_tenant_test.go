package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/coppice-dev/coppice/api"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// tenant attacks as a client of the API with a tenant's keys.
func (x *assault) tenant() {
	x.foreign()
	x.weakKey()
	x.badKeys()
	x.ports()
	x.bodies()
	x.retarget()
	x.largestGrants()
	x.halfOpen()
}

// send makes one request and returns the status and the body, which is loot.
func (x *assault) send(token, method, path, body string) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(x.t.Context(), time.Minute)
	defer cancel()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, x.s.server+path, r)
	if err != nil {
		return 0, nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	x.take(b)
	return res.StatusCode, b, err
}

// refused makes a request that must be answered with a 4xx.
func (x *assault) refused(name, token, method, path, body string) {
	status, b, err := x.send(token, method, path, body)
	if err == nil && status/100 != 4 {
		err = fmt.Errorf("status %d, %.200q", status, b)
	}
	x.held("tenant", name, err)
}

var pathParameter = regexp.MustCompile(`\{([a-z_]+)\}`)

// operation is one of the contract, with an object's id in its path.
type contractOperation struct {
	id, method, path string
	kinds            []string // prefixes of the ids in its path
}

// contract lists the operations that need a key.
func (x *assault) contract() []contractOperation {
	doc, err := openapi3.NewLoader().LoadFromData(api.Specification())
	if err != nil {
		x.t.Fatal(err)
	}
	var list []contractOperation
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			if op.Security != nil && len(*op.Security) == 0 {
				continue
			}
			o := contractOperation{id: op.OperationID, method: method, path: path}
			for _, m := range pathParameter.FindAllStringSubmatch(path, -1) {
				for _, p := range slices.Concat(item.Parameters, op.Parameters) {
					if p.Value.Name == m[1] && p.Value.Schema.Value != nil {
						pattern := p.Value.Schema.Value.Pattern
						for _, all := range p.Value.Schema.Value.AllOf {
							pattern += all.Value.Pattern
						}
						kind, _, _ := strings.Cut(strings.TrimPrefix(pattern, "^"), "_")
						o.kinds = append(o.kinds, kind)
					}
				}
			}
			list = append(list, o)
		}
	}
	slices.SortFunc(list, func(a, b contractOperation) int { return strings.Compare(a.id, b.id) })
	return list
}

// foreign asks for Alice's objects with Mallory's key, in every operation that has an id in its path.
func (x *assault) foreign() {
	for _, o := range x.contract() {
		if len(o.kinds) == 0 || x.alice.ids[o.kinds[0]] == "" {
			continue
		}
		path := pathParameter.ReplaceAllStringFunc(o.path, func(p string) string { return "\x00" + p })
		for i := 0; strings.Contains(path, "\x00"); i++ {
			id := "none"
			if i < len(o.kinds) && x.alice.ids[o.kinds[i]] != "" {
				id = x.alice.ids[o.kinds[i]]
			}
			at := strings.Index(path, "\x00")
			path = path[:at] + id + path[at+1+strings.Index(path[at+1:], "}")+1:]
		}
		body := ""
		if o.method != http.MethodGet && o.method != http.MethodDelete {
			body = "{}"
		}
		x.refused(o.id+" of another tenant's object", x.token, o.method, path, body)
	}
	if ws, err := x.alice.client.Workspace(x.t.Context(), x.alice.ws); err != nil || ws.State != coppice.WorkspaceReady {
		x.held("tenant", "the other tenant's workspace is as it was", fmt.Errorf("%v, %w", ws.State, err))
	}
}

// weakKey tries everything that changes something with a key that may only look at workspaces.
func (x *assault) weakKey() {
	for _, o := range x.contract() {
		if o.method == http.MethodGet {
			continue
		}
		path := strings.ReplaceAll(o.path, "{workspace_id}", x.ws)
		path = pathParameter.ReplaceAllString(path, "none")
		x.refused(o.id+" with a key that may only look", x.weak, o.method, path, "{}")
	}
}

func (x *assault) badKeys() {
	id, _, _ := strings.Cut(strings.TrimPrefix(x.s.token, "cpk_"), "_")
	for name, token := range map[string]string{
		"no key": "", "half a key": x.token[:len(x.token)/2], "a longer key": x.token + "0", "another secret": x.token[:len(x.token)-8] + "00000000",
		"the administrator's id with Mallory's secret": "cpk_" + id + x.token[strings.LastIndex(x.token, "_"):], "an enormous key": strings.Repeat("k", 60_000),
	} {
		x.refused(name, token, "GET", "/v1/projects", "")
	}
	_, b, err := x.send(x.token, "GET", "/v1/projects", "")
	if err == nil && bytes.Contains(b, []byte(x.alice.ids["prj"])) {
		err = errors.New("the other tenant's is among them")
	}
	x.held("tenant", "a list of projects", err)
	x.refused("a runner's token with a tenant's key", x.token, "POST", "/v1/runners/tokens", "{}")
	x.refused("a key with more scopes than its maker's", x.token, "POST", "/v1/projects/"+x.project+"/keys", `{"name":"more","scopes":["admin"]}`)
}

// ports asks for addresses of the host that are no tenant's.
func (x *assault) ports() {
	_, apiPort, err := net.SplitHostPort(strings.TrimPrefix(x.s.server, "http://"))
	if err != nil {
		x.t.Fatal(err)
	}
	for _, listen := range []string{
		"0.0.0.0:25", "[::]:22", "127.0.0.1:1", "127.0.0.1:80", "127.0.0.1:443", "127.0.0.1:1023", "[::1]:" + apiPort, "0.0.0.0:" + apiPort, "127.0.0.1:" + apiPort, "0.0.0.0:0", "[::]:0",
		"169.254.169.254:8080", "localhost:8080", "127.0.0.1:70000", "unix:/tmp/x", "[::ffff:127.0.0.1]:80", "0:8080",
	} {
		x.refused("a port at "+listen, x.token, "POST", "/v1/workspaces/"+x.ws+"/ports", fmt.Sprintf(`{"guest_port":80,"listen":%q}`, listen))
	}
	const most = 300
	opened := 0
	for opened < most {
		if _, err := x.mallory.CreatePort(x.t.Context(), x.ws, coppice.CreatePortRequest{GuestPort: 9000 + opened}); err != nil {
			break
		}
		opened++
	}
	var err2 error
	if opened == most {
		err2 = fmt.Errorf("%d ports were opened and none was refused", opened)
	}
	x.held("tenant", "ports without end", err2)
	list, err := x.mallory.Ports(x.t.Context(), x.ws)
	if err != nil {
		x.t.Fatal(err)
	}
	for _, p := range list {
		if err := x.mallory.DeletePort(x.t.Context(), x.ws, p.ID); err != nil {
			x.t.Error(err)
		}
	}
}

// bodies are JSON that is too deep, too long, not what it says, or names what there is not.
func (x *assault) bodies() {
	long := strings.Repeat("x", 100_000)
	for name, body := range map[string]string{
		"a deep array": strings.Repeat("[", 200_000), "a deep object": strings.Repeat(`{"a":`, 100_000), "an unknown field": `{"vmm_config":{}}`,
		"a long name": `{"name":"` + long + `"}`, "a name of NULs": `{"name":"\u0000"}`, "an image that is a path": `{"image":"../../etc/passwd"}`, "half a string": `{"name":"`,
		"numbers that overflow": `{"resources":{"vcpus":1e308,"memory_mib":99999999999999999999}}`, "more memory than there is": `{"resources":{"memory_mib":1073741824}}`,
		"labels without end": `{"labels":{` + strings.TrimSuffix(strings.Repeat(`"a":"b",`, 100_000), ",") + `}}`, "a rule that is a URL": `{"network":{"allow":["http://x/"]}}`,
		"rules without end": `{"network":{"allow":[` + strings.TrimSuffix(strings.Repeat(`"a.example.com",`, 50_000), ",") + `]}}`, "a TTL before now": `{"ttl_seconds":-5}`,
		"an environment without end": `{"env":{"A":"` + strings.Repeat("x", 900_000) + `"}}`,
	} {
		x.refused("a workspace from "+name, x.token, "POST", "/v1/workspaces", body)
	}
	for name, query := range map[string]string{
		"a cursor that is none": "cursor=" + strings.Repeat("A", 3000), "a limit that overflows": "limit=99999999999999999999", "a label that is a quote": "label=" + url.QueryEscape("'; DROP TABLE workspaces; --"),
	} {
		x.refused(name, x.token, "GET", "/v1/workspaces?"+query, "")
	}
	status, b, err := x.send(x.token, "POST", "/v1/workspaces", `{"name":"`+strings.Repeat("x", 3<<20)+`"}`)
	if err == nil && status/100 != 4 {
		err = fmt.Errorf("status %d, %.100q", status, b)
	}
	if errors.Is(err, io.EOF) || err != nil && strings.Contains(err.Error(), "reset") { // it need not read it all
		err = nil
	}
	x.held("tenant", "a body of 3 MiB", err)
}

// retarget points a grant whose secret is kept elsewhere.
func (x *assault) retarget() {
	ctx := x.t.Context()
	base := coppice.PutGrantRequest{AllowedHosts: []string{malloryHost}, Mode: "base_url", Secret: x.secret, Env: "TWO", Methods: []string{"GET"}, Paths: []string{"/a"}}
	if _, err := x.mallory.PutGrant(ctx, x.ws, "kept", base); err != nil {
		x.t.Fatal(err)
	}
	for name, change := range map[string]func(*coppice.PutGrantRequest){
		"another host":   func(r *coppice.PutGrantRequest) { r.AllowedHosts = []string{echoHost} },
		"one host more":  func(r *coppice.PutGrantRequest) { r.AllowedHosts = append(r.AllowedHosts, echoHost) },
		"another port":   func(r *coppice.PutGrantRequest) { r.AllowedHosts = []string{malloryHost + ":8443"} },
		"another header": func(r *coppice.PutGrantRequest) { r.Header = "X-Echo" },
		"another mode":   func(r *coppice.PutGrantRequest) { r.Mode = "header" },
		"any method":     func(r *coppice.PutGrantRequest) { r.Methods = nil },
		"any path":       func(r *coppice.PutGrantRequest) { r.Paths = nil },
	} {
		r := base
		r.AllowedHosts = slices.Clone(base.AllowedHosts)
		r.Secret = ""
		change(&r)
		_, err := x.mallory.PutGrant(ctx, x.ws, "kept", r)
		var e *coppice.Error
		switch {
		case err == nil:
			err = errors.New("it was taken without the secret")
		case errors.As(err, &e) && e.Status/100 == 4:
			err = nil
		}
		x.held("tenant", "a kept secret for "+name, err)
	}
	if err := x.mallory.RevokeGrant(ctx, x.ws, "kept"); err != nil {
		x.t.Fatal(err)
	}
}

// largestGrants puts secrets of the largest size, then takes a host away: it must be gone, however large the rest is.
func (x *assault) largestGrants() {
	ctx := x.t.Context()
	for i := range 6 {
		_, err := x.mallory.PutGrant(ctx, x.ws, fmt.Sprint("large-", i), coppice.PutGrantRequest{
			AllowedHosts: []string{malloryHost}, Mode: "base_url", Secret: strings.Repeat("\u00e9", 8<<10), Env: fmt.Sprint("LARGE", i),
		})
		var e *coppice.Error
		if errors.As(err, &e) && e.Status/100 == 4 {
			err = nil
		}
		x.held("tenant", fmt.Sprint("a large grant, number ", i), err)
	}
	allow := []string{malloryHost, echoHost, "*.points.example.com"}
	took := x.deny(echoHost, []string{malloryHost, "*.points.example.com"})
	var err error
	if took > 30*time.Second {
		err = fmt.Errorf("a host was reached for %s after it was taken away", took)
	}
	x.held("tenant", "a host that is taken away beside large grants", err)
	for i := range 6 {
		if err := x.mallory.RevokeGrant(ctx, x.ws, fmt.Sprint("large-", i)); err != nil {
			var e *coppice.Error
			if !errors.As(err, &e) || e.Status != http.StatusNotFound {
				x.t.Error(err)
			}
		}
	}
	if _, err := x.mallory.PatchWorkspace(ctx, x.ws, coppice.PatchWorkspaceRequest{Network: &coppice.NetworkPatch{Allow: &allow}}); err != nil {
		x.t.Fatal(err)
	}
}

// deny takes a host away and returns how long it was still reached.
func (x *assault) deny(host string, allow []string) time.Duration {
	if got := x.sh("curl -sS -m 20 http://" + host + "/before 2>&1"); !strings.Contains(got, "/before") {
		x.t.Errorf("%s is not reached before it is taken away: %q", host, got)
	}
	began := time.Now()
	if _, err := x.mallory.PatchWorkspace(x.t.Context(), x.ws, coppice.PatchWorkspaceRequest{Network: &coppice.NetworkPatch{Allow: &allow}}); err != nil {
		x.t.Errorf("take %s away: %v", host, err)
	}
	for time.Since(began) < time.Minute {
		if got := x.sh("curl -sS -m 20 http://" + host + "/after 2>&1"); !strings.Contains(got, "GET "+host) {
			break
		}
	}
	return time.Since(began)
}

// halfOpen holds connections to the API that never finish a request, while Alice works.
func (x *assault) halfOpen() {
	const n = 4000
	addr := strings.TrimPrefix(x.s.server, "http://")
	var list []net.Conn
	defer func() {
		for _, c := range list {
			_ = c.Close()
		}
	}()
	for i := range n {
		c, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(x.t.Context(), "tcp", addr)
		if err != nil {
			break
		}
		list = append(list, c)
		if i%2 == 0 {
			_, _ = io.WriteString(c, "POST /v1/workspaces HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n")
		}
	}
	x.alice.await(3) // beside them
	began := time.Now()
	status, b, err := x.send(x.token, "GET", "/v1/workspaces", "")
	switch took := time.Since(began); {
	case err != nil:
	case status != http.StatusOK:
		err = fmt.Errorf("status %d, %.100q", status, b)
	case took > 5*time.Second:
		err = fmt.Errorf("a request took %s beside %d half-open connections", took, len(list))
	}
	x.held("tenant", fmt.Sprint(n, " half-open connections to the API"), err)
	if bytes.Contains(b, []byte(x.alice.ws)) {
		x.held("tenant", "a list of workspaces", errors.New("it has the other tenant's"))
	}
}
