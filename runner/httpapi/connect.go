package httpapi

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// connect joins the connection of a request to a port of a guest. After the answer it carries bytes in both directions.
// There is no half-close: the end of one direction ends both.
func (s *server) connect(w http.ResponseWriter, q *http.Request) {
	port, err := strconv.ParseUint(q.PathValue("port"), 10, 16)
	if err != nil || port == 0 || q.Header.Get("Upgrade") != runnerapi.UpgradeTCP {
		s.reply(w, nil, core.Errorf(core.Invalid, core.CodeInvalidField, "a connection to a port needs its number and Upgrade: %s", runnerapi.UpgradeTCP))
		return
	}
	inside, err := s.runner.ConnectPort(q.Context(), sandboxID(q), int(port))
	if err != nil {
		s.reply(w, nil, err)
		return
	}
	defer func() { _ = inside.Close() }()
	outside, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		s.reply(w, nil, core.Wrapf(err, core.Internal, core.CodeInternal, "the connection cannot be taken over"))
		return
	}
	defer func() { _ = outside.Close() }()
	if err := outside.SetDeadline(time.Time{}); err != nil { // of the server's header
		return
	}
	if _, err := io.WriteString(outside, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+runnerapi.UpgradeTCP+"\r\n\r\n"); err != nil {
		return // the controller is gone
	}
	join(q.Context(), outside, io.MultiReader(io.LimitReader(buffered, int64(buffered.Reader.Buffered())), outside), inside)
}

// join copies in both directions until one of them has ended, and then closes both connections.
func join(ctx context.Context, outside net.Conn, from io.Reader, inside net.Conn) {
	end := func() { _ = errors.Join(inside.Close(), outside.Close()) }
	cut := context.AfterFunc(ctx, end) // the server is closing
	defer cut()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer end()
		_, _ = io.Copy(inside, from)
	})
	wg.Go(func() {
		defer end()
		_, _ = io.Copy(outside, inside)
	})
	wg.Wait()
}
