package runnertest

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// guest answers the public routes of the agent out of memory. Programs are a few built-in words:
//
//	true, false, exit N, echo ARGS, err ARGS (to stderr), cat [PATH], sleep SECONDS, fill BYTES, env, mkdir -p -- PATH,
//	mv -f -T -- FROM TO
//
// A shell's -c LINE runs one of these words; there is nothing else of a shell.
type guest struct {
	// mu guards the fields below.
	mu       sync.Mutex
	files    map[string][]byte // never written again once stored
	sessions map[core.SessionID]*session
	about    map[string]about // what is known of paths besides their bytes
	watches  []*watch
}

func newGuest() *guest {
	return &guest{
		files: map[string][]byte{}, sessions: map[core.SessionID]*session{},
		about: map[string]about{"/root": {dir: true}, "/tmp": {dir: true}, "/workspace": {dir: true}},
	}
}

// clone is the guest of a fork: the same files, and the programs that ran, under their names.
func (g *guest) clone() *guest {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := &guest{files: maps.Clone(g.files), sessions: map[core.SessionID]*session{}, about: maps.Clone(g.about), watches: cloneWatches(g.watches)}
	for id, s := range g.sessions {
		c.sessions[id] = s.clone()
	}
	return c
}

// end kills every program.
func (g *guest) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.sessions {
		s.end(137, "SIGKILL")
	}
}

type session struct {
	env map[string]string // of its start

	// mu guards the fields below; changed is closed and replaced when they change.
	mu      sync.Mutex
	view    controller.GuestSession
	out     [2][]byte
	stdin   []byte
	eof     bool
	ended   chan struct{}
	changed chan struct{}
}

func (s *session) clone() *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &session{view: s.view, stdin: slices.Clone(s.stdin), eof: s.eof, ended: make(chan struct{}), changed: make(chan struct{})}
	c.out = [2][]byte{slices.Clone(s.out[0]), slices.Clone(s.out[1])}
	if s.view.State == controller.GuestExited {
		close(c.ended)
	}
	return c
}

func (s *session) snapshot() controller.GuestSession {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.view
	v.StdoutBytes, v.StderrBytes = int64(len(s.out[0])), int64(len(s.out[1]))
	return v
}

func (s *session) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *session) write(stream int, b []byte) {
	s.change(func() { s.out[stream] = append(s.out[stream], b...) })
}

func (s *session) end(code int, signal string) {
	s.change(func() {
		if s.view.State == controller.GuestExited {
			return
		}
		now := time.Now().UTC()
		s.view.State, s.view.ExitCode, s.view.Signal, s.view.EndedAt = controller.GuestExited, &code, signal, &now
		close(s.ended)
	})
}

// readStdin waits for the next input.
func (s *session) readStdin() ([]byte, bool) {
	for {
		s.mu.Lock()
		b, eof, changed := s.stdin, s.eof, s.changed
		s.stdin = nil
		s.mu.Unlock()
		if len(b) > 0 {
			return b, true
		}
		if eof {
			return nil, false
		}
		select {
		case <-changed:
		case <-s.ended:
			return nil, false
		}
	}
}

func (g *guest) run(s *session, timeout time.Duration) {
	if timeout > 0 {
		timer := time.AfterFunc(timeout, func() {
			s.change(func() { s.view.TimedOut = s.view.State != controller.GuestExited })
			s.end(137, "SIGKILL")
		})
		defer timer.Stop()
	}
	s.end(g.program(s), "")
}

// programs are the words that a guest knows.
var programs = []string{"true", "false", "exit", "echo", "err", "cat", "sleep", "fill", "env", "mkdir", "mv"}

func (g *guest) program(s *session) int {
	words, shell := wordsOf(s.view.Command)
	if shell && !slices.Contains(programs, words[0]) {
		s.write(1, []byte("sh: not found\n"))
		return 127
	}
	args := words[1:]
	switch words[0] {
	case "false":
		return 1
	case "exit":
		n, _ := strconv.Atoi(args[0])
		return n
	case "env":
		for _, name := range slices.Sorted(maps.Keys(s.env)) {
			s.write(0, []byte(name+"="+s.env[name]+"\n"))
		}
	case "echo":
		s.write(0, []byte(strings.Join(args, " ")+"\n"))
	case "err":
		s.write(1, []byte(strings.Join(args, " ")+"\n"))
	case "fill":
		n, _ := strconv.Atoi(args[0])
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i)
		}
		s.write(0, b)
	case "sleep":
		seconds, _ := strconv.ParseFloat(args[0], 64)
		timer := time.NewTimer(time.Duration(seconds * float64(time.Second)))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-s.ended:
		}
	case "mkdir":
		g.mu.Lock()
		defer g.mu.Unlock()
		g.about[args[len(args)-1]] = about{dir: true}
	case "mv":
		g.mu.Lock()
		defer g.mu.Unlock()
		from, to := args[len(args)-2], args[len(args)-1]
		g.files[to] = g.files[from]
		delete(g.files, from)
	case "cat":
		if len(args) > 0 {
			g.mu.Lock()
			b, ok := g.files[args[0]]
			g.mu.Unlock()
			if !ok {
				s.write(1, []byte("cat: no such file\n"))
				return 1
			}
			s.write(0, b)
			return 0
		}
		for {
			b, ok := s.readStdin()
			if !ok {
				return 0
			}
			s.write(0, b)
		}
	}
	return 0
}

