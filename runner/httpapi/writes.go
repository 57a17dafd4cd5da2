package httpapi

import (
	"net"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pass"
)

// keyWrites bounds the writes of one API key's passes that wait, so that no tenant takes the places of the others.
const keyWrites = 128

// wakePause is the least time between two reports that writes ask for.
const wakePause = time.Second

// note keeps a write for the audit log, right before the guest sees anything of it. When too many wait for a controller, the write is refused:
// none happens without its record. What fills up is reported before the next heartbeat is due.
func (d *Data) note(w http.ResponseWriter, q *http.Request, c pass.Claims) error {
	if !isWrite(q) {
		return nil
	}
	path := q.URL.Query().Get("path")
	if len(path) > runnerapi.MaxDataPath {
		path = path[:runnerapi.MaxDataPath]
	}
	source, _, err := net.SplitHostPort(q.RemoteAddr)
	if err != nil {
		source = ""
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	own := 0
	for _, other := range d.writes {
		if other.KeyID == c.Key {
			own++
		}
	}
	if now := time.Now(); (own >= keyWrites/4 || len(d.writes) >= runnerapi.MaxDataWrites/4) && now.Sub(d.woke) >= wakePause {
		d.woke = now
		d.wake()
	}
	switch {
	case len(d.writes) >= runnerapi.MaxDataWrites:
		return core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "%d writes wait for a controller to record them; try again, or write through the API", len(d.writes))
	case own >= keyWrites:
		return core.Errorf(core.Exhausted, core.CodeRateLimited,
			"%d writes with passes of this API key wait for a controller to record them, and no more may; try again in a second, write many files as one archive (untar), or write through the API", own)
	}
	d.writes = append(d.writes, runnerapi.DataWrite{
		RequestID: w.Header().Get(headerRequest), SandboxID: c.Sandbox, KeyID: c.Key, Source: source, Delete: q.Method == http.MethodDelete, Path: path, At: time.Now().UTC(),
	})
	return nil
}

func isWrite(q *http.Request) bool {
	return q.Method == http.MethodPut || q.Method == http.MethodDelete
}

// Writes returns the writes that no controller is known to have recorded.
func (d *Data) Writes() []runnerapi.DataWrite {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]runnerapi.DataWrite(nil), d.writes...)
}

// Recorded forgets the first n of them.
func (d *Data) Recorded(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writes = append([]runnerapi.DataWrite(nil), d.writes[min(n, len(d.writes)):]...)
}
