package daemon_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestSlowClients holds thousands of connections half open, each with part of a request's head or body. Who asks properly is answered as fast as
// before, and the controller lives.
func TestSlowClients(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const slow, asked = 3000, 200
	parts := []string{
		"", "GET /v1/work", "GET /v1/workspaces HTTP/1.1\r\nHost: x\r\nX-A: ", "GET /v1/self HTTP/1.1\r\nHost: x\r\n",
		"POST /v1/workspaces HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
	}
	p99 := func() time.Duration {
		took := make([]time.Duration, 0, asked)
		for range asked {
			began := time.Now()
			if _, err := c.client.Self(t.Context()); err != nil {
				t.Fatal(err)
			}
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		t.Logf("p50 %s, p99 %s", took[asked/2], took[asked*99/100])
		return took[asked*99/100]
	}
	bound := 2*time.Second + 20*p99() // one request takes some milliseconds, and on a machine that is busy with others a second
	for i := range slow {
		conn, err := net.Dial("tcp", c.cfg.Listen)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if _, err := io.WriteString(conn, parts[i%len(parts)]); err != nil {
			t.Fatal(err)
		}
	}
	if got := p99(); got > bound {
		t.Errorf("with %d half-open connections, one in a hundred requests takes %s, more than %s", slow, got, bound)
	}
}

// TestFloods sends heads and bodies that are too large, too many or too deep: each is refused, and the next request is answered.
func TestFloods(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	head := func(headers string) int {
		conn, err := net.Dial("tcp", c.cfg.Listen)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(watchdog))
		go func() { _, _ = io.WriteString(conn, "GET /v1/self HTTP/1.1\r\nHost: x\r\n"+headers+"\r\n") }() // the server may answer and close first
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return 0 // it hung up
		}
		_ = res.Body.Close()
		return res.StatusCode
	}
	var many strings.Builder
	for i := range 200_000 {
		_, _ = fmt.Fprintf(&many, "X-%d: y\r\n", i)
	}
	for name, headers := range map[string]string{"one long header": "X-A: " + strings.Repeat("y", 4<<20) + "\r\n", "many headers": many.String()} {
		if status := head(headers); status != 0 && status != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("%s: %d", name, status)
		}
	}
	deep := strings.Repeat(`{"labels":`, 10_000) + "1" + strings.Repeat("}", 10_000)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.ready.Server+"/v1/workspaces", strings.NewReader(deep))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	made, err := c.client.CreateKey(t.Context(), project(t, c), coppice.CreateKeyRequest{Name: "flood"})
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+made.Secret)
	transport := &http.Transport{DisableKeepAlives: true}
	res, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusBadRequest {
		t.Errorf("JSON of depth 10,000: %s", res.Status)
	}
	if _, err := c.client.Self(t.Context()); err != nil {
		t.Error(err)
	}
}

func project(t *testing.T, c *cluster) coppice.ProjectID {
	t.Helper()
	self, err := c.client.Self(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return self.ProjectID
}
