package confine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/confine/internal/mode"
)

// Limits bound a helper. All except FileBytes must be positive.
type Limits struct {
	Memory    int64         // bytes of memory that it may write
	CPU       time.Duration // of all its threads; whole seconds
	Time      time.Duration // from its start to its end
	FileBytes int64         // size of a file that it writes; 0: it writes no files
	Frame     int           // bytes of one answer
	Answers   int           // answers
	Bytes     int64         // bytes of all answers
}

// Spec describes a helper: its task, request, files and limits.
type Spec struct {
	Task    string // the name of a task that Enter was given
	Limits  Limits
	Request any        // sent as JSON
	Files   []*os.File // still belong to the caller; must be open only for reading
	// Dir is a directory that the helper sees as TreeDir, mounted without devices, set-user-id bits and programs. With
	// Caps, the helper may change it. Empty: it sees no files at all.
	Dir  string
	Caps []uint8 // capabilities that it keeps, unix.CAP_…; nil: none
}

// TreeDir is the path of Spec.Dir for the helper.
const TreeDir = "/tree"

// The bounds of every helper.
const (
	maxRequest = 1 << 20  // bytes
	maxFiles   = 16       // descriptors that it gets
	maxHelpers = 16       // helpers of one process at the same time; others wait
	maxSaid    = 16 << 10 // bytes of its standard error that are kept
	maxStderr  = 1 << 20  // bytes of its standard error that it may write
	maxThreads = 64
	maxOpen    = 64 // descriptors
)

// Limit names a limit of a helper.
type Limit string

// The limits.
const (
	LimitMemory  Limit = "memory"
	LimitCPU     Limit = "CPU time"
	LimitTime    Limit = "time"
	LimitFile    Limit = "file size"
	LimitAnswer  Limit = "answer"
	LimitOutput  Limit = "diagnostic output"
	LimitThreads Limit = "threads"
	LimitSyscall Limit = "system calls"
)

// LimitError says that a helper hit a limit and was ended.
type LimitError struct {
	Task  string
	Limit Limit
	Bound string // such as "512 MiB"
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("the confined helper for %s hit its limit of %s (%s) and was ended", e.Task, e.Limit, e.Bound)
}

// CrashError says that a helper ended abnormally: with a panic, a signal, or an invalid answer.
type CrashError struct {
	Task string
	How  string
	Said string // the end of its output; for the log, not for a tenant
}

func (e *CrashError) Error() string {
	if e.Said == "" {
		return fmt.Sprintf("the confined helper for %s ended early: %s", e.Task, e.How)
	}
	return fmt.Sprintf("the confined helper for %s ended early: %s; it said: %q", e.Task, e.How, e.Said)
}

// KilledError says that a helper was killed from outside, and not for what it did. It is retryable: when the host or
// the control group runs short of memory, the kernel kills helpers first.
type KilledError struct{ Task string }

func (e *KilledError) Error() string {
	return fmt.Sprintf("the confined helper for %s was killed from outside, as the kernel does when the host is short of memory; try again, and give the host more memory if this repeats", e.Task)
}

// Unwrap gives the error a code.
func (e *KilledError) Unwrap() error {
	return core.Errorf(core.Exhausted, core.CodeCapacity, "%s", e.Error())
}

// TaskError is the error that a task returned. Code and Message come from the helper, so the caller must not trust
// them: it must compare the code with the codes that it knows.
type TaskError struct {
	Code    core.Code
	Message string // printable, clipped
}

func (e *TaskError) Error() string { return e.Message }

// IsLimit reports whether err says that a helper hit this limit.
func IsLimit(err error, limit Limit) bool {
	e, ok := errors.AsType[*LimitError](err)
	return ok && e.Limit == limit
}

// entered says that Enter was called: this program can start itself as a helper.
var entered atomic.Bool

// slots are the free user ids for helpers.
var slots = func() chan uint32 {
	c := make(chan uint32, maxHelpers)
	for i := range uint32(maxHelpers) {
		c <- i
	}
	return c
}()

// Helpers run as users with ids above those of VMs (see daemon.firstUID). Each process of this host that starts helpers
// has its own ids, and each running helper has one of them: the kernel counts threads by user id.
const firstUID = 768_000_000

func uidOf(slot uint32) uint32 { return firstUID + uint32(os.Getpid())&0x3fffff*maxHelpers + slot } //nolint:gosec // G115: masked

