package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestExec(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	binary := []byte{0, 1, 0xff, 0xfe, '\n', 0x80}
	for _, c := range []struct {
		name string
		req  coppice.ExecRequest
		want coppice.ExecResult // only what is compared below
	}{
		{
			"arguments are passed as they are",
			coppice.ExecRequest{Command: []string{"printf", "[%s]", "a b", "", "$HOME", "ü\t'"}},
			coppice.ExecResult{Stdout: "[a b][][$HOME][ü\t']"},
		},
		{
			"exit status",
			coppice.ExecRequest{Command: []string{"sh", "-c", "exit 37"}},
			coppice.ExecResult{ExitCode: 37},
		},
		{
			"stdout and stderr apart",
			coppice.ExecRequest{Command: []string{"sh", "-c", "echo out; echo err >&2; echo out again"}},
			coppice.ExecResult{Stdout: "out\nout again\n", Stderr: "err\n"},
		},
		{
			"working directory",
			coppice.ExecRequest{Command: []string{"pwd"}, Cwd: "/usr/share"},
			coppice.ExecResult{Stdout: "/usr/share\n"},
		},
		{
			"environment",
			coppice.ExecRequest{Command: []string{"sh", "-c", `echo "$GREETING-$HOME"`}, Env: coppice.Env{"GREETING": "hello = \"you\""}},
			coppice.ExecResult{Stdout: "hello = \"you\"-/root\n"},
		},
		{
			"standard input as text",
			coppice.ExecRequest{Command: []string{"cat"}, Stdin: "in\n"},
			coppice.ExecResult{Stdout: "in\n"},
		},
		{
			"standard input and output that are no text",
			coppice.ExecRequest{Command: []string{"cat"}, StdinBase64: binary},
			coppice.ExecResult{Stdout: string(binary)},
		},
		{
			"no standard input is an empty one",
			coppice.ExecRequest{Command: []string{"cat"}},
			coppice.ExecResult{},
		},
		{
			"another user",
			coppice.ExecRequest{Command: []string{"id", "-u"}, User: "nobody"},
			coppice.ExecResult{Stdout: "65534\n"},
		},
		{
			"a signal",
			coppice.ExecRequest{Command: []string{"sh", "-c", "kill -TERM $$"}},
			coppice.ExecResult{ExitCode: 128 + 15, Signal: "SIGTERM"},
		},
		{
			"a timeout ends what the program started, too",
			coppice.ExecRequest{Command: []string{"sh", "-c", "sleep 1000 & sleep 1000"}, TimeoutMS: 300},
			coppice.ExecResult{ExitCode: 128 + 9, Signal: "SIGKILL", TimedOut: true},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			res, err := s.client.Exec(t.Context(), ws, c.req)
			if err != nil {
				t.Fatal(err)
			}
			stdout, stderr, err := res.Output()
			if err != nil {
				t.Fatal(err)
			}
			got := coppice.ExecResult{Stdout: string(stdout), Stderr: string(stderr), ExitCode: res.ExitCode, Signal: res.Signal, TimedOut: res.TimedOut}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	for _, p := range processes(t, s, ws) {
		if p.Comm == "sleep" {
			t.Errorf("after the timeout %q still runs as %d", p.Cmdline, p.PID)
		}
	}
}

func processes(t *testing.T, s *stack, ws coppice.WorkspaceID) []coppice.Process {
	t.Helper()
	list, err := s.client.Processes(t.Context(), ws)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestExecOfNothing(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	for _, c := range []struct {
		req  coppice.ExecRequest
		says string
	}{
		{coppice.ExecRequest{Command: []string{"no-such-program"}}, "no-such-program"},
		{coppice.ExecRequest{Command: []string{"/etc/hostname"}}, "/etc/hostname"},
		{coppice.ExecRequest{Command: []string{"true"}, Cwd: "/absent"}, "/absent"},
		{coppice.ExecRequest{Command: []string{"true"}, User: "who-is-this"}, "who-is-this"},
	} {
		_, err := s.client.Exec(t.Context(), ws, c.req)
		var e *coppice.Error
		if !errors.As(err, &e) || e.Status < 400 || e.Status > 499 || !strings.Contains(e.Detail, c.says) {
			t.Errorf("%v: got %v, want a 4xx that names %s", c.req, err, c.says)
		}
	}
}

// sum is a writer that keeps what a long output was, and how long.
type sum struct {
	hash.Hash
	n int64
}

func (s *sum) Write(p []byte) (int, error) {
	s.n += int64(len(p))
	return s.Hash.Write(p)
}

func pattern(n int64) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{}), n)
}

