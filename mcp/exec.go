package mcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// killPause is how long the end of a cancelled program may take.
const killPause = 10 * time.Second

type execIn struct {
	workspaceRef
	Command        []string          `json:"command,omitempty" jsonschema:"program and arguments; no shell is involved. Give either command or shell" items:"1,4096"`
	Shell          string            `json:"shell,omitempty" jsonschema:"a text for sh -c. Give either command or shell"`
	Cwd            string            `json:"cwd,omitempty" jsonschema:"directory to run in; the default is the image's WORKDIR, else /workspace if it exists, else the home directory" length:"1,4096"`
	Env            map[string]string `json:"env,omitempty" jsonschema:"environment variables"`
	User           string            `json:"user,omitempty" jsonschema:"name or uid; the default is the image's USER, else root" length:"1,128"`
	Stdin          string            `json:"stdin,omitempty" jsonschema:"text that the program reads"`
	Background     bool              `json:"background,omitempty" jsonschema:"return at once; read the output with exec_output"`
	WaitSeconds    int               `json:"wait_seconds,omitempty" jsonschema:"how long to wait for the end; after that the program goes on, and exec_output reads on" range:"1,600" default:"45"`
	TimeoutSeconds int               `json:"timeout_seconds,omitempty" jsonschema:"kill the program after this time; never if absent" range:"0,604800"`
	MaxBytes       int               `json:"max_bytes,omitempty" jsonschema:"how much of each stream to return" range:"1,65536" default:"16384"`
}

type execOutputIn struct {
	Session     string `json:"session" jsonschema:"id of a session, as exec returned it" length:"1,64"`
	Stream      string `json:"stream,omitempty" jsonschema:"which output" enum:"stdout|stderr" default:"\"stdout\""`
	Offset      int64  `json:"offset,omitempty" jsonschema:"position of the first byte to read" range:"0,9007199254740991"`
	MaxBytes    int    `json:"max_bytes,omitempty" jsonschema:"how much to return" range:"1,65536" default:"16384"`
	WaitSeconds int    `json:"wait_seconds,omitempty" jsonschema:"if there is nothing at the offset yet, wait this long for output or the end" range:"0,600"`
}

type execKillIn struct {
	Session string `json:"session" jsonschema:"id of a session, as exec returned it" length:"1,64"`
	Signal  string `json:"signal,omitempty" jsonschema:"send only this signal, such as SIGINT, to the foreground processes. If absent, every process of the session is killed, and its output is forgotten" length:"1,32"`
}

// streamView is a piece of a session's output.
type streamView struct {
	guestBytes
	Offset     int64 `json:"offset" jsonschema:"position of the first byte"`
	NextOffset int64 `json:"next_offset" jsonschema:"position after the last byte: the offset for exec_output to read on"`
	TotalBytes int64 `json:"total_bytes" jsonschema:"how much the program has written so far"`
	LostBytes  int64 `json:"lost_bytes,omitempty" jsonschema:"how many bytes before offset are no longer kept"`
}

// sessionView is a session in an answer.
type sessionView struct {
	Session   string      `json:"session"`
	Workspace string      `json:"workspace"`
	State     string      `json:"state" jsonschema:"running or exited"`
	ExitCode  *int        `json:"exit_code,omitempty" jsonschema:"128 + signal if a signal ended it"`
	Signal    string      `json:"signal,omitempty"`
	TimedOut  bool        `json:"timed_out,omitempty" jsonschema:"timeout_seconds was over"`
	Stdout    *streamView `json:"stdout,omitempty"`
	Stderr    *streamView `json:"stderr,omitempty"`
}

func viewSession(s coppice.Session) sessionView {
	return sessionView{Session: s.ID, Workspace: s.WorkspaceID, State: string(s.State), ExitCode: s.ExitCode, Signal: visible(clip(s.Signal, 32)), TimedOut: s.TimedOut}
}

