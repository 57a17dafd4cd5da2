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
	frameReady   = 'r' // of the helper: it can be confined
	frameHeader  = 'h' // to the helper
	frameRequest = 'q' // to the helper
	frameAnswer  = 'a' // of the helper, JSON
	frameDone    = 'd' // of the helper: the task is done
	frameFailed  = 'f' // of the helper: the task failed
)

const frameHead = 5

// maxFailure bounds the encoding of a helper's failure, in bytes.
const maxFailure = 8 << 10

// header describes the helper to itself. It comes before the request.
type header struct {
	Task     string `json:"task"`
	Limits   Limits `json:"limits"`
	UID      uint32 `json:"uid"`
	Files    int    `json:"files"`
	Dir      bool   `json:"dir"`
	Confined bool   `json:"confined"` // it must find itself in an empty root, as UID
	Bare     bool   `json:"bare"`     // but the root is not empty; see emptyRoot
	Chroot   bool   `json:"chroot"`   // it enters its root itself; see stageRoot
}

// failure is how a helper tells an error.
type failure struct {
	Code    core.Code `json:"code"`
	Message string    `json:"message"`
}

var errFrameLength = errors.New("a message is too long")

func kindError(kind byte) error {
	return fmt.Errorf("it sent a message of the kind %q, which is not expected", kind)
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
	binary.LittleEndian.PutUint32(b[1:], uint32(len(content))) //nolint:gosec // G115: what is written here is bounded by its maker
	_, err := w.Write(append(b, content...))
	return err
}
