package httpapi

import (
	"net"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/internal/pass"
	"github.com/coppice-dev/coppice/runner/writelog"
)

// wakePause is the least time between two reports that writes ask for.
const wakePause = time.Second

// note keeps a write for the audit log, right before the guest sees anything of it. When too many wait for a controller, or the
// record cannot be kept, the write is refused: none happens without its record. What fills up is reported before the next
// heartbeat is due.
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
	own, all, err := d.writes.Append(runnerapi.DataWrite{
		RequestID: w.Header().Get(headerRequest), SandboxID: c.Sandbox, KeyID: c.Key, Source: source, Delete: q.Method == http.MethodDelete, Path: path, At: time.Now().UTC(),
	})
	d.mu.Lock()
	now := time.Now()
	hurry := (own > writelog.KeyWrites/4 || all > runnerapi.MaxDataWrites/4) && now.Sub(d.woke) >= wakePause
	if hurry {
		d.woke = now
	}
	d.mu.Unlock()
	if hurry {
		d.wake()
	}
	return err
}

func isWrite(q *http.Request) bool {
	return q.Method == http.MethodPut || q.Method == http.MethodDelete
}

// Writes returns the writes that no controller is known to have recorded, and the log that their numbers count in.
func (d *Data) Writes() (log string, list []runnerapi.DataWrite) { return d.writes.Pending() }

// Recorded forgets them up to a number.
func (d *Data) Recorded(number int64) error { return d.writes.Recorded(number) }
