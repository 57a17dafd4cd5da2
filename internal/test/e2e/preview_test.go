package e2e

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestPreviews has browsers reach a server in a real guest by the name of its preview. The link of a fork leads to the fork, whose server
// goes on from the same state, and the link of its parent does not.
func TestPreviews(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	shell(t, s, ws, "mkdir -p /srv/www && echo parent > /srv/www/who")
	launch(t, s, ws, "python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", "/srv/www", "8000")
	p, err := s.client.CreatePort(t.Context(), ws, coppice.CreatePortRequest{GuestPort: 8000, Visibility: coppice.VisibilitySigned})
	if err != nil {
		t.Fatal(err)
	}
	v := visitorOf(t, p.URL)
	v.await(t, p.URL, "parent\n")
	base, token, _ := strings.Cut(p.URL, "?")
	const absent = "The sandbox was not found"
	v.want(t, "without a token", base, http.StatusBadGateway, absent)
	v.want(t, "another port", strings.Replace(p.URL, "//8000-", "//8001-", 1), http.StatusBadGateway, absent)

	f, err := s.client.ForkWorkspace(t.Context(), ws, coppice.ForkWorkspaceRequest{})
	if err != nil {
		t.Fatal(err)
	}
	child := f.Children[0]
	endWithTest(t, s, child.Workspace.ID)
	if len(child.Previews) != 1 {
		t.Fatalf("the fork has the previews %+v", child.Previews)
	}
	shell(t, s, child.Workspace.ID, "echo child > /srv/www/who")
	own := child.Previews[0].URL
	theirs, _, _ := strings.Cut(own, "?")
	v.want(t, "the fork's link", own, http.StatusOK, "child\n")
	v.want(t, "the parent's token at the fork", theirs+"?"+token, http.StatusBadGateway, absent)
	v.want(t, "the parent's link", p.URL, http.StatusOK, "parent\n")

	if err := s.client.DeletePort(t.Context(), ws, p.ID); err != nil {
		t.Fatal(err)
	}
	v.want(t, "after its end", p.URL, http.StatusBadGateway, absent)
}

// visitor is a client for which every name leads to the router of a stack.
type visitor struct{ *http.Client }

// visitorOf makes a client for URLs of the same port.
func visitorOf(t *testing.T, preview string) visitor {
	t.Helper()
	u, err := url.Parse(preview)
	if err != nil || u.Port() == "" {
		t.Fatalf("%q, %v", preview, err)
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", u.Port()))
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return visitor{&http.Client{Transport: transport, Timeout: time.Minute}}
}

// get asks for the file "who" of a preview.
func (v visitor) get(t *testing.T, preview string) (int, string) {
	t.Helper()
	res, err := v.Get(strings.Replace(preview, "/?", "/who?", 1))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

func (v visitor) want(t *testing.T, what, preview string, status int, body string) {
	t.Helper()
	if got, text := v.get(t, preview); got != status || !strings.Contains(text, body) {
		t.Errorf("%s: %d %q, want %d %q", what, got, text, status, body)
	}
}

// await waits until the server in the guest listens.
func (v visitor) await(t *testing.T, preview, body string) {
	t.Helper()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for begun := time.Now(); ; <-again.C {
		status, text := v.get(t, preview)
		if status == http.StatusOK && text == body {
			return
		}
		if time.Since(begun) > 2*time.Minute {
			t.Fatalf("%d %q", status, text)
		}
	}
}
