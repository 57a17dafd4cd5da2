//go:build linux

package sessions

import (
	"context"
	"math"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// maxWait bounds one wait for a session; the caller must ask again.
const maxWait = 300 * time.Second

// maxDeadline is the longest time until a new deadline of a session.
const maxDeadline = 365 * 24 * time.Hour

// maxSpecBody bounds the specification of a session, with its input.
const maxSpecBody = 16 << 20

// Routes adds the routes of sessions.
func (m *Server) Routes(add func(pattern string, h answer.Handler)) {
	add("POST "+guestapi.PathSessions, m.createSession)
	add("GET "+guestapi.PathSessions, m.listSessions)
	add("GET "+guestapi.PathSession, m.getSession)
	add("DELETE "+guestapi.PathSession, m.deleteSession)
	add("GET "+guestapi.PathSessionWait, m.waitSession)
	add("GET "+guestapi.PathSessionOutput, m.sessionOutput)
	add("POST "+guestapi.PathSessionStdin, m.sessionStdin)
	add("POST "+guestapi.PathSessionSignal, m.sessionSignal)
	add("POST "+guestapi.PathSessionResize, m.sessionResize)
	add("POST "+guestapi.PathSessionDeadline, m.sessionDeadline)
	add("GET "+guestapi.PathSessionAttach, m.attachSession)
}

func (m *Server) createSession(w http.ResponseWriter, r *http.Request) error {
	var spec guestapi.SessionSpec
	if err := answer.ReadJSON(w, r, maxSpecBody, &spec); err != nil {
		return err
	}
	// The guest may have been frozen while the body arrived.
	if err := m.pass(r.Context()); err != nil {
		return err
	}
	s, err := m.start(spec)
	if err != nil {
		return err
	}
	answer.WriteJSON(w, http.StatusCreated, s.snapshot())
	return nil
}

func (m *Server) listSessions(w http.ResponseWriter, _ *http.Request) error {
	out := guestapi.Sessions{Sessions: []guestapi.Session{}}
	for _, s := range m.all() {
		out.Sessions = append(out.Sessions, s.snapshot())
	}
	answer.WriteJSON(w, http.StatusOK, out)
	return nil
}

func (m *Server) session(r *http.Request) (*session, error) {
	return m.get(core.SessionID(r.PathValue("id")))
}

func (m *Server) getSession(w http.ResponseWriter, r *http.Request) error {
	s, err := m.session(r)
	if err != nil {
		return err
	}
	answer.WriteJSON(w, http.StatusOK, s.snapshot())
	return nil
}

func (m *Server) deleteSession(w http.ResponseWriter, r *http.Request) error {
	s, err := m.session(r)
	if err != nil {
		return err
	}
	if err := m.remove(r.Context(), s); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (m *Server) waitSession(w http.ResponseWriter, r *http.Request) error {
	s, err := m.session(r)
	if err != nil {
		return err
	}
	ms, err := answer.IntParam(r, "timeout_ms", maxWait.Milliseconds())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), min(time.Duration(ms)*time.Millisecond, maxWait))
	defer cancel()
	select {
	case <-s.done:
	case <-ctx.Done():
	}
	answer.WriteJSON(w, http.StatusOK, s.snapshot())
	return nil
}

// stream returns the output that a request names.
func (s *session) stream(name string) (*output, error) {
	switch name {
	case "", "stdout":
		return s.stdout, nil
	case "stderr":
		if s.stderr == nil {
			return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "a session with a terminal has one stream, stdout")
		}
		return s.stderr, nil
	}
	return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "stream must be stdout or stderr, not %q", core.Clip(name))
}

func (m *Server) sessionOutput(w http.ResponseWriter, r *http.Request) error {
	s, err := m.session(r)
	if err != nil {
		return err
	}
	o, err := s.stream(r.URL.Query().Get("stream"))
	if err != nil {
		return err
	}
	now, err := fromNow(r)
	if err != nil {
		return err
	}
	offset, err := answer.IntParam(r, "offset", now)
	if err != nil {
		return err
	}
	follow := answer.BoolParam(r, "follow")
	f := o.peek(offset)
	_, until := o.numbers()
	if follow {
		f = o.follow(offset)
	}
	defer f.close()

	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Trailer", strings.Join([]string{guestapi.HeaderEndOffset, guestapi.HeaderTruncated, guestapi.HeaderEOF}, ", "))
	buf := make([]byte, 32<<10)
	flush := http.NewResponseController(w).Flush
	started, truncated := false, false
	for {
		got, err := f.read(r.Context(), buf, follow && started)
		if err != nil {
			return nil // the reader is gone
		}
		truncated = truncated || got.dropped > 0
		if !started {
			h.Set(guestapi.HeaderOffset, strconv.FormatInt(got.at, 10))
			w.WriteHeader(http.StatusOK)
			started = true
		}
		if _, err := w.Write(buf[:got.n]); err != nil {
			return nil // the reader is gone
		}
		if got.end || !follow && got.at+int64(got.n) >= until {
			h.Set(guestapi.HeaderEndOffset, strconv.FormatInt(got.at+int64(got.n), 10))
			h.Set(guestapi.HeaderTruncated, strconv.FormatBool(truncated))
			h.Set(guestapi.HeaderEOF, strconv.FormatBool(got.end))
			return nil
		}
		if follow {
			if err := flush(); err != nil {
				return nil // the reader is gone
			}
		}
	}
}

func (m *Server) sessionStdin(w http.ResponseWriter, r *http.Request) error {
	s, err := m.session(r)
	if err != nil {
		return err
	}
	if err := s.writeStdin(r.Body, r.Context().Done()); err != nil {
		if r.Context().Err() != nil {
			return context.Cause(r.Context())
		}
		return err
	}
	if answer.BoolParam(r, "close") {
		s.closeStdin()
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (m *Server) sessionSignal(w http.ResponseWriter, r *http.Request) error {
	s, err := m.session(r)
	if err != nil {
		return err
	}
	var req guestapi.Signal
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	sig, err := parseSignal(req.Signal)
	if err != nil {
		return err
	}
	if err := s.signal(sig, req.Target); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// fromNow returns the offset that a request means by from=now, or 0.
func fromNow(r *http.Request) (int64, error) {
	switch v := r.URL.Query().Get("from"); v {
	case "":
		return 0, nil
	case "now":
		return math.MaxInt64, nil // no byte has this number: a reader begins at the next one
	default:
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "from must be now, not %q", core.Clip(v))
	}
}

func (m *Server) sessionDeadline(w http.ResponseWriter, r *http.Request) error {
	s, err := m.session(r)
	if err != nil {
		return err
	}
	var req guestapi.Deadline
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	if req.TimeoutMS < 0 || req.TimeoutMS > maxDeadline.Milliseconds() {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "timeout_ms must be a number from 0 to %d", maxDeadline.Milliseconds())
	}
	if err := s.killAfter(time.Duration(req.TimeoutMS) * time.Millisecond); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func parseSignal(name string) (syscall.Signal, error) {
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n < 65 {
		return syscall.Signal(n), nil
	}
	up := strings.ToUpper(name)
	if !strings.HasPrefix(up, "SIG") {
		up = "SIG" + up
	}
	if sig := unix.SignalNum(up); sig != 0 {
		return sig, nil
	}
	return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "signal %q does not exist", core.Clip(name))
}

func (m *Server) sessionResize(w http.ResponseWriter, r *http.Request) error {
	s, err := m.session(r)
	if err != nil {
		return err
	}
	var req guestapi.Resize
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	if err := s.resize(req.Cols, req.Rows); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
