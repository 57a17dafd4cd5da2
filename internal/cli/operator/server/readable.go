package server

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// readable writes a log for people, one short line for each record. A request is "POST /v1/workspaces 201 in 850 ms"; its id is there if it failed.
type readable struct {
	to     *output
	level  slog.Level
	before string // attributes of every record, as text
}

// output is shared by all loggers that come from one.
type output struct {
	mu sync.Mutex // guards w
	w  io.Writer
}

func newReadable(w io.Writer, level slog.Level) slog.Handler {
	return &readable{to: &output{w: w}, level: level}
}

// Enabled implements slog.Handler.
func (h *readable) Enabled(_ context.Context, level slog.Level) bool { return level >= h.level }

// WithAttrs implements slog.Handler.
func (h *readable) WithAttrs(attrs []slog.Attr) slog.Handler {
	next := *h
	for _, a := range attrs {
		next.before += attribute(a)
	}
	return &next
}

// WithGroup implements slog.Handler. Nothing here uses groups.
func (h *readable) WithGroup(string) slog.Handler { return h }

// Handle implements slog.Handler.
func (h *readable) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	b.WriteString(r.Time.Format(time.TimeOnly))
	if r.Level != slog.LevelInfo {
		fmt.Fprintf(&b, " %s", r.Level)
	}
	if line, ok := requestLine(r); ok {
		fmt.Fprintf(&b, "  %s", line)
	} else {
		fmt.Fprintf(&b, "  %s", plain(r.Message))
		rest := h.before
		r.Attrs(func(a slog.Attr) bool {
			rest += attribute(a)
			return true
		})
		b.WriteString(rest)
	}
	b.WriteByte('\n')
	h.to.mu.Lock()
	defer h.to.mu.Unlock()
	_, err := io.WriteString(h.to.w, b.String())
	return err
}

// requestLine is the line of a request that was answered.
func requestLine(r slog.Record) (string, bool) {
	said := map[string]slog.Value{}
	r.Attrs(func(a slog.Attr) bool {
		said[a.Key] = a.Value
		return true
	})
	status := said["status"]
	if r.Message != "request" || status.Kind() != slog.KindInt64 {
		return "", false
	}
	line := fmt.Sprintf("%s %s %d", plain(said["method"].String()), plain(core.Clip(said["path"].String())), status.Int64())
	if took := said["duration_ms"]; took.Kind() == slog.KindFloat64 {
		line += fmt.Sprintf(" in %s", time.Duration(took.Float64()*float64(time.Millisecond)).Round(time.Millisecond))
	}
	if status.Int64() >= 400 {
		line += attribute(slog.Any("request_id", said["request_id"]))
	}
	return line, true
}

func attribute(a slog.Attr) string {
	if a.Key == "component" {
		return ""
	}
	return "  " + a.Key + "=" + plain(a.Value.Resolve().String())
}

// plain quotes what a terminal would obey, and what would not look like one word.
func plain(s string) string {
	if quoted := strconv.Quote(s); quoted != `"`+s+`"` {
		return quoted
	}
	return s
}