// ServeHTTP answers the agent's public routes.
func (g *guest) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/sessions", g.start)
	mux.HandleFunc("GET /v1/sessions", func(w http.ResponseWriter, _ *http.Request) {
		g.mu.Lock()
		defer g.mu.Unlock()
		list := []controller.GuestSession{}
		for _, id := range slices.Sorted(maps.Keys(g.sessions)) {
			list = append(list, g.sessions[id].snapshot())
		}
		reply(w, map[string]any{"sessions": list}, nil)
	})
	mux.HandleFunc("GET /v1/processes", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, map[string]any{"processes": []controller.Process{{PID: 1, Comm: "init", Cmdline: "init", State: "S", RSSBytes: 4096}}}, nil)
	})
	mux.HandleFunc("/v1/files", g.serveFile)
	mux.HandleFunc("/v1/files/content", g.serveFile)
	mux.HandleFunc("POST /v1/watches", g.createWatch)
	mux.HandleFunc("GET /v1/watches", g.listWatches)
	mux.HandleFunc("DELETE /v1/watches/{id}", g.deleteWatch)
	mux.HandleFunc("GET /v1/watches/{id}/events", g.watchEvents)
	mux.HandleFunc("POST /v1/files/mkdir", g.makeDir)
	mux.HandleFunc("POST /v1/files/rename", g.rename)
	mux.HandleFunc("POST /v1/files/xattrs", g.setAttributes)
	mux.HandleFunc("/v1/sessions/{id}", g.serveSession)
	mux.HandleFunc("/v1/sessions/{id}/{verb}", g.serveSession)
	mux.ServeHTTP(w, q)
}

func (g *guest) start(w http.ResponseWriter, q *http.Request) {
	var in struct {
		ID core.SessionID `json:"id"`
		controller.ExecRequest
	}
	if err := json.NewDecoder(q.Body).Decode(&in); err != nil {
		reply(w, nil, core.Wrapf(err, core.Invalid, core.CodeMalformedBody, "cannot be read"))
		return
	}
	if words, shell := wordsOf(in.Command); !shell && !slices.Contains(programs, words[0]) {
		reply(w, nil, core.Errorf(core.NotFound, "COMMAND_NOT_FOUND", "%s: not found", in.Command[0]))
		return
	}
	s := &session{
		env: in.Env, stdin: in.Stdin, eof: !in.StdinOpen, ended: make(chan struct{}), changed: make(chan struct{}),
		view: controller.GuestSession{
			ID: in.ID, Command: in.Command, Cwd: "/workspace", User: in.User, PTY: in.PTY, State: "running", PID: 42, StartedAt: time.Now().UTC(), StdinOpen: in.StdinOpen,
		},
	}
	g.mu.Lock()
	g.sessions[in.ID] = s
	g.mu.Unlock()
	// The program belongs to the guest, which outlives every request; it ends by itself or when its session is deleted.
	go g.run(s, time.Duration(in.TimeoutMS)*time.Millisecond)
	reply(w, s.snapshot(), nil)
}

