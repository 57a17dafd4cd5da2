package runnertest

import (
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// ListenIn has a port of a guest lead to an address of this host: the fake has no machines. An empty address closes the port.
func (r *Runner) ListenIn(id core.SandboxID, port int, address string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.listening == nil {
		r.listening = map[core.SandboxID]map[int]string{}
	}
	if r.listening[id] == nil {
		r.listening[id] = map[int]string{}
	}
	r.listening[id][port] = address
}

// connect joins a request to a port of a guest, until either end closes the connection or the sandbox ends.
func (r *Runner) connect(w http.ResponseWriter, q *http.Request) {
	s, err := r.living(sandboxID(q))
	if err == nil {
		err = r.pass(q.Context(), PointConnect, string(sandboxID(q)))
	}
	if err != nil {
		reply(w, nil, err)
		return
	}
	port, _ := strconv.Atoi(q.PathValue("port"))
	r.mu.Lock()
	address := r.listening[s.ID][port]
	r.mu.Unlock()
	inside, err := new(net.Dialer).DialContext(q.Context(), "tcp", address)
	if err != nil || address == "" {
		reply(w, nil, core.Errorf(core.Unavailable, core.CodePortClosed, "no program in the sandbox listens on port %d", port))
		return
	}
	outside, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		_ = inside.Close()
		return
	}
	end := func() { _, _ = inside.Close(), outside.Close() }
	r.mu.Lock()
	s.streams = append(s.streams, end)
	r.mu.Unlock()
	_, _ = io.WriteString(outside, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+runnerapi.UpgradeTCP+"\r\n\r\n")
	var wg sync.WaitGroup
	wg.Go(func() {
		defer end()
		_, _ = io.Copy(inside, outside)
	})
	wg.Go(func() {
		defer end()
		_, _ = io.Copy(outside, inside)
	})
	wg.Wait()
}
