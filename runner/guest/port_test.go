package guest

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// TestDialPort connects through agents of every kind: one that connects, one where nobody listens, an old one, and some that break the
// protocol.
func TestDialPort(t *testing.T) {
	t.Parallel()
	hijack := func(w http.ResponseWriter, answer string) (io.WriteCloser, *bufio.Reader) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return nil, nil
		}
		_, _ = io.WriteString(conn, answer)
		return conn, rw.Reader
	}
	const upgraded = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + guestapi.UpgradeTCP + "\r\n\r\n"
	c := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		switch strings.TrimSuffix(strings.TrimPrefix(r.URL.Path, "/v1/ports/"), "/connect") {
		case "1":
			conn, from := hijack(w, upgraded+"first ")
			b, _ := io.ReadAll(from)
			_, _ = io.WriteString(conn, strings.ToUpper(string(b)))
			_ = conn.Close()
		case "2":
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `{"category":"unavailable","code":"PORT_CLOSED","message":"nobody listens"}`)
		case "3":
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"category":"not_found","code":"ROUTE_NOT_FOUND","message":"no such route"}`)
		case "4":
			conn, _ := hijack(w, "HTTP/1.1 101 x\r\nLong: "+strings.Repeat("x", 1<<20))
			_ = conn.Close()
		case "5":
			_, _ = io.WriteString(w, "not an upgrade")
		default:
			<-r.Context().Done() // silent
		}
	})
	conn, err := c.DialPort(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); err != nil || string(b) != "first HELLO" {
		t.Errorf("%q, %v", b, err)
	}
	for port, code := range map[int]core.Code{2: core.CodePortClosed, 3: core.CodeRouteNotFound, 4: core.CodeGuestUnreachable, 5: core.CodeGuestProtocol} {
		if _, err := c.DialPort(t.Context(), port); core.CodeOf(err) != code {
			t.Errorf("port %d: %v, want %s", port, err, code)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.DialPort(ctx, 6); core.CodeOf(err) != core.CodeGuestUnreachable {
		t.Errorf("a dial that was given up: %v", err)
	}
}
