package httpapi

import (
	"net"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pass"
)

// note keeps a write for the audit log, before the guest sees anything of it. When too many wait for a controller, the write is refused:
// none happens without its record.
func (d *Data) note(w http.ResponseWriter, q *http.Request, c pass.Claims) error {
	if q.Method != http.MethodPut && q.Method != http.MethodDelete {
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
	if len(d.writes) >= runnerapi.MaxDataWrites {
		return core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "%d writes wait for a controller to record them; try again, or write through the API", len(d.writes))
	}
	d.writes = append(d.writes, runnerapi.DataWrite{
		RequestID: w.Header().Get(headerRequest), SandboxID: c.Sandbox, KeyID: c.Key, Source: source, Delete: q.Method == http.MethodDelete, Path: path, At: time.Now().UTC(),
	})
	return nil
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
