package httpapi_test

import (
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"testing"
)

// TestNoInterimAnswers has a guest, or the runner before it, send interim answers with headers of its own. The user sees none of them,
// and the headers that this server set before are still there.
func TestNoInterimAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("hints")
	w.put(ws.ID, "/note", "kept")
	w.runner.Interim(3, http.Header{"Set-Cookie": {"a=b"}, "Link": {"</evil>; rel=preload"}})
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		t.Errorf("the user got %d with %v", code, h)
		return nil
	}})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url+"/v1/workspaces/"+ws.ID+"/files?path=/note", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apiKey)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if b, err := io.ReadAll(res.Body); err != nil || string(b) != "kept" {
		t.Errorf("body %q, %v", b, err)
	}
	for _, name := range []string{"Ratelimit-Limit", "X-Request-Id"} {
		if res.Header.Get(name) == "" {
			t.Errorf("%s is gone: %v", name, res.Header)
		}
	}
	if res.Header.Get("Link")+res.Header.Get("Set-Cookie") != "" {
		t.Errorf("header %v", res.Header)
	}
}
