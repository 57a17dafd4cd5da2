package confine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/coppice-dev/coppice/core"
)

// A message is a frame: its kind, its length in four bytes, its content.
const (
	frameReady   = 'r' // from the helper: it can be confined now
	frameHeader  = 'h' // to the helper
	frameRequest = 'q' // to the helper
	frameAnswer  = 'a' // from the helper, JSON
	frameDone    = 'd' // from the helper: the task succeeded
	frameFailed  = 'f' // from the helper: the task failed
)

const frameHead = 5

// maxFailure bounds the encoding of a helper's failure, in bytes.
const maxFailure = 8 << 10

// header tells the helper about itself. It comes before the request.
type header struct {
	Task     string `json:"task"`
	Limits   Limits `json:"limits"`
	UID      uint32 `json:"uid"`
	Files    int    `json:"files"`
	Dir      bool   `json:"dir"`
	Confined bool   `json:"confined"` // it must be in an empty root and run as UID
	Bare     bool   `json:"bare"`     // its root is not empty; see emptyRoot
	Chroot   bool   `json:"chroot"`   // it enters its root itself; see stageRoot
}

// failure is the encoding of a task's error.
type failure struct {
	Code    core.Code `json:"code"`
	Message string    `json:"message"`
}

var errFrameLength = errors.New("a message is too long")

func kindError(kind byte) error {
	return fmt.Errorf("it sent an unexpected message of the kind %q", kind)
}

// readFrame reads one message of at most limit bytes. Failures have a bound of their own.
func readFrame(r io.Reader, limit int) (kind byte, content []byte, err error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	kind = head[0]
	switch kind {
	case frameFailed:
		limit = maxFailure
	case frameReady, frameDone:
		limit = 0
	}
	n := binary.LittleEndian.Uint32(head[1:])
	if int64(n) > int64(limit) {
		return kind, nil, errFrameLength
	}
	content = make([]byte, n)
	if _, err := io.ReadFull(r, content); err != nil {
		return kind, nil, errors.Join(io.ErrUnexpectedEOF, err)
	}
	return kind, content, nil
}

func writeFrame(w io.Writer, kind byte, content []byte) error {
	b := make([]byte, frameHead, frameHead+len(content))
	b[0] = kind
	binary.LittleEndian.PutUint32(b[1:], uint32(len(content))) //nolint:gosec // G115: the callers bound the content
	_, err := w.Write(append(b, content...))
	return err
}
