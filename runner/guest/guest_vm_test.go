package guest_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/guest"
)

// TestVM uses one guest for everything that does not need a clone.
func TestVM(t *testing.T) {
	v := startVM(t, vmOptions{})
	c := v.dial()
	t.Run("health", func(t *testing.T) { testHealth(t, c) })
	t.Run("exec", func(t *testing.T) { testExec(t, c) })
	t.Run("mark", func(t *testing.T) { testMark(t, c) })
	t.Run("view", func(t *testing.T) { testView(t, c) })
	t.Run("stdin", func(t *testing.T) { testStdin(t, c) })
	t.Run("output", func(t *testing.T) { testOutput(t, c) })
	t.Run("background", func(t *testing.T) { testBackground(t, c) })
	t.Run("files", func(t *testing.T) { testFiles(t, c) })
	t.Run("directories", func(t *testing.T) { testDirectories(t, c) })
	t.Run("terminal", func(t *testing.T) { testTerminal(t, c) })
	t.Run("processes and ports", func(t *testing.T) { testProcesses(t, c) })
	t.Run("reconnect", func(t *testing.T) { c = testReconnect(t, v, c) })
	t.Run("freeze", func(t *testing.T) { testFreeze(t, c) })
	t.Run("not quiesced", func(t *testing.T) { testNotQuiesced(t, c) })
	t.Run("agent restarts", func(t *testing.T) { testAgentRestart(t, v, c) })
}