func (v sessionView) line() string {
	s := "session " + v.Session + " in " + v.Workspace
	switch {
	case v.State != string(coppice.SessionExited):
		return s + " is running; exec_output reads its output, exec_kill ends it"
	case v.TimedOut:
		return s + " was killed after its timeout"
	case v.Signal != "":
		return s + " was ended by " + v.Signal
	case v.ExitCode != nil:
		return fmt.Sprintf("%s ended with exit code %d", s, *v.ExitCode)
	}
	return s + " ended"
}

func (r *registry) addExecTools() {
	add(r, tool{
		name: "exec", title: "Run a program", kind: destroys, open: true,
		about: "Run a program in a workspace and return its exit code and the end of its output. With background, or if it takes longer than wait_seconds, the program goes on and exec_output reads what it writes.",
	}, r.exec)
	add(r, tool{
		name: "exec_output", title: "Read a program's output", kind: reads,
		about: "Read the output of a session from an offset on. With wait_seconds it waits for new output or for the end of the program. The last MiB of each stream is kept.",
	}, r.execOutput)
	add(r, tool{
		name: "exec_kill", title: "Kill a program", kind: destroys, idempotent: true,
		about: "Kill a session, or send a signal to it.",
	}, r.execKill)
}

func (r *registry) exec(ctx context.Context, in execIn) (sessionView, string, error) {
	if (len(in.Command) == 0) == (in.Shell == "") {
		return sessionView{}, "", invalid("give either command or shell")
	}
	command := in.Command
	if in.Shell != "" {
		command = []string{"sh", "-c", in.Shell}
	}
	id, err := r.workspaceID(ctx, in.Workspace)
	if err != nil {
		return sessionView{}, "", err
	}
	s, err := r.client.StartSession(ctx, id, coppice.ExecRequest{
		Command: command, Cwd: in.Cwd, Env: in.Env, User: in.User, Stdin: in.Stdin, TimeoutMS: int64(in.TimeoutSeconds) * 1000,
	})
	if err != nil {
		return sessionView{}, "", err
	}
	if in.Background {
		v := viewSession(s)
		return v, v.line(), nil
	}
	if s, err = r.wait(ctx, s, time.Duration(in.WaitSeconds)*time.Second); err != nil {
		return sessionView{}, "", err
	}
	v := viewSession(s)
	if v.Stdout, err = r.tail(ctx, s, coppice.Stdout, s.StdoutBytes, in.MaxBytes); err != nil {
		return v, "", err
	}
	if v.Stderr, err = r.tail(ctx, s, coppice.Stderr, s.StderrBytes, in.MaxBytes); err != nil {
		return v, "", err
	}
	return v, v.line() + "\n" + v.Stdout.text(s.ID, coppice.Stdout) + v.Stderr.text(s.ID, coppice.Stderr), nil
}

// wait waits for the end of a session, but not longer than it may. If the client cancels the call,
// the program is killed: the client does not know its session.
func (r *registry) wait(ctx context.Context, s coppice.Session, patience time.Duration) (coppice.Session, error) {
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ended, err := r.client.WaitSession(waiting, s.ID)
	if err == nil {
		return ended, nil
	}
	if ctx.Err() != nil {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), killPause)
		defer cancel()
		return s, errors.Join(ctx.Err(), r.client.DeleteSession(last, s.ID))
	}
	if waiting.Err() != nil {
		return r.client.Session(ctx, s.ID)
	}
	return s, err
}

// tail reads the end of a stream.
func (r *registry) tail(ctx context.Context, s coppice.Session, stream string, total int64, limit int) (*streamView, error) {
	return r.read(ctx, s, stream, max(total-int64(limit), 0), limit, false)
}

