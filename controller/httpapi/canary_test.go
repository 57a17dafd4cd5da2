package httpapi_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
)

// keep holds all that was logged.
type keep struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (k *keep) Write(p []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.b.Write(p)
}

func (k *keep) text() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.b.String()
}

// forms are how a secret may be written. Base64 has three, by where the secret begins.
func forms(secret string) []string {
	list := []string{secret, hex.EncodeToString([]byte(secret)), fmt.Sprintf("%X", secret), url.QueryEscape(secret), url.PathEscape(secret)}
	for i := range 3 {
		for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			text := e.EncodeToString([]byte(strings.Repeat("x", i) + secret))
			list = append(list, text[4:len(text)-4])
		}
	}
	return list
}

// TestCanaries sends secrets by every route, in every place where a client may put one but the path. None is in a log, at any level, in an
// error's body, a header, a metric or the audit log.
func TestCanaries(t *testing.T) {
	t.Parallel()
	logs, registry := &keep{}, prometheus.NewRegistry()
	w := newWorldWith(t, logs, registry)
	ws := w.create("main")
	doc, err := openapi3.NewLoader().LoadFromData(api.Specification())
	if err != nil {
		t.Fatal(err)
	}
	secrets := map[string]string{}
	canary := func(where string) string {
		if secrets[where] == "" {
			secrets[where] = "sk+canary/" + where + "/" + strings.Repeat(where[:1], 20) + "=="
		}
		return secrets[where]
	}
	param := regexp.MustCompile(`\{[a-z_]+\}`)
	var answers strings.Builder
	send := func(method, path, body string, header map[string]string) {
		req, err := http.NewRequestWithContext(t.Context(), method, w.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range header {
			req.Header.Set(k, v)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatalf("%s %s: %v", method, path, err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&answers, "%s %s: %d %v %s\n", method, param.ReplaceAllString(strings.SplitN(path, "?", 2)[0], ""), res.StatusCode, res.Header, b)
	}
	routes := 0
	for path, item := range doc.Paths.Map() {
		for method := range item.Operations() {
			if strings.HasSuffix(path, "/events") || method == http.MethodDelete && !strings.Contains(path, "session") {
				continue // the one goes on for ever; the others would take away what is asked about
			}
			routes++
			real := param.ReplaceAllStringFunc(path, func(p string) string {
				if p == "{workspace_id}" {
					return ws.ID
				}
				return string(core.NewID[core.SessionID]())
			})
			send(method, real, "", map[string]string{"Authorization": "Bearer " + canary("bearer")})
			send(method, real, "", map[string]string{"Authorization": "Basic " + canary("basic")})
			right := map[string]string{
				"Authorization": "Bearer " + apiKey, "Content-Type": "application/json", "Cookie": "session=" + canary("cookie"), "X-Api-Key": canary("header"),
				"Proxy-Authorization": canary("proxy"), "User-Agent": canary("useragent"), "Referer": "http://x/?" + canary("referer"),
			}
			send(method, real+"?token="+url.QueryEscape(canary("query")), "", right)
			send(method, real, `{"secret":"`+canary("secret")+`","token":"`+canary("token")+`","env":{"A":"`+canary("env")+`"},"command":["true"],"name":7}`, right)
			send(method, real, `{"env":{"A":"`+canary("malformed"), right)
			send(method, param.ReplaceAllString(path, url.PathEscape(canary("path"))), "", map[string]string{"Authorization": "Bearer " + apiKey})
		}
	}
	send(http.MethodPost, "/v1/workspaces/"+ws.ID+"/exec", `{"command":["true"],"env":{"A":"`+canary("env")+`"},"stdin":"`+base64.StdEncoding.EncodeToString([]byte(canary("stdin")))+`"}`,
		map[string]string{"Authorization": "Bearer " + apiKey, "Content-Type": "application/json"})
	send(http.MethodPost, "/v1/workspaces/"+ws.ID+"/exec", `{"command":["`+canary("command")+`"]}`, map[string]string{"Authorization": "Bearer " + apiKey, "Content-Type": "application/json"})
	send(http.MethodGet, "/v1/audit", "", map[string]string{"Authorization": "Bearer " + apiKey})
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var metrics strings.Builder
	for _, f := range families {
		metrics.WriteString(f.String())
	}
	if routes < 40 || len(secrets) < 14 || !strings.Contains(logs.text(), ws.ID) || !strings.Contains(metrics.String(), "/v1/workspaces") || !strings.Contains(answers.String(), "UNAUTHENTICATED") {
		t.Fatalf("%d routes, %d secrets, %d bytes of logs, %d of metrics: the sweep sees little", routes, len(secrets), len(logs.text()), metrics.Len())
	}
	for where, secret := range secrets {
		for _, form := range forms(secret) {
			for what, text := range map[string]string{"the log": logs.text(), "a metric": metrics.String(), "an answer": answers.String()} {
				i := strings.Index(text, form)
				if i < 0 || where == "path" && what != "a metric" || where == "command" && what == "an answer" {
					continue // paths are for names: they are logged and told back, clipped. A client's own command is told back to it
				}
				t.Errorf("%s has the secret of %s: %.200q", what, where, text[max(0, i-100):min(len(text), i+100)])
				break
			}
		}
	}
}