func testHealth(t *testing.T, c *guest.Client) {
	t.Helper()
	h, err := c.Health(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if h.Version != guestapi.Version || h.State != guestapi.StateReleased || h.Generation != "boot-"+h.BootNonce || h.UptimeS <= 0 || h.PID < 2 {
		t.Errorf("unexpected health %+v", h)
	}
	var took []time.Duration
	for range 20 {
		begin := time.Now()
		if _, err := c.Health(t.Context()); err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	t.Logf("answered after %.1f s of guest time; a request takes %s (median), the agent has %.1f MiB resident", h.UptimeS, took[10], float64(h.RSSBytes)/(1<<20))
}

func testExec(t *testing.T, c *guest.Client) {
	t.Helper()
	cases := []struct {
		name   string
		spec   guestapi.SessionSpec
		stdout string
		stderr string
		code   int
		signal string
		timed  bool
	}{
		{name: "streams apart", spec: guestapi.SessionSpec{Command: []string{"sh", "-c", "echo out; echo err >&2; exit 7"}}, stdout: "out\n", stderr: "err\n", code: 7},
		{name: "signal", spec: guestapi.SessionSpec{Command: []string{"sh", "-c", "kill -TERM $$"}}, code: 143, signal: "SIGTERM"},
		{name: "timeout", spec: guestapi.SessionSpec{Command: []string{"sh", "-c", "sleep 1000 & sleep 1000"}, TimeoutMS: 200}, code: 137, signal: "SIGKILL", timed: true},
		{name: "cwd and env", spec: guestapi.SessionSpec{Command: []string{"sh", "-c", "pwd; echo $A $HOME"}, Cwd: "/usr/bin", Env: map[string]string{"A": "1 2"}}, stdout: "/usr/bin\n1 2 /root\n"},
		{name: "user", spec: guestapi.SessionSpec{Command: []string{"sh", "-c", "id -un; id -g; echo $USER"}, User: "nobody"}, stdout: "nobody\n65534\nnobody\n"},
		{name: "uid and gid", spec: guestapi.SessionSpec{Command: []string{"id", "-u", "-r"}, User: "1234:5"}, stdout: "1234\n"},
		{name: "empty arguments", spec: guestapi.SessionSpec{Command: []string{"printf", "<%s>", "", "a b"}}, stdout: "<><a b>"},
		{name: "binary", spec: guestapi.SessionSpec{Command: []string{"printf", `\300cppgus\032\000\377`}}, stdout: "\xc0cppgus\x1a\x00\xff"},
		{name: "no stdin", spec: guestapi.SessionSpec{Command: []string{"cat"}}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			s := start(t, c, tc.spec)
			stdout, stderr := output(t, c, s.ID, "follow=1"), output(t, c, s.ID, "stream=stderr&follow=1")
			if stdout != tc.stdout || stderr != tc.stderr {
				t.Errorf("got %q and %q, want %q and %q", stdout, stderr, tc.stdout, tc.stderr)
			}
			s = ask[guestapi.Session](t, c, http.MethodGet, route(guestapi.PathSessionWait, s.ID), nil)
			if s.State != guestapi.SessionExited || s.ExitCode == nil || *s.ExitCode != tc.code || s.Signal != tc.signal || s.TimedOut != tc.timed || s.EndedAt == nil {
				t.Errorf("unexpected end %+v", s)
			}
			ask[struct{}](t, c, http.MethodDelete, route(guestapi.PathSession, s.ID), nil)
			if _, _, err := do(t.Context(), c, http.MethodGet, route(guestapi.PathSession, s.ID), nil); core.CodeOf(err) != core.CodeSessionNotFound { //nolint:bodyclose // do has read and closed it
				t.Errorf("a deleted session: %v", err)
			}
		})
	}
	for command, want := range map[string]core.Code{
		"no-such-program": guestapi.CodeCommandNotFound, "/no/such/path": guestapi.CodeCommandNotFound, "/etc/passwd": guestapi.CodeCommandFailed, "/etc": guestapi.CodeCommandFailed,
	} {
		b, err := json.Marshal(guestapi.SessionSpec{Command: []string{command}})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := do(t.Context(), c, http.MethodPost, guestapi.PathSessions, bytes.NewReader(b)); core.CodeOf(err) != want { //nolint:bodyclose // do has read and closed it
			t.Errorf("%s: %v, want %s", command, err, want)
		}
	}
	begin := time.Now()
	const n = 10
	for range n {
		run(t, c, "/bin/true")
	}
	t.Logf("start, follow and wait of /bin/true take %s", time.Since(begin)/n)
}

// testMark: a program that changes nothing leaves the mark as it is, and each change that outlives a program makes another one.
func testMark(t *testing.T, c *guest.Client) {
	t.Helper()
	mark := func() string { return ask[guestapi.Mark](t, c, http.MethodGet, guestapi.PathMark, nil).Mark }
	last := mark()
	for _, command := range []string{"true", "ls -lR /etc /usr/bin > /dev/null; cat /etc/passwd", "sleep 0.2 & wait"} {
		run(t, c, "sh", "-c", command)
		if now := mark(); now == "" || now != last {
			t.Errorf("after %q the mark is %q, before %q", command, now, last)
			last = now
		}
	}
	for _, command := range []string{
		"echo x > /root/mark", "echo y > /root/mark", "chmod 600 /root/mark", "rm /root/mark",
		"echo x > /dev/shm/mark", "echo y > /dev/shm/mark", "mkdir /run/mark", "rmdir /run/mark; rm /dev/shm/mark",
	} {
		run(t, c, "sh", "-c", command)
		now := mark()
		if now == "" || now == last {
			t.Errorf("%q is not noticed", command)
		}
		last = now
	}
	s := start(t, c, guestapi.SessionSpec{Command: []string{"sleep", "1000"}})
	if now := mark(); now != "" {
		t.Errorf("while a program runs, the mark is %q", now)
	}
	ask[struct{}](t, c, http.MethodDelete, route(guestapi.PathSession, s.ID), nil)
}

// testView checks what the workload sees of the machine.
func testView(t *testing.T, c *guest.Client) {
	t.Helper()
	want := map[string]string{
		"cat /proc/self/cgroup":                                            "0::/",
		"cat /proc/1/comm":                                                 "coppice-init",
		"cat /proc/self/oom_score_adj":                                     "0",
		"mkdir /sys/fs/cgroup/x 2>/dev/null; echo $?":                      "1",
		"cat /sys/fs/cgroup/cgroup.freeze":                                 "0",
		"ls /run/.coppice/disk | wc -l":                                    "0",
		"cat /proc/sys/net/ipv6/conf/all/disable_ipv6":                     "1",
		"stat -c %a /tmp":                                                  "1777",
		"echo x > /tmp/a; mv /usr/share/doc /usr/share/doc2 && echo moved": "moved",
		"cut -d' ' -f1 /run/coppice/generation | cut -c1-5":                "boot-",
		"pgrep -c agent":                                                   "0",
	}
	for script, want := range want {
		if got := strings.TrimSpace(run(t, c, "sh", "-c", script+"; true")); got != want {
			t.Errorf("%s: got %q, want %q", script, got, want)
		}
	}
}

func testStdin(t *testing.T, c *guest.Client) {
	t.Helper()
	data := bytes.Repeat([]byte("\xc0cppgus\x1a\x00 all of it\n"), 20_000)
	sum := sha256.Sum256(data)
	want := hex.EncodeToString(sum[:]) + "  -\n"

	s := start(t, c, guestapi.SessionSpec{Command: []string{"sha256sum"}, Stdin: data})
	if got := output(t, c, s.ID, "follow=1"); got != want {
		t.Errorf("inline: got %q, want %q", got, want)
	}
	s = start(t, c, guestapi.SessionSpec{Command: []string{"sha256sum"}, StdinOpen: true})
	half := len(data) / 2
	for _, part := range []struct {
		b     []byte
		query string
	}{{data[:half], ""}, {data[half:], "?close=1"}} {
		if _, _, err := do(t.Context(), c, http.MethodPost, route(guestapi.PathSessionStdin, s.ID)+part.query, bytes.NewReader(part.b)); err != nil { //nolint:bodyclose // do has read and closed it
			t.Fatal(err)
		}
	}
	if got := output(t, c, s.ID, "follow=1"); got != want {
		t.Errorf("posted: got %q, want %q", got, want)
	}
	_, _, err := do(t.Context(), c, http.MethodPost, route(guestapi.PathSessionStdin, s.ID), strings.NewReader("more")) //nolint:bodyclose // do has read and closed it
	if core.CodeOf(err) != guestapi.CodeSessionEnded {
		t.Errorf("stdin of an ended session: %v", err)
	}
}

func testOutput(t *testing.T, c *guest.Client) {
	t.Helper()
	// Far more than is kept: a follower gets every byte all the same.
	const size = 24 << 20
	s := start(t, c, guestapi.SessionSpec{Command: []string{"python3", "-c", `import sys
b = bytes(range(256)) * 4096
for _ in range(24): sys.stdout.buffer.write(b)`}})
	begin := time.Now()
	got := output(t, c, s.ID, "follow=1")
	want := strings.Repeat(string(allBytes()), size/256)
	if got != want {
		t.Fatalf("got %d bytes, want %d", len(got), len(want))
	}
	t.Logf("%d MiB of output at %.1f MB/s", size>>20, size/1e6/time.Since(begin).Seconds())

	// Afterwards only the end is there, and a reader is told.
	b, res, err := do(t.Context(), c, http.MethodGet, route(guestapi.PathSessionOutput, s.ID), nil) //nolint:bodyclose // do has read and closed it
	if err != nil {
		t.Fatal(err)
	}
	var offset int
	if _, err := fmt.Sscan(res.Header.Get(guestapi.HeaderOffset), &offset); err != nil || offset+len(b) != size || len(b) < 1<<20 {
		t.Errorf("kept %d bytes from %d (%v)", len(b), offset, err)
	}
	if res.Trailer.Get(guestapi.HeaderTruncated) != "true" || res.Trailer.Get(guestapi.HeaderEOF) != "true" {
		t.Errorf("trailers %v", res.Trailer)
	}
	if string(b) != want[offset:] {
		t.Error("the kept bytes are not the last ones")
	}
	if got := output(t, c, s.ID, fmt.Sprintf("offset=%d", size-10)); got != want[size-10:] {
		t.Errorf("the last ten bytes are %q", got)
	}
}

func allBytes() []byte {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

func testBackground(t *testing.T, c *guest.Client) {
	t.Helper()
	begin := time.Now()
	s := start(t, c, guestapi.SessionSpec{Command: []string{"sh", "-c", "(trap '' HUP; while :; do echo x; sleep 0.2; done) & echo pid=$!"}})
	line := output(t, c, s.ID, "follow=1")
	_, pid, _ := strings.Cut(line, "pid=")
	pid, _, _ = strings.Cut(pid, "\n")
	t.Logf("the call took %s", time.Since(begin))
	alive := "test -d /proc/" + pid + " && grep -c . /proc/" + pid + "/comm"
	if got := sh(t, c, alive); got != "1" {
		t.Fatalf("the background job is gone: %q", got)
	}
	// It goes on when its session is forgotten, although it writes to the session's pipe.
	ask[struct{}](t, c, http.MethodDelete, route(guestapi.PathSession, s.ID), nil)
	if got := sh(t, c, "sleep 1; "+alive+"; kill -9 "+pid); got != "1" {
		t.Errorf("the background job did not outlive its session: %q", got)
	}
}

func testFiles(t *testing.T, c *guest.Client) {
	t.Helper()
	data := bytes.Repeat(allBytes(), 20_000)
	file := func(method, path, query string, body io.Reader) ([]byte, *http.Response, error) {
		return do(t.Context(), c, method, guestapi.PathFiles+"?path="+url.QueryEscape(path)+query, body)
	}
	path := "/root/dir ü/\x01file"
	if _, _, err := file(http.MethodPut, path, "", bytes.NewReader(data)); core.CodeOf(err) != core.CodeFileNotFound { //nolint:bodyclose // file has read and closed it
		t.Errorf("into a directory that is not there: %v", err)
	}
	if _, _, err := file(http.MethodPut, path, "&mkdirs=1&mode=0750&uid=7&gid=8", bytes.NewReader(data)); err != nil { //nolint:bodyclose // file has read and closed it
		t.Fatal(err)
	}
	got, res, err := file(http.MethodGet, path, "", nil) //nolint:bodyclose // file has read and closed it
	if err != nil || !bytes.Equal(got, data) || res.ContentLength != int64(len(data)) {
		t.Fatalf("got %d bytes (%v), want %d", len(got), err, len(data))
	}
	var info guestapi.FileInfo
	if err := json.Unmarshal([]byte(res.Header.Get(guestapi.HeaderFileInfo)), &info); err != nil {
		t.Fatal(err)
	}
	info.MTime = time.Time{}
	want := guestapi.FileInfo{Path: path, Name: "\x01file", Type: "file", Size: int64(len(data)), Mode: "0750", UID: 7, GID: 8}
	if diff := cmp.Diff(want, info); diff != "" {
		t.Error(diff)
	}
	if _, res, err = file(http.MethodHead, path, "", nil); err != nil || res.Header.Get(guestapi.HeaderFileInfo) == "" { //nolint:bodyclose // file has read and closed it
		t.Errorf("head: %v %v", err, res)
	}
	// Overwriting keeps owner and mode, and follows a symlink.
	sh(t, c, "ln -s '/root/dir ü' /root/link; ln -s target /root/dangling")
	if _, _, err := file(http.MethodPut, "/root/link/\x01file", "", strings.NewReader("short")); err != nil { //nolint:bodyclose // file has read and closed it
		t.Fatal(err)
	}
	if got := sh(t, c, `stat -c '%a %u %g %s' /root/dir*/*`); got != "750 7 8 5" {
		t.Errorf("after overwriting: %s", got)
	}
	for _, tc := range []struct {
		method, path, query string
		want                core.Code
	}{
		{http.MethodGet, "/root", "", guestapi.CodeFileConflict},
		{http.MethodGet, "/dev/zero", "", guestapi.CodeFileConflict},
		{http.MethodGet, "/root/none", "", core.CodeFileNotFound},
		{http.MethodGet, "/etc/passwd/x", "", guestapi.CodeFileConflict},
		{http.MethodPut, "/root", "", guestapi.CodeFileConflict},
		{http.MethodPut, "/proc/x", "", core.CodeFileNotFound},
		{http.MethodPut, "/root/x", "&mode=9", core.CodeInvalidField},
		{http.MethodGet, "", "", core.CodeInvalidField},
		{http.MethodDelete, "/root/dir ü", "", guestapi.CodeFileConflict},
		{http.MethodDelete, "/", "&recursive=1", core.CodeInvalidField},
	} {
		if _, _, err := file(tc.method, tc.path, tc.query, strings.NewReader("")); core.CodeOf(err) != tc.want { //nolint:bodyclose // file has read and closed it
			t.Errorf("%s %s: %v, want %s", tc.method, tc.path, err, tc.want)
		}
	}
	if got, _, err := file(http.MethodGet, "/proc/1/status", "", nil); err != nil || !bytes.HasPrefix(got, []byte("Name:")) { //nolint:bodyclose // file has read and closed it
		t.Errorf("a file without a size: %q %v", got, err)
	}
	if got := sh(t, c, "find / -xdev -name '*.part-*' | wc -l"); got != "0" {
		t.Errorf("%s temporary files are left", got)
	}
	if _, _, err := file(http.MethodDelete, "/root/dir ü", "&recursive=1", nil); err != nil { //nolint:bodyclose // file has read and closed it
		t.Error(err)
	}
}

func testDirectories(t *testing.T, c *guest.Client) {
	t.Helper()
	var up bytes.Buffer
	tw := tar.NewWriter(&up)
	when := time.Unix(1_700_000_000, 0)
	for _, h := range []*tar.Header{
		{Name: "top/", Typeflag: tar.TypeDir, Mode: 0o500, ModTime: when},
		{Name: "top/file", Typeflag: tar.TypeReg, Mode: 0o4711, Size: 3, Uid: 3, Gid: 4, ModTime: when},
		{Name: "top/link", Typeflag: tar.TypeSymlink, Linkname: "/etc"},
		{Name: "top/hard", Typeflag: tar.TypeLink, Linkname: "top/file"},
		{Name: "top/fifo", Typeflag: tar.TypeFifo, Mode: 0o600},
	} {
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			_, _ = tw.Write([]byte("abc"))
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	put := func(body io.Reader) error {
		_, _, err := do(t.Context(), c, http.MethodPut, guestapi.PathFiles+"?path=/root/tree&untar=1", body) //nolint:bodyclose // do has read and closed it
		return err
	}
	if err := put(bytes.NewReader(up.Bytes())); err != nil {
		t.Fatal(err)
	}
	if err := put(bytes.NewReader(up.Bytes())); err != nil {
		t.Errorf("a second time: %v", err)
	}
	got := sh(t, c, "cd /root/tree/top && stat -c '%n %F %a %u:%g %h %Y' . file && readlink link && stat -c %F fifo")
	want := ". directory 500 0:0 2 1700000000\nfile regular file 4711 3:4 2 1700000000\n/etc\nfifo"
	if got != want {
		t.Errorf("got %q\nwant %q", got, want)
	}
	// Through the symlink that it made itself, an archive does not get out.
	var evil bytes.Buffer
	tw = tar.NewWriter(&evil)
	if err := tw.WriteHeader(&tar.Header{Name: "top/link/evil", Typeflag: tar.TypeReg, Mode: 0o600, Size: 1}); err != nil {
		t.Fatal(err)
	}
	_, _ = tw.Write([]byte("x"))
	_ = tw.Close()
	if err := put(&evil); err == nil {
		t.Error("an archive wrote through a symlink")
	}
	if err := put(bytes.NewReader(up.Bytes()[:700])); core.CodeOf(err) != core.CodeMalformedBody {
		t.Errorf("half an archive: %v", err)
	}

	down, res, err := do(t.Context(), c, http.MethodGet, guestapi.PathFiles+"?path=/root/tree/top&tar=1", nil) //nolint:bodyclose // do has read and closed it
	if err != nil || res.Trailer.Get(guestapi.HeaderStatus) != "ok" || res.Trailer.Get(guestapi.HeaderLeftOut) != `{"special":1}` {
		t.Fatalf("%v %v", err, res.Trailer)
	}
	var names []string
	tr := tar.NewReader(bytes.NewReader(down))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	if diff := cmp.Diff([]string{"top/", "top/file", "top/hard", "top/link"}, names); diff != "" {
		t.Error(diff)
	}
	list := ask[guestapi.FileList](t, c, http.MethodGet, guestapi.PathFiles+"?path=/root/tree/top&list=1", nil)
	if len(list.Entries) != 4 || list.Entries[1].Name != "file" || list.Entries[1].Mode != "4711" || list.Entries[3].Target != "/etc" {
		t.Errorf("listing %+v", list)
	}
}

// attach opens a WebSocket through the proxy, as a user's does.
func attach(t *testing.T, c *guest.Client, id core.SessionID) *websocket.Conn {
	t.Helper()
	srv := httptest.NewServer(c.Proxy(func(w http.ResponseWriter, _ *http.Request, err error) {
		http.Error(w, err.Error(), http.StatusBadGateway)
	}))
	t.Cleanup(srv.Close)
	conn, _, err := websocket.Dial(t.Context(), srv.URL+route(guestapi.PathSessionAttach, id), nil) //nolint:bodyclose // websocket.Dial leaves nothing to close
	if err != nil {
		t.Fatal(err)
	}
	conn.SetReadLimit(1 << 20)
	t.Cleanup(func() { _ = conn.CloseNow() })
	return conn
}

// terminal collects what an attached session shows.
type terminal struct {
	t    *testing.T
	conn *websocket.Conn
	seen string
	exit *guestapi.Session
}

// until reads until the output has the text, or the session ends.
func (m *terminal) until(text string) {
	m.t.Helper()
	for !strings.Contains(m.seen, text) && m.exit == nil {
		m.more()
	}
}

// more reads one frame.
func (m *terminal) more() {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), 5*time.Minute)
	defer cancel()
	kind, b, err := m.conn.Read(ctx)
	if err != nil {
		m.t.Fatalf("no more output: %v; seen %q", err, m.seen)
	}
	if kind == websocket.MessageBinary {
		if at := int(binary.BigEndian.Uint64(b[1:])); b[0] != guestapi.AttachStdout || at != len(m.seen) {
			m.t.Fatalf("frame of stream %d at %d, want %d", b[0], at, len(m.seen))
		}
		m.seen += string(b[guestapi.AttachHeadLen:])
		return
	}
	var msg guestapi.AttachMessage
	if err := json.Unmarshal(b, &msg); err != nil {
		m.t.Fatal(err)
	}
	if msg.Type == guestapi.AttachExit {
		m.exit = msg.Session
	}
}

func (m *terminal) send(kind websocket.MessageType, b string) {
	m.t.Helper()
	if err := m.conn.Write(m.t.Context(), kind, []byte(b)); err != nil {
		m.t.Fatal(err)
	}
}

func testTerminal(t *testing.T, c *guest.Client) {
	t.Helper()
	s := start(t, c, guestapi.SessionSpec{Command: []string{"/bin/bash", "--norc", "--noediting"}, PTY: true, Cols: 91, Rows: 31, Env: map[string]string{"PS1": "ready> "}})
	m := &terminal{t: t, conn: attach(t, c, s.ID)}
	prompt := func(n int) {
		t.Helper()
		for strings.Count(m.seen, "ready> ") < n {
			m.more()
		}
	}
	// sleeping waits until a command runs in the foreground.
	sleeping := func(command string) {
		t.Helper()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for range 15_000 {
			list := ask[guestapi.Processes](t, c, http.MethodGet, guestapi.PathProcesses, nil)
			if slices.ContainsFunc(list.Processes, func(p guestapi.Process) bool { return p.Cmdline == command }) {
				return
			}
			<-tick.C
		}
		t.Fatalf("%s does not run; seen %q", command, m.seen)
	}
	prompt(1)
	m.send(websocket.MessageBinary, "stty size; tty; echo $TERM\n")
	m.until("31 91\r\n/dev/pts/0\r\nxterm-256color\r\n")
	prompt(2)
	m.send(websocket.MessageText, `{"type":"resize","cols":120,"rows":40}`)
	m.send(websocket.MessageBinary, "stty size\n")
	m.until("40 120\r\n")
	prompt(3)
	m.send(websocket.MessageBinary, "sleep 1000\n")
	sleeping("sleep 1000")
	m.send(websocket.MessageBinary, "\x03") // the terminal's own interrupt
	prompt(4)
	m.send(websocket.MessageBinary, "sleep 2000; echo st=$?\n")
	sleeping("sleep 2000")
	m.send(websocket.MessageText, `{"type":"signal","signal":"TERM"}`) // to what runs in the foreground
	m.until("st=143")

	// Another one joins and sees it all; the session survives the first one's leaving.
	_ = m.conn.CloseNow()
	m = &terminal{t: t, conn: attach(t, c, s.ID)}
	m.until("st=143")
	m.send(websocket.MessageBinary, "exit 5\n")
	m.until("never")
	if m.exit == nil || m.exit.ExitCode == nil || *m.exit.ExitCode != 5 {
		t.Fatalf("exit message %+v", m.exit)
	}
}

func testProcesses(t *testing.T, c *guest.Client) {
	t.Helper()
	s := start(t, c, guestapi.SessionSpec{Command: []string{"python3", "-u", "-c", `import socket, time
s = socket.create_server(("127.0.0.1", 8123)); t = socket.create_server(("0.0.0.0", 8124)); print("up")
while True:
    c, _ = s.accept(); c.sendall(c.recv(100)); c.close()`}})
	m := &terminal{t: t, conn: attach(t, c, s.ID)}
	m.until("up\n")
	ports := ask[guestapi.Ports](t, c, http.MethodGet, guestapi.PathPorts, nil)
	var got []string
	for _, p := range ports.Ports {
		got = append(got, fmt.Sprint(p.Address, " ", p.Port, " ", p.Process, " ", p.PID == s.PID))
	}
	if diff := cmp.Diff([]string{"127.0.0.1 8123 python3 true", "0.0.0.0 8124 python3 true"}, got); diff != "" {
		t.Error(diff)
	}
	conn, err := c.DialPort(t.Context(), 8123)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); err != nil || string(b) != "hello" {
		t.Errorf("a server on the guest's loopback answers %q, %v", b, err)
	}
	if _, err := c.DialPort(t.Context(), 8125); core.CodeOf(err) != core.CodePortClosed {
		t.Errorf("a port that nobody listens on: %v", err)
	}
	list := ask[guestapi.Processes](t, c, http.MethodGet, guestapi.PathProcesses, nil)
	i := slices.IndexFunc(list.Processes, func(p guestapi.Process) bool { return p.PID == s.PID })
	if i < 0 {
		t.Fatalf("%d is not in %+v", s.PID, list)
	}
	if p := list.Processes[i]; p.Comm != "python3" || p.State != "S" || p.RSSBytes < 1<<20 || !strings.HasPrefix(p.Cmdline, "python3 -u -c import socket") {
		t.Errorf("unexpected process %+v", p)
	}
	ask[struct{}](t, c, http.MethodPost, route(guestapi.PathSessionSignal, s.ID), guestapi.Signal{Signal: "KILL"})
	m.until("never")
	if m.exit.Signal != "SIGKILL" {
		t.Errorf("exit %+v", m.exit)
	}
}

func testReconnect(t *testing.T, v *vm, c *guest.Client) *guest.Client {
	t.Helper()
	s := start(t, c, guestapi.SessionSpec{Command: []string{"sh", "-c", "echo one; read x; echo $x; read y; echo $y"}, StdinOpen: true})
	for i, word := range []string{"two", "three"} {
		_ = c.Close()
		<-c.Done()
		begin := time.Now()
		c = v.dial()
		t.Logf("reconnected in %s", time.Since(begin))
		query := ""
		if i == 1 {
			query = "?close=1"
		}
		if _, _, err := do(t.Context(), c, http.MethodPost, route(guestapi.PathSessionStdin, s.ID)+query, strings.NewReader(word+"\n")); err != nil { //nolint:bodyclose // do has read and closed it
			t.Fatal(err)
		}
	}
	if got := output(t, c, s.ID, "follow=1"); got != "one\ntwo\nthree\n" {
		t.Errorf("output across connections: %q", got)
	}
	return c
}
