package core

import (
	"crypto/rand"
	"encoding/base32"
	"encoding/binary"
	"strings"
	"time"
)

// The typed ids of the system. Each is a prefix, an underscore and 26 characters of lower-case Crockford
// base32: 48 bits of milliseconds since 1970, so that rows of one table sort roughly by age, then 80 random
// bits, so that nobody guesses one.
type (
	// ProjectID names a tenant (prefix "prj").
	ProjectID string
	// WorkspaceID names the durable thing a user works in (prefix "ws").
	WorkspaceID string
	// SandboxID names one running VM instance of a workspace on a runner (prefix "sbx").
	SandboxID string
	// CheckpointID names an immutable node of the DAG (prefix "ckpt").
	CheckpointID string
	// OperationID names a durable, resumable unit of work (prefix "op").
	OperationID string
	// SessionID names one exec session inside a sandbox (prefix "sess").
	SessionID string
	// RunnerID names a host's agent (prefix "rnr").
	RunnerID string
	// BaseID names one immutable memory image on a runner (prefix "base").
	BaseID string
	// PortID names one forwarded port (prefix "port").
	PortID string
	// KeyID names an API key (prefix "key").
	KeyID string
	// ImageID names a built guest image in the controller (prefix "img").
	ImageID string
	// GrantID names a grant as it was given to a workspace (prefix "grant").
	GrantID string
	// WatchID names a watch on a directory inside a sandbox (prefix "watch").
	WatchID string
	// SecretID names a value that is kept encrypted (prefix "sec").
	SecretID string
)

// SystemProject owns everything that the operator publishes to all projects: templates, images, runners.
const SystemProject ProjectID = "prj_00000000000000000000000000"

// ID is any of the typed ids.
type ID interface {
	~string
	prefix() string
}

func (ProjectID) prefix() string    { return "prj" }
func (WorkspaceID) prefix() string  { return "ws" }
func (SandboxID) prefix() string    { return "sbx" }
func (CheckpointID) prefix() string { return "ckpt" }
func (OperationID) prefix() string  { return "op" }
func (SessionID) prefix() string    { return "sess" }
func (RunnerID) prefix() string     { return "rnr" }
func (BaseID) prefix() string       { return "base" }
func (PortID) prefix() string       { return "port" }
func (WatchID) prefix() string      { return "watch" }
func (KeyID) prefix() string        { return "key" }
func (ImageID) prefix() string      { return "img" }
func (GrantID) prefix() string      { return "grant" }
func (SecretID) prefix() string     { return "sec" }

const idBodyLen = 26

var idEncoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

// NewID returns a fresh id of the wanted type.
func NewID[T ID]() T {
	var b [16]byte
	_, _ = rand.Read(b[6:]) // never fails: crypto/rand ends the program instead
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(time.Now().UnixMilli()))
	copy(b[:6], ms[2:])
	var zero T
	return T(zero.prefix() + "_" + idEncoding.EncodeToString(b[:]))
}

// NewIDOfAge returns a new id that sorts as if it had been made in the same millisecond as old.
func NewIDOfAge[T ID](old T) (T, error) {
	old, err := ParseID[T](string(old))
	if err != nil {
		return "", err
	}
	var b [16]byte
	raw, err := idEncoding.DecodeString(string(old[len(old)-idBodyLen:]))
	if err != nil {
		return "", err
	}
	copy(b[:6], raw)
	_, _ = rand.Read(b[6:]) // never fails: crypto/rand ends the program instead
	return old[:len(old)-idBodyLen] + T(idEncoding.EncodeToString(b[:])), nil
}

// ParseID checks the form of an id that came from outside. It does not say that the object exists.
func ParseID[T ID](s string) (T, error) {
	var zero T
	body, ok := strings.CutPrefix(s, zero.prefix()+"_")
	if !ok || len(body) != idBodyLen {
		return zero, Errorf(Invalid, CodeInvalidID, "%q is not an id of the form %s_<26 characters>", Clip(s), zero.prefix())
	}
	if raw, err := idEncoding.DecodeString(body); err != nil || idEncoding.EncodeToString(raw) != body {
		return zero, Errorf(Invalid, CodeInvalidID, "%q is not an id of the form %s_<26 characters>", Clip(s), zero.prefix())
	}
	return T(s), nil
}

// Short returns the id's last eight characters, which are random: enough to tell siblings apart in a terminal.
func Short[T ID](id T) string {
	if len(id) <= 8 {
		return string(id)
	}
	return string(id[len(id)-8:])
}

// Clip bounds foreign text that is shown back to its sender or written to a log: at most 120 bytes of
// printable ASCII, the rest replaced.
func Clip(s string) string {
	const limit = 120
	var b strings.Builder
	for i := 0; i < len(s) && b.Len() < limit; i++ {
		if c := s[i]; c >= 0x20 && c < 0x7f {
			b.WriteByte(c)
		} else {
			b.WriteByte('?')
		}
	}
	if len(s) > limit {
		b.WriteString("...")
	}
	return b.String()
}

// ClipExit bounds what a runner says of the end of a virtual machine, and makes it printable. It keeps the first line and the end of the
// rest.
func ClipExit(s string) string {
	const limit = 6000
	reason, output, found := strings.Cut(s, "\n")
	if !found || len(s) <= limit {
		return clipTail(s, limit)
	}
	reason = clipTail(reason[:min(len(reason), limit/4)], limit)
	return reason + "\n" + clipTail(output, limit-len(reason))
}

// ClipTail bounds the output of a VMM and a console, and makes it printable. It keeps the end, which is the important part.
func ClipTail(s string) string { return clipTail(s, 2000) }

func clipTail(s string, limit int) string {
	b := []byte(s[max(0, len(s)-limit):])
	for i, ch := range b {
		if ch != '\n' && (ch < 0x20 || ch > 0x7e) {
			b[i] = '?'
		}
	}
	return string(b)
}
