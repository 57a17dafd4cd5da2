package fakeguest

import (
	"context"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// maxBody bounds what a request brings.
const maxBody = 64 << 20

// maxFill bounds what the program fill writes.
const maxFill = 128 << 20

// view is the session in the form for a host.
func (n *Session) view() guestapi.Session {
	out := n.Session
	out.StdoutBytes, out.StdoutFirst = n.Out.end(), n.Out.First
	out.StderrBytes, out.StderrFirst = n.Err.end(), n.Err.First
	return out
}

// named returns the session that a request names.
func (s *State) named(r *http.Request) (*Session, error) {
	return s.session(core.SessionID(r.PathValue("id")))
}

func (s *State) createSession(_ *http.Request, spec guestapi.SessionSpec) (guestapi.Session, error) {
	n, err := s.start(spec)
	if err != nil {
		return guestapi.Session{}, err
	}
	return n.view(), nil
}

func (s *State) listSessions(*http.Request) (guestapi.Sessions, error) {
	out := guestapi.Sessions{Sessions: []guestapi.Session{}}
	for _, n := range s.Sessions {
		out.Sessions = append(out.Sessions, n.view())
	}
	return out, nil
}

func (s *State) info(r *http.Request) (guestapi.Session, error) {
	n, err := s.named(r)
	if err != nil {
		return guestapi.Session{}, err
	}
	return n.view(), nil
}

func (s *State) deleteSession(r *http.Request) (none, error) {
	n, err := s.named(r)
	if err == nil {
		s.Sessions = slices.DeleteFunc(s.Sessions, func(o *Session) bool { return o == n })
	}
	return none{}, err
}

func (g *Guest) waitSession(w http.ResponseWriter, r *http.Request) error {
	const longest = 300_000
	ms, err := answer.IntParam(r, "timeout_ms", longest)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), time.Duration(min(ms, longest))*time.Millisecond)
	defer cancel()
	var out guestapi.Session
	err = g.await(ctx, func(s *State) (ended bool, err error) {
		out, err = s.info(r)
		return out.State == guestapi.SessionExited, err
	})
	if err != nil && ctx.Err() == nil {
		return err
	}
	answer.WriteJSON(w, http.StatusOK, out)
	return nil
}

// chunk is the available output of a stream from an offset on.
type chunk struct {
	at    int64
	data  []byte
	ended bool // the session has ended, and there is no more
}

// read returns the available output of a stream; with follow, it waits for some.
func (g *Guest) read(ctx context.Context, r *http.Request, stream string, offset int64, follow bool) (chunk, error) {
	var out chunk
	err := g.await(ctx, func(s *State) (bool, error) {
		n, err := s.named(r)
		if err != nil {
			return false, err
		}
		o := &n.Out
		if stream == "stderr" {
			o = &n.Err
		}
		at := min(max(offset, o.First), o.end()) // an offset behind the end is the end
		out = chunk{at: at, data: slices.Clip(o.Data[at-o.First:]), ended: n.State == guestapi.SessionExited}
		return !follow || out.ended || len(out.data) > 0 || at > offset, nil
	})
	return out, err
}

// startOf returns the offset from which a request reads a stream.
func startOf(r *http.Request, param string) (int64, error) {
	var missing int64
	if r.URL.Query().Get("from") == "now" {
		missing = math.MaxInt64 // no byte has this number: a reader begins at the next one
	}
	return answer.IntParam(r, param, missing)
}

func (g *Guest) sessionOutput(w http.ResponseWriter, r *http.Request) error {
	stream := r.URL.Query().Get("stream")
	if stream != "" && stream != "stdout" && stream != "stderr" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "stream must be stdout or stderr, not %q", core.Clip(stream))
	}
	offset, err := startOf(r, "offset")
	if err != nil {
		return err
	}
	follow := answer.BoolParam(r, "follow")
	got, err := g.read(r.Context(), r, stream, offset, false)
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
		if got, err = g.read(r.Context(), r, stream, offset, true); err != nil {
			return nil //nolint:nilerr // the reader is gone, or the session was deleted in the middle of the answer
		}
		truncated = truncated || got.at > offset
	}
	h.Set(guestapi.HeaderEndOffset, strconv.FormatInt(offset, 10))
	h.Set(guestapi.HeaderTruncated, strconv.FormatBool(truncated))
	h.Set(guestapi.HeaderEOF, strconv.FormatBool(got.ended))
	return nil
}

func (g *Guest) sessionStdin(w http.ResponseWriter, r *http.Request) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return answer.BodyError(r.Context(), err)
	}
	return respond(g, w, http.StatusNoContent, func(s *State) (none, error) {
		n, err := s.named(r)
		if err != nil {
			return none{}, err
		}
		return none{}, s.input(n, b, answer.BoolParam(r, "close"))
	})
}

func (s *State) signal(r *http.Request, req guestapi.Signal) (none, error) {
	n, err := s.named(r)
	if err != nil {
		return none{}, err
	}
	// A host that does not ask for the feature may reach an agent that ignores the target.
	if req.Target != "" && !slices.Contains(r.URL.Query()[guestapi.ParamNeed], guestapi.FeatureSignalTarget) {
		return none{}, nil
	}
	return none{}, n.signal(req.Signal)
}

// running returns an error if the session has ended.
func (n *Session) running() error {
	if n.State == guestapi.SessionExited {
		return core.Errorf(core.Conflict, guestapi.CodeSessionEnded, "session %s has ended", n.ID)
	}
	return nil
}

// signal ends a session: no program handles signals.
func (n *Session) signal(name string) error {
	number, err := strconv.Atoi(name)
	if err != nil {
		number = int(unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG")))
	}
	signal := unix.SignalName(syscall.Signal(number))
	if signal == "" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "signal %q does not exist", core.Clip(name))
	}
	if err := n.running(); err != nil {
		return err
	}
	n.end(128+number, signal)
	return nil
}

func (s *State) resize(r *http.Request, _ guestapi.Resize) (none, error) {
	_, err := s.named(r)
	return none{}, err
}

func (s *State) deadline(r *http.Request, req guestapi.Deadline) (none, error) {
	n, err := s.named(r)
	if err == nil {
		err = n.running()
	}
	if err != nil {
		return none{}, err
	}
	if n.Deadline = 0; req.TimeoutMS > 0 {
		n.Deadline = s.Uptime + time.Duration(req.TimeoutMS)*time.Millisecond
	}
	return none{}, nil
}