// poured is what guestprobe pour prints.
func poured(n int64) *sum {
	s := &sum{Hash: sha256.New()}
	_, _ = io.Copy(s, pattern(n)) // neither side fails
	return s
}

func TestLargeOutput(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	size := 32 << 20
	if *long {
		size = 100 << 20
	}
	got := &sum{Hash: sha256.New()}
	began := time.Now()
	session, err := s.client.Run(t.Context(), ws, coppice.ExecRequest{Command: []string{probePath, "pour", strconv.Itoa(size)}}, got, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d MiB of output in %.1f s", size>>20, time.Since(began).Seconds())
	want := poured(int64(size))
	if got.n != want.n || !bytes.Equal(got.Sum(nil), want.Sum(nil)) || session.ExitCode == nil || *session.ExitCode != 0 {
		t.Errorf("got %d bytes with the sum %x and %+v, want %d with %x", got.n, got.Sum(nil), session, want.n, want.Sum(nil))
	}
	// Nobody follows this one: its beginning is lost, and says so.
	res, err := s.client.Exec(t.Context(), ws, coppice.ExecRequest{Command: []string{probePath, "pour", strconv.Itoa(3 << 20)}})
	if err != nil {
		t.Fatal(err)
	}
	kept, err := base64.StdEncoding.DecodeString(res.Stdout)
	if err != nil || !res.StdoutTruncated || res.StderrTruncated || len(kept) == 0 || len(kept) > 1<<20 {
		t.Fatalf("%d bytes kept, truncated %v and %v, %v", len(kept), res.StdoutTruncated, res.StderrTruncated, err)
	}
	all, err := io.ReadAll(pattern(3 << 20))
	if err != nil || !bytes.HasSuffix(all, kept) {
		t.Error("what was kept is not the end of the output")
	}
}

// TestReconnect cuts the connection to a session and goes on where it was.
func TestReconnect(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	session, err := s.client.StartSession(t.Context(), ws, coppice.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	say := func(text string, last bool) {
		t.Helper()
		if err := s.client.WriteStdin(t.Context(), session.ID, strings.NewReader(text), last); err != nil {
			t.Fatal(err)
		}
	}
	say("one\n", false)
	ctx, cut := context.WithCancel(t.Context())
	first, err := s.client.SessionOutput(ctx, session.ID, coppice.Stdout, 0, true)
	if err != nil {
		t.Fatal(err)
	}
	read := make([]byte, 4)
	if _, err := io.ReadFull(first, read); err != nil || string(read) != "one\n" {
		t.Fatalf("%q, %v", read, err)
	}
	cut()
	say("two\n", false)
	_ = first.Close()
	say("three\n", true)
	var rest bytes.Buffer
	if err := s.client.Follow(t.Context(), session.ID, coppice.Stdout, first.Offset, &rest); err != nil || rest.String() != "two\nthree\n" {
		t.Fatalf("after the cut: %q, %v", rest.String(), err)
	}
	ended, err := s.client.WaitSession(t.Context(), session.ID)
	if err != nil || ended.ExitCode == nil || *ended.ExitCode != 0 || ended.StdoutBytes != int64(len("one\ntwo\nthree\n")) {
		t.Errorf("%+v, %v", ended, err)
	}
	list, err := coppice.Collect(s.client.Sessions(t.Context(), ws))
	if err != nil || !slices.ContainsFunc(list, func(x coppice.Session) bool { return x.ID == session.ID && x.State == coppice.SessionExited }) {
		t.Errorf("the session is not in %+v, %v", list, err)
	}
	if err := s.client.DeleteSession(t.Context(), session.ID); err != nil {
		t.Fatal(err)
	}
	_, err = s.client.Session(t.Context(), session.ID)
	_ = wantCode(t, err, coppice.CodeSessionNotFound)
}

// TestBackground starts processes that outlive the call which started them.
func TestBackground(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	pid := strings.TrimSpace(shell(t, s, ws, `setsid sleep 86400 </dev/null >/dev/null 2>&1 & echo $!`))
	// This one keeps the call's output open; the call ends with its program all the same.
	held := strings.TrimSpace(shell(t, s, ws, `sleep 86399 & echo $!`))
	want := []string{pid, held}
	slices.Sort(want)
	until(t, "both background processes run sleep", func() (bool, error) {
		var alive []string
		for _, p := range processes(t, s, ws) {
			if p.Comm == "sleep" {
				alive = append(alive, strconv.Itoa(p.PID))
			}
		}
		slices.Sort(alive)
		return slices.Equal(want, alive), nil
	})
	session := launch(t, s, ws, "sleep", "86398")
	if err := s.client.SignalSession(t.Context(), session.ID, "SIGUSR1"); err != nil {
		t.Fatal(err)
	}
	ended, err := s.client.WaitSession(t.Context(), session.ID)
	if err != nil || ended.Signal != "SIGUSR1" {
		t.Errorf("%+v, %v", ended, err)
	}
}

func TestTerminal(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	session, err := s.client.StartSession(t.Context(), ws, coppice.ExecRequest{Command: []string{"/bin/bash", "--norc", "-i"}, PTY: true, Cols: 91, Rows: 33, StdinOpen: true, Env: coppice.Env{"PS1": "ready> "}})
	if err != nil {
		t.Fatal(err)
	}
	a, err := s.client.Attach(t.Context(), session.ID, coppice.AttachOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Close() }()
	screen := &terminal{t: t, a: a}
	screen.await("ready> ")
	screen.say("tty; stty size\n")
	screen.await("/dev/pts/")
	screen.await("33 91\r\n")
	if err := a.Resize(t.Context(), 120, 40); err != nil {
		t.Fatal(err)
	}
	screen.await("ready> ")
	screen.say("stty size\n")
	screen.await("40 120\r\n")
	screen.await("ready> ")
	screen.say("sleep 86400\n")
	screen.await("sleep 86400\r\n")
	until(t, "the program runs in the foreground", func() (bool, error) { // a Ctrl-C before that is the shell's own
		return slices.ContainsFunc(processes(t, s, ws), func(p coppice.Process) bool { return p.Comm == "sleep" }), nil
	})
	screen.say("\x03") // Ctrl-C
	screen.await("ready> ")
	// Another connection sees what was on the screen; this one goes on.
	var all bytes.Buffer
	early, err := s.client.SessionOutput(t.Context(), session.ID, coppice.Stdout, 0, false)
	if err == nil {
		_, err = io.Copy(&all, early)
		_ = early.Close()
	}
	if err != nil || !strings.Contains(all.String(), "40 120") {
		t.Errorf("the session keeps %q, %v", all.String(), err)
	}
	screen.say("exit 5\n")
	if end := screen.end(); end.ExitCode != 5 {
		t.Errorf("%+v, want exit status 5", end)
	}
}

// terminal reads what an attached session shows.
type terminal struct {
	t     *testing.T
	a     *coppice.Attached
	shown []byte // and not yet asked for
}

func (x *terminal) say(text string) {
	x.t.Helper()
	if err := x.a.Write(x.t.Context(), []byte(text)); err != nil {
		x.t.Fatal(err)
	}
}

// await reads on until text was shown, and forgets everything up to its end.
func (x *terminal) await(text string) {
	x.t.Helper()
	for {
		if i := bytes.Index(x.shown, []byte(text)); i >= 0 {
			x.shown = x.shown[i+len(text):]
			return
		}
		e := x.next()
		if e.Message != nil {
			x.t.Fatalf("%+v came while %q was awaited after %q", e.Message, text, x.shown)
		}
		x.shown = append(x.shown, e.Data...)
	}
}

func (x *terminal) next() coppice.AttachEvent {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(x.t.Context(), 5*time.Minute)
	defer cancel()
	e, err := x.a.Next(ctx)
	if err != nil {
		x.t.Fatalf("after %q: %v", x.shown, err)
	}
	return e
}

// end reads on until the session ends.
func (x *terminal) end() *coppice.AttachEnd {
	x.t.Helper()
	for {
		if e := x.next(); e.Message != nil && e.Message.Type == coppice.AttachExit {
			return e.Message.Session
		}
	}
}

// TestAttachStreams attaches without a terminal: streams apart, offsets right, standard input and its end.
func TestAttachStreams(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	session, err := s.client.StartSession(t.Context(), ws, coppice.ExecRequest{Command: []string{"sh", "-c", "cat; echo done >&2"}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	a, err := s.client.Attach(t.Context(), session.ID, coppice.AttachOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Close() }()
	sent := []byte("\x00one\xff\n")
	if err := errors.Join(a.Write(t.Context(), sent), a.CloseStdin(t.Context())); err != nil {
		t.Fatal(err)
	}
	got := map[string][]byte{}
	screen := &terminal{t: t, a: a}
	for {
		e := screen.next()
		if e.Message != nil {
			if e.Message.Type != coppice.AttachExit || e.Message.Session.ExitCode != 0 {
				t.Errorf("%+v", e.Message)
			}
			break
		}
		if e.Offset != int64(len(got[e.Stream])) {
			t.Errorf("%s: offset %d after %d bytes", e.Stream, e.Offset, len(got[e.Stream]))
		}
		got[e.Stream] = append(got[e.Stream], e.Data...)
	}
	if diff := cmp.Diff(map[string][]byte{coppice.Stdout: sent, coppice.Stderr: []byte("done\n")}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestFiles(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	ctx := t.Context()
	const size = 64 << 20
	began := time.Now()
	if _, err := s.client.WriteFile(ctx, ws, "/srv/deep/er/big", pattern(size), coppice.WriteOptions{Mkdirs: true, Mode: "0640"}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d MiB up in %.1f s", size>>20, time.Since(began).Seconds())
	want := fmt.Sprintf("%x", poured(size).Sum(nil))
	if got, _, _ := strings.Cut(execute(t, s, ws, "sha256sum", "/srv/deep/er/big"), " "); got != want {
		t.Errorf("the guest has %s, want %s", got, want)
	}
	began = time.Now()
	body, info, err := s.client.OpenFile(ctx, ws, "/srv/deep/er/big")
	if err != nil {
		t.Fatal(err)
	}
	down := &sum{Hash: sha256.New()}
	_, err = io.Copy(down, body)
	_ = body.Close()
	t.Logf("%d MiB down in %.1f s", size>>20, time.Since(began).Seconds())
	if got := fmt.Sprintf("%x", down.Sum(nil)); err != nil || got != want || info.Size != size || info.Mode != "0640" {
		t.Errorf("came back as %s (%+v), %v", got, info, err)
	}

	local := t.TempDir()
	for name, content := range map[string]string{"a": "1", "sub/b": "\x00\xff", "sub/with space": ""} {
		path := filepath.Join(local, "in", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("a", filepath.Join(local, "in", "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.CopyTo(ctx, ws, filepath.Join(local, "in"), "/srv/tree"); err != nil {
		t.Fatal(err)
	}
	if got := shell(t, s, ws, `cd /srv/tree; find . | sort; readlink link; stat -c %a a; od -An -tx1 sub/b`); got != ".\n./a\n./link\n./sub\n./sub/b\n./sub/with space\na\n600\n 00 ff\n" {
		t.Errorf("the guest has\n%s", got)
	}
	if _, err := s.client.CopyFrom(ctx, ws, "/srv/tree", filepath.Join(local, "out")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "sub/b", "sub/with space", "link"} {
		was, err1 := os.ReadFile(filepath.Join(local, "in", name))
		is, err2 := os.ReadFile(filepath.Join(local, "out", name))
		if err := errors.Join(err1, err2); err != nil || !bytes.Equal(was, is) {
			t.Errorf("%s: %q became %q, %v", name, was, is, err)
		}
	}

	list, err := s.client.ListFiles(ctx, ws, "/srv/tree")
	if err != nil || len(list.Entries) != 3 || list.Truncated {
		t.Errorf("%+v, %v", list, err)
	}
	if err := s.client.RemoveFile(ctx, ws, "/srv/tree", false); err == nil {
		t.Error("a directory that is not empty was removed")
	}
	if err := s.client.RemoveFile(ctx, ws, "/srv/tree", true); err != nil {
		t.Error(err)
	}
	_, err = s.client.StatFile(ctx, ws, "/srv/tree")
	_ = wantCode(t, err, coppice.CodeFileNotFound)
}

// TestRefusedUpload sends more than the buffers on the way hold to where it cannot go: the answer is the guest's, not a broken
// connection.
func TestRefusedUpload(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	for _, path := range []string{"/etc", "/absent/file", "/etc/hostname/file", "/proc/version"} {
		_, err := s.client.WriteFile(t.Context(), ws, path, pattern(16<<20), coppice.WriteOptions{})
		var e *coppice.Error
		if !errors.As(err, &e) || e.Status < 400 || e.Status > 499 || !strings.Contains(e.Detail, path) {
			t.Errorf("%s: got %v, want a 4xx that names it", path, err)
		}
	}
}
