package fakevmm

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

func noSession(id core.SessionID) error {
	return core.Errorf(core.NotFound, core.CodeSessionNotFound, "there is no session %q in this sandbox", core.Clip(string(id)))
}

// info is the session in the form for a host.
func (n *session) info() guestapi.Session {
	out := n.Session
	out.StdoutBytes, out.StdoutFirst = n.Out.end(), n.Out.First
	out.StderrBytes, out.StderrFirst = n.Err.end(), n.Err.First
	return out
}

// with changes the session in a request.
func (a *agent) with(r *http.Request, fn func(s *agentState, n *session) error) error {
	id := core.SessionID(r.PathValue("id"))
	return a.update(func(s *agentState) error {
		n := s.session(id)
		if n == nil {
			return noSession(id)
		}
		return fn(s, n)
	})
}

func (a *agent) createSession(w http.ResponseWriter, r *http.Request) error {
	var spec guestapi.SessionSpec
	if err := readJSON(r, &spec); err != nil {
		return err
	}
	var out guestapi.Session
	if err := a.update(func(s *agentState) error {
		n, err := s.start(spec)
		if err != nil {
			return err
		}
		out = n.info()
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusCreated, out)
	return nil
}

func (a *agent) listSessions(w http.ResponseWriter, _ *http.Request) error {
	out := guestapi.Sessions{Sessions: []guestapi.Session{}}
	if err := a.view(func(s *agentState) error {
		for _, n := range s.Sessions {
			out.Sessions = append(out.Sessions, n.info())
		}
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (a *agent) getSession(w http.ResponseWriter, r *http.Request) error {
	out, err := a.info(core.SessionID(r.PathValue("id")))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (a *agent) info(id core.SessionID) (out guestapi.Session, err error) {
	err = a.view(func(s *agentState) error {
		n := s.session(id)
		if n == nil {
			return noSession(id)
		}
		out = n.info()
		return nil
	})
	return out, err
}

func (a *agent) deleteSession(w http.ResponseWriter, r *http.Request) error {
	if err := a.with(r, func(s *agentState, n *session) error {
		s.Sessions = slices.DeleteFunc(s.Sessions, func(o *session) bool { return o == n })
		return nil
	}); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *agent) waitSession(w http.ResponseWriter, r *http.Request) error {
	id := core.SessionID(r.PathValue("id"))
	ms, err := intParam(r, "timeout_ms")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), time.Duration(ms)*time.Millisecond)
	defer cancel()
	var out guestapi.Session
	err = a.await(ctx, func(s *agentState) (bool, error) {
		n := s.session(id)
		if n == nil {
			return false, noSession(id)
		}
		out = n.info()
		return n.State == guestapi.SessionExited, nil
	})
	if err != nil && ctx.Err() == nil {
		return err
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// chunk is the available output of a stream from an offset on.
type chunk struct {
	at    int64
	data  []byte
	ended bool // the session has ended, and there is no more
}

// read returns the available output of a session's stream; with follow, it waits for some.
func (a *agent) read(ctx context.Context, id core.SessionID, name string, offset int64, follow bool) (chunk, error) {
	var out chunk
	err := a.await(ctx, func(s *agentState) (bool, error) {
		n := s.session(id)
		if n == nil {
			return false, noSession(id)
		}
		o := &n.Out
		if name == "stderr" {
			o = &n.Err
		}
		at := min(max(offset, o.First), o.end()) // an offset behind the end is the end
		out = chunk{at: at, data: slices.Clone(o.Data[at-o.First:]), ended: n.State == guestapi.SessionExited}
		return !follow || out.ended || len(out.data) > 0 || at > offset, nil
	})
	return out, err
}

func (a *agent) sessionOutput(w http.ResponseWriter, r *http.Request) error {
	id, name := core.SessionID(r.PathValue("id")), r.URL.Query().Get("stream")
	if name != "" && name != "stdout" && name != "stderr" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "stream must be stdout or stderr, not %q", core.Clip(name))
	}
	offset, err := intParam(r, "offset")
	if err != nil {
		return err
	}
	follow := flag(r, "follow")
	got, err := a.read(r.Context(), id, name, offset, false)
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Trailer", strings.Join([]string{guestapi.HeaderEndOffset, guestapi.HeaderTruncated, guestapi.HeaderEOF}, ", "))
	h.Set(guestapi.HeaderOffset, strconv.FormatInt(got.at, 10))
	w.WriteHeader(http.StatusOK)
	truncated := got.at > offset
	for {
		if _, err := w.Write(got.data); err != nil {
			return nil //nolint:nilerr // the reader is gone
		}
		offset = got.at + int64(len(got.data))
		if got.ended || !follow {
			break
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			return nil //nolint:nilerr // the reader is gone
		}
		if got, err = a.read(r.Context(), id, name, offset, true); err != nil {
			return nil //nolint:nilerr // the reader is gone, or the session was deleted in the middle of the answer
		}
		truncated = truncated || got.at > offset
	}
	h.Set(guestapi.HeaderEndOffset, strconv.FormatInt(offset, 10))
	h.Set(guestapi.HeaderTruncated, strconv.FormatBool(truncated))
	h.Set(guestapi.HeaderEOF, strconv.FormatBool(got.ended))
	return nil
}

func (a *agent) sessionStdin(w http.ResponseWriter, r *http.Request) error {
	b, err := io.ReadAll(io.LimitReader(r.Body, 4<<20))
	if err != nil {
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the request's body broke off: %s", core.Clip(err.Error()))
	}
	shut := flag(r, "close")
	if err := a.with(r, func(s *agentState, n *session) error { return s.stdin(n, b, shut) }); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// stdin gives input to a session.
func (s *agentState) stdin(n *session, b []byte, shut bool) error {
	if !n.StdinOpen {
		return core.Errorf(core.FailedPrecondition, guestapi.CodeSessionEnded, "the stdin of session %s is closed", n.ID)
	}
	n.Stdin = append(n.Stdin, b...)
	n.StdinOpen = !shut
	s.advance(n)
	return nil
}

// intParam reads a non-negative number from the query.
func intParam(r *http.Request, name string) (int64, error) {
	v := r.URL.Query().Get(name)
	if v == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 0 {
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "%s must be a number of at least 0, not %q", name, core.Clip(v))
	}
	return n, nil
}

// flag reads a flag from the query.
func flag(r *http.Request, name string) bool {
	v, err := strconv.ParseBool(r.URL.Query().Get(name))
	return err == nil && v
}