func (g *guest) serveSession(w http.ResponseWriter, q *http.Request) {
	id := core.SessionID(q.PathValue("id"))
	g.mu.Lock()
	s, ok := g.sessions[id]
	g.mu.Unlock()
	if !ok {
		reply(w, nil, core.Errorf(core.NotFound, core.CodeSessionNotFound, "no session %s", id))
		return
	}
	switch verb := q.PathValue("verb"); verb {
	case "":
		if q.Method == http.MethodDelete {
			s.end(137, "SIGKILL")
			g.mu.Lock()
			delete(g.sessions, id)
			g.mu.Unlock()
			reply(w, nil, nil)
			return
		}
		reply(w, s.snapshot(), nil)
	case "wait":
		ms, _ := strconv.Atoi(q.URL.Query().Get("timeout_ms"))
		ctx, cancel := context.WithTimeout(q.Context(), time.Duration(ms)*time.Millisecond)
		defer cancel()
		select {
		case <-s.ended:
		case <-ctx.Done():
		}
		reply(w, s.snapshot(), nil)
	case "output":
		s.serveOutput(w, q)
	case "stdin":
		b, _ := io.ReadAll(q.Body)
		s.change(func() { s.stdin, s.eof = append(s.stdin, b...), s.eof || q.URL.Query().Get("close") == "1" })
		reply(w, nil, nil)
	case "signal":
		var in struct{ Target string }
		if json.NewDecoder(q.Body).Decode(&in) == nil && in.Target == "" || q.URL.Query().Get("need") == "signal_target" {
			s.end(143, "SIGTERM") // a target without its feature has no effect
		}
		reply(w, nil, nil)
	case "deadline":
		var in struct {
			TimeoutMS int64 `json:"timeout_ms"`
		}
		if json.NewDecoder(q.Body).Decode(&in) == nil && in.TimeoutMS > 0 {
			s.change(func() { s.view.TimedOut = true })
			s.end(137, "SIGKILL") // at once: the deadline of a test has come
		}
		reply(w, nil, nil)
	case "resize":
		reply(w, nil, nil)
	case "attach":
		s.attach(w, q)
	default:
		http.NotFound(w, q)
	}
}

func (s *session) serveOutput(w http.ResponseWriter, q *http.Request) {
	stream := 0
	if q.URL.Query().Get("stream") == "stderr" {
		stream = 1
	}
	at, _ := strconv.Atoi(q.URL.Query().Get("offset"))
	if q.URL.Query().Get("from") == "now" {
		s.mu.Lock()
		at = len(s.out[stream])
		s.mu.Unlock()
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Trailer", "Coppice-End-Offset, Coppice-Eof")
	w.Header().Set("Coppice-Offset", strconv.Itoa(at))
	for {
		s.mu.Lock()
		b, over, changed := s.out[stream][min(at, len(s.out[stream])):], s.view.State == controller.GuestExited, s.changed
		s.mu.Unlock()
		_, _ = w.Write(b) // the reader may have gone
		at += len(b)
		if over || q.URL.Query().Get("follow") != "1" {
			w.Header().Set("Coppice-End-Offset", strconv.Itoa(at))
			w.Header().Set("Coppice-Eof", strconv.FormatBool(over))
			return
		}
		_ = http.NewResponseController(w).Flush() // likewise
		select {
		case <-changed:
		case <-q.Context().Done():
			return
		}
	}
}

func (s *session) attach(w http.ResponseWriter, q *http.Request) {
	conn, err := websocket.Accept(w, q, nil)
	if err != nil {
		return
	}
	defer func() { _ = conn.CloseNow() }()
	ctx := q.Context()
	go func() {
		for {
			kind, b, err := conn.Read(ctx)
			if err != nil {
				return
			}
			if kind == websocket.MessageBinary {
				s.change(func() { s.stdin = append(s.stdin, b...) })
			} else if strings.Contains(string(b), "close_stdin") {
				s.change(func() { s.eof = true })
			}
		}
	}()
	number := func(name string) int {
		n, _ := strconv.Atoi(q.URL.Query().Get(name))
		return n
	}
	at := [2]int{number("stdout_offset"), number("stderr_offset")}
	for {
		s.mu.Lock()
		var next [2][]byte
		for i := range at {
			next[i] = slices.Clone(s.out[i][min(at[i], len(s.out[i])):])
		}
		over, changed := s.view.State == controller.GuestExited, s.changed
		s.mu.Unlock()
		sent := false
		for i, b := range next {
			for piece := range slices.Chunk(b, pieceBytes) {
				frame := binary.BigEndian.AppendUint64([]byte{byte(i + 1)}, uint64(at[i])) //nolint:gosec // G115: an offset is not negative
				if conn.Write(ctx, websocket.MessageBinary, append(frame, piece...)) != nil {
					return
				}
				at[i] += len(piece)
				sent = true
			}
		}
		if sent {
			continue
		}
		if over {
			exit, _ := json.Marshal(map[string]any{"type": "exit", "session": s.snapshot()})
			_ = conn.Write(ctx, websocket.MessageText, exit)
			_ = conn.Close(websocket.StatusNormalClosure, "")
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// pieceBytes is how much output one message has at most.
const pieceBytes = 32 << 10

// wordsOf are the words of a program's line, or of the line that a shell is given.
func wordsOf(command []string) (words []string, shell bool) {
	if last := len(command) - 1; last > 1 && command[last-1] == "-c" {
		if words := strings.Fields(command[last]); len(words) > 0 {
			return words, true
		}
	}
	return command, false
}
