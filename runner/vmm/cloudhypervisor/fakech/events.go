package main

import (
	"encoding/json"

	"golang.org/x/sys/unix"
)

// events is the event monitor: what it cannot write at once is lost.
type events struct {
	fd     int
	silent bool
}

type event struct {
	Source     string            `json:"source"`
	Event      string            `json:"event"`
	Properties map[string]string `json:"properties"`
}

func newEvents(fd int, f faults) (*events, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, wrap("Error doing event monitor I/O", err)
	}
	return &events{fd: fd, silent: f.is("events-silent")}, nil
}

// emit writes an event over several lines, and an empty line after it.
func (e *events) emit(source, name string) {
	if e.silent {
		return
	}
	b, err := json.MarshalIndent(event{source, name, nil}, "", "  ")
	if err == nil {
		_, _ = unix.Write(e.fd, append(b, "\n\n"...)) // nobody may listen
	}
}
