package main

import (
	"encoding/json"
	"time"

	"golang.org/x/sys/unix"
)

// events is the event monitor: what it cannot write at once is lost.
type events struct {
	fd     int
	silent bool
	start  time.Time
}

type timestamp struct {
	Secs  int64 `json:"secs"`
	Nanos int64 `json:"nanos"`
}

type event struct {
	Timestamp  timestamp         `json:"timestamp"`
	Source     string            `json:"source"`
	Event      string            `json:"event"`
	Properties map[string]string `json:"properties"` // of no event that the driver looks at
}

func openEvents(fd int, f faults) (*events, error) {
	e := &events{fd: fd, silent: f.is("events-silent"), start: time.Now()}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, wrap("Error doing event monitor I/O", err)
	}
	return e, nil
}

// emit writes an event. It is called in the turn of the vmm.
func (e *events) emit(source, name string) {
	if e.silent {
		return
	}
	since := time.Since(e.start)
	b, err := json.MarshalIndent(event{timestamp{int64(since / time.Second), int64(since % time.Second)}, source, name, nil}, "", "  ")
	if err != nil {
		panic(err) // of our own types
	}
	for rest := append(b, "\n\n"...); len(rest) > 0; {
		n, err := unix.Write(e.fd, rest)
		if err != nil {
			return
		}
		rest = rest[n:]
	}
}