// Run starts a helper, sends it the request and calls each with every answer, in order. It returns when the helper has
// ended and nothing of it is left. An error of each ends the helper and is returned. When ctx ends, the helper is
// killed and the context's cause is returned.
func Run(ctx context.Context, spec Spec, each func(answer json.RawMessage) error) error {
	request, err := check(spec)
	if err != nil {
		return err
	}
	select {
	case slot := <-slots:
		defer func() { slots <- slot }()
		return run(ctx, spec, request, uidOf(slot), each)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// check refuses a helper that cannot be confined, and returns the request as JSON.
func check(s Spec) ([]byte, error) {
	if !entered.Load() {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "this program starts a confined helper for %s but did not call confine.Enter first", s.Task)
	}
	if os.Geteuid() != 0 && !mode.WithoutRoot.Load() {
		return nil, core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "a confined helper for %s needs root, for its namespaces; run this program as root", s.Task)
	}
	l := s.Limits
	if l.Memory <= 0 || l.CPU < time.Second || l.Time <= 0 || l.FileBytes < 0 || l.Frame <= 0 || l.Answers <= 0 || l.Bytes <= 0 {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the confined helper for %s has no bound: %+v", s.Task, l)
	}
	if len(s.Files) > maxFiles {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the confined helper for %s was given %d files, the bound is %d", s.Task, len(s.Files), maxFiles)
	}
	for _, f := range s.Files {
		flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
		if err != nil {
			return nil, fmt.Errorf("give a file to a confined helper: %w", err)
		}
		if flags&unix.O_ACCMODE != unix.O_RDONLY {
			return nil, core.Errorf(core.Internal, core.CodeInternal, "the confined helper for %s was given a file that is open for writing", s.Task)
		}
	}
	request, err := json.Marshal(s.Request)
	if err != nil {
		return nil, err
	}
	if len(request) > maxRequest {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the request to the confined helper for %s has %d bytes, the bound is %d", s.Task, len(request), maxRequest)
	}
	return request, nil
}

// reply is the result of a helper.
type reply struct {
	done   bool       // the task succeeded
	failed *TaskError // the task failed
}

func run(ctx context.Context, spec Spec, request []byte, uid uint32, each func(json.RawMessage) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, spec.Limits.Time, &LimitError{spec.Task, LimitTime, spec.Limits.Time.String()})
	defer cancel()
	p, err := start(spec, uid)
	if err != nil {
		return fmt.Errorf("start a confined helper for %s: %w", spec.Task, err)
	}
	defer p.close()
	stop := context.AfterFunc(ctx, func() { p.kill(context.Cause(ctx)) })
	defer stop()
	said := make(chan string, 1)
	go func() { said <- p.listen() }()
	got, err := p.converse(spec, request, each)
	stayed := false // the helper closed its output and did not end
	if isEnded(err) {
		stayed = !p.endsWithin(endTime)
	}
	if err != nil {
		p.kill(err)
	}
	<-p.ended
	text := <-said
	switch why := p.killed(); {
	case err == nil && got.done && p.state.Success():
		return nil
	case err == nil && got.failed != nil:
		return got.failed
	case why != nil && !isEnded(why):
		return why
	case why != nil:
		err = why
	default:
		err = errors.New(p.state.String())
	}
	if verdict := p.verdict(spec, text, stayed); verdict != nil {
		return verdict
	}
	return &CrashError{spec.Task, err.Error() + ", " + p.state.String(), text}
}

// endTime is the time that a helper has to end after it has closed its output. When the kernel kills a process, it
// closes the output before it reports how the process ended.
const endTime = 2 * time.Second

// endsWithin waits, for a limited time, until the helper ends by itself, and reports whether it did.
func (p *process) endsWithin(limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.ended:
		return true
	case <-timer.C:
		return false
	}
}

func isEnded(err error) bool {
	_, ok := errors.AsType[*endedError](err)
	return ok
}

// endedError says that a helper closed its output before its last message. How it ended says why.
type endedError struct{ cause error }

func (e *endedError) Error() string { return "its answer ended early: " + e.cause.Error() }

