package e2b

import (
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// maxLogs bounds the entries of an answer, and is the number if the client gives none.
const maxLogs = 1000

// maxLogSearch bounds the text that entries are searched for, in bytes.
const maxLogSearch = 256

// logEntry is E2B's SandboxLogEntry.
type logEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields"`
}

// logLine is E2B's SandboxLog.
type logLine struct {
	Timestamp time.Time `json:"timestamp"`
	Line      string    `json:"line"`
}

// The levels of log entries, from the least.
var logLevels = []string{"debug", "info", "warn", "error"}

// logQuery says which entries of a log a client wants.
type logQuery struct {
	from, until time.Time // until is zero: no bound
	limit       int
	newestFirst bool
	level       string // the least; empty: all
	search      string // a part of the message
}

// logs answers with the structured log of a sandbox. It also answers for a sandbox that has ended.
func logs(w http.ResponseWriter, r *http.Request, c call) error {
	q, err := readLogQuery(r)
	if err != nil {
		return err
	}
	entries, err := readLogs(r, c, q)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]any{"logs": entries})
	return nil
}

// logsV1 answers with the same, oldest first, and as lines of text, too.
func logsV1(w http.ResponseWriter, r *http.Request, c call) error {
	q := logQuery{}
	var err1, err2 error
	q.from, err1 = milliseconds(rawQuery(r, "start"))
	q.limit, err2 = logLimit(rawQuery(r, "limit"))
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	entries, err := readLogs(r, c, q)
	if err != nil {
		return err
	}
	lines := make([]logLine, len(entries))
	for i, e := range entries {
		lines[i] = logLine{e.Timestamp, e.Message}
	}
	writeJSON(w, http.StatusOK, map[string]any{"logs": lines, "logEntries": entries})
	return nil
}

func readLogQuery(r *http.Request) (q logQuery, err error) {
	cursor, err1 := milliseconds(rawQuery(r, "cursor"))
	limit, err2 := logLimit(rawQuery(r, "limit"))
	if err := errors.Join(err1, err2); err != nil {
		return q, err
	}
	q = logQuery{limit: limit, level: rawQuery(r, "level"), search: rawQuery(r, "search")}
	switch direction := rawQuery(r, "direction"); direction {
	case "", "forward":
		q.from = cursor
	case "backward":
		q.newestFirst, q.until = true, cursor
	default:
		return q, shared.Failf(http.StatusBadRequest, "direction is %q; it is forward or backward", shared.Clip(direction))
	}
	switch {
	case q.level != "" && !slices.Contains(logLevels, q.level):
		return q, shared.Failf(http.StatusBadRequest, "level is %q; it is one of %s", shared.Clip(q.level), strings.Join(logLevels, ", "))
	case len(q.search) > maxLogSearch:
		return q, shared.Failf(http.StatusBadRequest, "search has %d bytes; at most %d are possible", len(q.search), maxLogSearch)
	}
	return q, nil
}

func milliseconds(text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return time.Time{}, shared.Failf(http.StatusBadRequest, "start and cursor are milliseconds since 1970")
	}
	return time.UnixMilli(n), nil
}

func logLimit(text string) (int, error) {
	if text == "" {
		return maxLogs, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return 0, shared.Failf(http.StatusBadRequest, "limit is %q; it is a number from 0 to %d", shared.Clip(text), maxLogs)
	}
	return min(n, maxLogs), nil
}

// readLogs makes the log of a sandbox from the events of its workspace. Coppice keeps no other log that has times.
func readLogs(r *http.Request, c call, q logQuery) ([]logEntry, error) {
	id, ok := workspaceID(c.sandbox)
	if !ok {
		if _, err := c.Self(r.Context()); err != nil {
			return nil, err
		}
		return nil, notFound(c.sandbox)
	}
	if _, err := c.Workspace(r.Context(), id); errors.Is(err, coppice.CodeWorkspaceNotFound) {
		return nil, notFound(c.sandbox)
	} else if err != nil {
		return nil, err
	}
	out := []logEntry{}
	for event, err := range c.Events(r.Context(), coppice.EventFilter{After: "0", WorkspaceID: id, Present: true}) {
		if err != nil {
			return nil, err
		}
		if entry := entryOf(event); q.wants(entry) {
			out = append(out, entry)
		}
		switch {
		case q.newestFirst && len(out) > 2*maxLogs:
			out = slices.Delete(out, 0, len(out)-q.limit)
		case !q.newestFirst && len(out) > q.limit:
			return out[:q.limit], nil
		}
	}
	if q.newestFirst {
		slices.Reverse(out)
		out = out[:min(len(out), q.limit)]
	}
	return out, nil
}

func (q logQuery) wants(e logEntry) bool {
	return !e.Timestamp.Before(q.from) && (q.until.IsZero() || !e.Timestamp.After(q.until)) &&
		slices.Index(logLevels, e.Level) >= slices.Index(logLevels, q.level) && strings.Contains(e.Message, q.search)
}

// entryOf writes an event as a log entry. Names and messages are those of users and of guests.
func entryOf(e coppice.Event) logEntry {
	object, state, _ := strings.Cut(e.Type, ".")
	out := logEntry{Timestamp: e.CreatedAt, Level: "info", Message: object + " " + state, Fields: map[string]string{"event": e.Type, "event_id": e.ID}}
	switch state {
	case "failed", "lost":
		out.Level = "error"
	case "stalled":
		out.Level = "warn"
	}
	for name, value := range map[string]string{
		"checkpoint_id": e.CheckpointID, "operation_id": e.OperationID,
		"from": e.Data.From, "name": e.Data.Name, "kind": e.Data.Kind, "code": e.Data.Code,
	} {
		if value != "" {
			out.Fields[name] = value
		}
	}
	if e.Data.Kind != "" {
		out.Message += ": " + e.Data.Kind
	}
	if e.Data.Message != "" {
		out.Message += ": " + e.Data.Message
	}
	return out
}