// read reads a stream from an offset on. With follow it waits for the first byte, until ctx ends.
func (r *registry) read(ctx context.Context, s coppice.Session, stream string, offset int64, limit int, follow bool) (*streamView, error) {
	total := s.StdoutBytes
	if stream == coppice.Stderr {
		total = s.StderrBytes
	}
	if offset > total {
		return nil, invalid("%s has %d bytes so far; offset %d is after its end", stream, total, offset)
	}
	o, err := r.client.SessionOutput(ctx, s.ID, stream, offset, follow)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	var b []byte
	if follow {
		b = make([]byte, limit)
		n, err := o.Read(b)
		if b = b[:n]; err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
	} else if b, err = io.ReadAll(io.LimitReader(o, int64(limit))); err != nil {
		return nil, err
	}
	v := &streamView{LostBytes: o.Dropped, Offset: offset + o.Dropped}
	if end := v.Offset + int64(len(b)); end < total || s.State != coppice.SessionExited {
		b = wholeRunes(b)
	}
	v.guestBytes, v.NextOffset = newGuestBytes(b), v.Offset+int64(len(b))
	v.TotalBytes = max(total, v.NextOffset)
	return v, nil
}

// text is a piece of output for a model, with a note of what it leaves out.
func (v *streamView) text(session, stream string) string {
	var b strings.Builder
	if v.LostBytes > 0 {
		fmt.Fprintf(&b, "(%d earlier bytes of %s are no longer kept)\n", v.LostBytes, stream)
	}
	if v.NextOffset == v.Offset {
		fmt.Fprintf(&b, "%s: nothing from offset %d on\n", stream, v.Offset)
		return b.String()
	}
	fmt.Fprintf(&b, "%s, bytes %d to %d of %d:\n%s\n", stream, v.Offset, v.NextOffset, v.TotalBytes, quote(stream, v.string()))
	if v.Offset > 0 && v.LostBytes == 0 {
		fmt.Fprintf(&b, "Earlier output: exec_output with session %s, stream %s and a lower offset.\n", session, stream)
	}
	if v.NextOffset < v.TotalBytes {
		fmt.Fprintf(&b, "There is more: exec_output with session %s, stream %s and offset %d.\n", session, stream, v.NextOffset)
	}
	return b.String()
}

func (r *registry) execOutput(ctx context.Context, in execOutputIn) (sessionView, string, error) {
	s, err := r.client.Session(ctx, in.Session)
	if err != nil {
		return sessionView{}, "", err
	}
	total := s.StdoutBytes
	if in.Stream == coppice.Stderr {
		total = s.StderrBytes
	}
	if in.Offset == total && s.State != coppice.SessionExited && in.WaitSeconds > 0 {
		if s, err = r.await(ctx, s, in); err != nil {
			return sessionView{}, "", err
		}
	}
	piece, err := r.read(ctx, s, in.Stream, in.Offset, in.MaxBytes, false)
	if err != nil {
		return sessionView{}, "", err
	}
	v := viewSession(s)
	if v.Stdout = piece; in.Stream == coppice.Stderr {
		v.Stdout, v.Stderr = nil, piece
	}
	return v, v.line() + "\n" + piece.text(s.ID, in.Stream), nil
}

// await waits until there is something at an offset or the program has ended, and returns the session as it is then.
func (r *registry) await(ctx context.Context, s coppice.Session, in execOutputIn) (coppice.Session, error) {
	waiting, cancel := context.WithTimeout(ctx, time.Duration(in.WaitSeconds)*time.Second)
	defer cancel()
	if _, err := r.read(waiting, s, in.Stream, in.Offset, 1, true); err != nil && waiting.Err() == nil {
		return s, err
	}
	if err := ctx.Err(); err != nil {
		return s, err
	}
	return r.client.Session(ctx, s.ID)
}

type execKillOut struct {
	Session string `json:"session"`
	Done    string `json:"done" jsonschema:"killed or signalled"`
}

func (r *registry) execKill(ctx context.Context, in execKillIn) (execKillOut, string, error) {
	if in.Signal != "" {
		err := r.client.SignalSession(ctx, in.Session, in.Signal)
		return execKillOut{in.Session, "signalled"}, "sent " + in.Signal + " to session " + in.Session, err
	}
	err := r.client.DeleteSession(ctx, in.Session)
	return execKillOut{in.Session, "killed"}, "killed session " + in.Session, err
}