// converse waits until the helper is ready, confines it, sends the request and reads the answers.
func (p *process) converse(spec Spec, request []byte, each func(json.RawMessage) error) (reply, error) {
	kind, _, err := readFrame(p.stdout, 0)
	if err != nil || kind != frameReady {
		return reply{}, &endedError{fmt.Errorf("it is not ready: %w", errors.Join(err, kindError(kind)))}
	}
	if err := p.confine(); err != nil {
		err = fmt.Errorf("confine the helper for %s: %w", spec.Task, err)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) { // errors of /proc for a process that has ended
			return reply{}, &endedError{err}
		}
		return reply{}, err
	}
	head, err := json.Marshal(header{Task: spec.Task, Limits: spec.Limits, UID: p.uid, Files: len(spec.Files), Dir: spec.Dir != "", Confined: p.confined, Bare: p.bare, Chroot: p.chroot})
	if err != nil {
		return reply{}, err
	}
	if err := errors.Join(writeFrame(p.stdin, frameHeader, head), writeFrame(p.stdin, frameRequest, request)); err != nil {
		return reply{}, &endedError{err}
	}
	tooMuch := func(what string, bound any) error {
		return &LimitError{spec.Task, LimitAnswer, fmt.Sprintf("%v %s", bound, what)}
	}
	var total int64
	for n := 0; ; n++ {
		kind, b, err := readFrame(p.stdout, spec.Limits.Frame)
		total += int64(len(b))
		switch {
		case errors.Is(err, errFrameLength):
			return reply{}, tooMuch("bytes of one answer", spec.Limits.Frame)
		case err != nil:
			return reply{}, &endedError{err}
		case kind == frameDone:
			return reply{done: true}, nil
		case kind == frameFailed:
			return reply{failed: taskError(b)}, nil
		case kind != frameAnswer:
			return reply{}, &CrashError{Task: spec.Task, How: kindError(kind).Error()}
		case n >= spec.Limits.Answers:
			return reply{}, tooMuch("answers", spec.Limits.Answers)
		case total > spec.Limits.Bytes:
			return reply{}, tooMuch("bytes of answers", spec.Limits.Bytes)
		}
		if err := each(b); err != nil {
			return reply{}, err
		}
	}
}

// taskError decodes a helper's failure.
func taskError(b []byte) *TaskError {
	var f failure
	if err := json.Unmarshal(b, &f); err != nil {
		return &TaskError{core.CodeInternal, "it failed and did not say why"}
	}
	plain := func(r rune) bool { return r >= 'A' && r <= 'Z' || r == '_' }
	if len(f.Code) > 64 || strings.TrimFunc(string(f.Code), plain) != "" {
		f.Code = core.CodeInternal
	}
	return &TaskError{f.Code, printable(f.Message)}
}

// maxMessage bounds the message of a TaskError, in bytes.
const maxMessage = 1000

// printable returns the beginning of a text from a helper, without characters that would control a terminal.
func printable(s string) string {
	s = strings.ToValidUTF8(s[:min(len(s), maxMessage)], "?")
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// verdict returns the limit that ended the helper; nil if no known limit did. If a helper stayed, Run killed it.
func (p *process) verdict(spec Spec, said string, stayed bool) error {
	hit := func(l Limit, bound any) error { return &LimitError{spec.Task, l, fmt.Sprint(bound)} }
	memory := fmt.Sprintf("%d MiB", spec.Limits.Memory>>20)
	if p.state == nil {
		return nil
	}
	if sig := signalOf(p.state); sig >= 0 {
		switch {
		case sig == unix.SIGKILL && p.state.UserTime()+p.state.SystemTime() > spec.Limits.CPU-200*time.Millisecond, sig == unix.SIGXCPU:
			return hit(LimitCPU, spec.Limits.CPU)
		case sig == unix.SIGKILL && p.confined && !stayed: // PID 1 of a process namespace cannot kill itself
			return &KilledError{spec.Task}
		case sig == unix.SIGSYS:
			return hit(LimitSyscall, "those of its filter")
		case sig == unix.SIGXFSZ:
			return hit(LimitFile, fmt.Sprintf("%d bytes", spec.Limits.FileBytes))
		}
		return nil
	}
	has := func(s string) bool { return strings.Contains(said, s) }
	switch {
	case p.state.ExitCode() != exitGoFatal: // not a fatal error of the Go runtime
		return nil
	case has("failed to create new OS thread") && has("errno=11"), has("pthread_create failed: Resource temporarily unavailable"):
		return hit(LimitThreads, maxThreads)
	case has("out of memory"), has("annot allocate memory"), has("errno=12"), p.usedMuch(spec.Limits.Memory):
		return hit(LimitMemory, memory)
	}
	return nil
}

// usedMuch reports whether the helper used at least half of its memory limit. When the kernel refuses memory, the Go
// runtime may fail in many ways, for example with a segmentation violation in the collector.
func (p *process) usedMuch(limit int64) bool {
	usage, ok := p.state.SysUsage().(*syscall.Rusage)
	return ok && usage.Maxrss<<10 >= limit/2
}

// exitGoFatal is the exit status of a Go program after a panic or a fatal error.
const exitGoFatal = 2

// listen returns the beginning of the helper's standard error. Too much output ends the helper.
func (p *process) listen() string {
	kept := make([]byte, maxSaid)
	n, err := io.ReadFull(p.stderr, kept)
	if err == nil {
		more, _ := io.CopyN(io.Discard, p.stderr, maxStderr) // the pipe ends with the helper
		if more == maxStderr {
			p.kill(&LimitError{p.task, LimitOutput, fmt.Sprintf("%d KiB", maxStderr>>10)})
			_, _ = io.Copy(io.Discard, p.stderr) // until the helper is gone
		}
	}
	return strings.ToValidUTF8(strings.TrimSpace(string(kept[:n])), "\uFFFD")
}
