package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// events is the event monitor: what it cannot write at once is lost.
type events struct {
	start  time.Time
	silent bool

	mu sync.Mutex // guards f
	f  *os.File   // nil where nobody listens
}

type timestamp struct {
	Secs  int64 `json:"secs"`
	Nanos int64 `json:"nanos"`
}

type event struct {
	Timestamp  timestamp         `json:"timestamp"`
	Source     string            `json:"source"`
	Event      string            `json:"event"`
	Properties map[string]string `json:"properties"`
}

func openEvents(o options) (*events, error) {
	e := &events{start: time.Now(), silent: o.faults.is("events-silent")}
	if o.events == "" {
		return e, nil
	}
	if fd, ok := strings.CutPrefix(o.events, "fd="); ok {
		n, err := strconv.Atoi(fd)
		if err != nil {
			return nil, wrap("Error parsing --event-monitor", err)
		}
		e.f = os.NewFile(uintptr(n), "events")
	} else if path, ok := strings.CutPrefix(o.events, "path="); ok {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return nil, wrap("Error doing event monitor I/O", err)
		}
		e.f = f
	} else {
		return nil, chain{"`--event-monitor` without parameters is invalid"}
	}
	if err := unix.SetNonblock(int(e.f.Fd()), true); err != nil {
		return nil, wrap("Error doing event monitor I/O", err)
	}
	return e, nil
}

func (e *events) emit(source, name string, properties map[string]string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.f == nil || e.silent {
		return
	}
	since := time.Since(e.start)
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if enc.Encode(event{timestamp{int64(since / time.Second), int64(since % time.Second)}, source, name, properties}) != nil {
		return
	}
	b.WriteByte('\n') // Encode has written one
	for rest := b.Bytes(); len(rest) > 0; {
		n, err := unix.Write(int(e.f.Fd()), rest)
		if err != nil {
			return
		}
		rest = rest[n:]
	}
}
