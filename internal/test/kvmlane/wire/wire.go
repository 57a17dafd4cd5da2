// Package wire is the protocol between the lane's host and its first-level machine over a
// virtio-serial port: one JSON value per line. Either side may be cut off in the middle of a line
// and come back, so a line that is not JSON is skipped.
package wire

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
)

// Port is the name of the virtio-serial port.
const Port = "coppice.lane"

// Request asks for one thing. IDs are the host's, never used twice.
type Request struct {
	ID uint64 `json:"id"`

	// Hello begins a connection: what an earlier one has left running ends.
	Hello bool `json:"hello,omitempty"`
	// Run starts a program as root.
	Run *Run `json:"run,omitempty"`
	// Put writes a piece of a file.
	Put *Put `json:"put,omitempty"`
	// Kill ends the program that this request's ID started, with all its descendants that are in its process group.
	Kill bool `json:"kill,omitempty"`
}

// Run is a program to run.
type Run struct {
	Command []string `json:"command"`
	Env     []string `json:"env,omitempty"` // added to the machine's own
	Dir     string   `json:"dir,omitempty"`
}

// Put is a piece of a file. The first has the offset 0 and empties the file.
type Put struct {
	Path   string `json:"path"`
	Mode   uint32 `json:"mode"`
	Offset int64  `json:"offset"`
	Data   []byte `json:"data"`
}

// Reply belongs to the request with its ID. A request is over with the reply that has Exit or Error.
type Reply struct {
	ID     uint64 `json:"id"`
	Stdout []byte `json:"stdout,omitempty"`
	Stderr []byte `json:"stderr,omitempty"`
	// Exit is the exit status; that of a program which a signal ended is 128 and the signal's number.
	Exit  *int   `json:"exit,omitempty"`
	Error string `json:"error,omitempty"`
}

// MaxData is how many bytes one Put or one reply carries at most.
const MaxData = 128 << 10

// maxLine bounds a line: the data as base64 and what is around it.
const maxLine = MaxData*4/3 + 64<<10

// Write writes one value.
func Write(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

// Read calls f with every value until the stream ends, which is no error. What is no T is passed over.
func Read[T any](r io.Reader, f func(T) error) error {
	lines := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := lines.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			continue // the rest of an endless line is no value either
		}
		var v T
		if err == nil && json.Unmarshal(line, &v) == nil {
			if err := f(v); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
	}
}
