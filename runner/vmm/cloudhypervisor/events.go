package cloudhypervisor

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// event is a report of the VMM about itself: a JSON object over several lines, followed by an empty line.
type event struct {
	Source string `json:"source"`
	Event  string `json:"event"`
}

// events reads events. They come through a FIFO, so that a successor of the runner continues reading where this one
// ended.
type events struct{ read *os.File }

// maxEvent bounds one event.
const maxEvent = 64 << 10

func openEvents(path string) (*events, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	return &events{f}, nil
}

// follow calls happened with each event, until the VMM ends or close. It fails when an event is too long, because the
// events after it are then unknown.
func (e *events) follow(happened func(event)) error {
	lines := bufio.NewScanner(e.read)
	lines.Buffer(make([]byte, 0, 4096), maxEvent)
	lines.Split(splitEvents)
	for lines.Scan() {
		var one event
		if json.Unmarshal(lines.Bytes(), &one) == nil { // anything else is ignored
			happened(one)
		}
	}
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		return err
	}
	return nil
}

// splitEvents is a bufio.SplitFunc.
func splitEvents(b []byte, atEnd bool) (advance int, token []byte, err error) {
	if i := bytes.Index(b, []byte("\n\n")); i >= 0 {
		return i + 2, b[:i], nil
	}
	if atEnd && len(b) > 0 {
		return len(b), b, nil
	}
	return 0, nil, nil
}

func (e *events) close() { _ = e.read.Close() } // only read
