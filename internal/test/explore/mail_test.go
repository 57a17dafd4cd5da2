package explore

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// mail carries the messages of one direction: the calls of controllers to the runner, or what the runner says to the controllers. It does one
// thing wrong with one of them.
type mail struct {
	mu       sync.Mutex // guards what follows
	fault    string     // what goes wrong; empty: nothing
	at       int        // with which message since arm
	seen     int
	carried  chan struct{} // closed when another message was carried after reached
	reached  chan struct{}
	released chan struct{}
	late     func() // delivers a copy
	work     sync.WaitGroup
}

// What goes wrong with a message.
const (
	lost       = "lost"       // it does not arrive, and the connection is cut
	unanswered = "unanswered" // it does all that it does, and the connection is cut
	repeated   = "repeated"   // it arrives twice, one after the other
	copied     = "copied"     // it is carried well, and its copy arrives when everything else has happened
	delayed    = "delayed"    // it arrives when everything else has happened
	overtaken  = "overtaken"  // it arrives after the next one
	failed     = "failed"     // it does not arrive, and is answered with a failure when everything else has happened
)

var mailFaults = []string{lost, unanswered, repeated, copied, delayed, overtaken, failed}

// arm has the n-th message from now on go wrong.
func (m *mail) arm(n int, fault string) <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault, m.at, m.seen = fault, n, 0
	m.carried, m.reached, m.released = make(chan struct{}), make(chan struct{}), make(chan struct{})
	return m.reached
}

// armText arms what a place says: "2 lost".
func (m *mail) armText(text string) (<-chan struct{}, error) {
	n, fault, _ := strings.Cut(text, " ")
	i, err := strconv.Atoi(n)
	if err == nil && !slices.Contains(mailFaults, fault) {
		err = fmt.Errorf("%q is nothing that goes wrong with a message", fault)
	}
	if err != nil {
		return nil, err
	}
	return m.arm(i, fault), nil
}

func (m *mail) messages() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seen
}

// release delivers what was held back, and returns when it was delivered.
func (m *mail) release() {
	m.mu.Lock()
	if m.released != nil && m.fault != "" {
		m.fault = ""
		close(m.released)
	}
	m.mu.Unlock()
	m.work.Wait() // a message that was being copied has its copy now
	m.mu.Lock()
	late := m.late
	m.late = nil
	m.mu.Unlock()
	if late != nil {
		late()
	}
}

// next counts a message and says what goes wrong with it.
func (m *mail) next() (fault string, reached, released, carried chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen++
	if m.fault == "" || m.seen != m.at {
		if m.fault != "" && m.seen == m.at+1 {
			return "", nil, nil, m.carried
		}
		return "", nil, nil, nil
	}
	m.work.Add(1) // until it was carried
	return m.fault, m.reached, m.released, m.carried
}

// carrier is the way to a handler. which says what counts as a message.
func (m *mail) carrier(next http.Handler, which func(*http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !which(r) {
			next.ServeHTTP(w, r)
			return
		}
		fault, reached, released, carried := m.next()
		if fault == "" {
			next.ServeHTTP(w, r)
			if carried != nil {
				close(carried)
			}
			return
		}
		defer m.work.Done()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		again := func() *http.Request {
			out := r.Clone(context.WithoutCancel(r.Context()))
			out.Body = io.NopCloser(bytes.NewReader(body))
			return out
		}
		switch fault {
		case lost:
			close(reached)
			panic(http.ErrAbortHandler)
		case unanswered:
			next.ServeHTTP(httptest.NewRecorder(), again())
			close(reached)
			panic(http.ErrAbortHandler)
		case repeated:
			next.ServeHTTP(httptest.NewRecorder(), again())
		case copied:
			m.mu.Lock()
			m.late = func() { next.ServeHTTP(httptest.NewRecorder(), again()) }
			m.mu.Unlock()
		case delayed, overtaken, failed:
			close(reached)
			if fault != overtaken {
				carried = nil
			}
			select {
			case <-released:
			case <-carried:
			}
			if fault == failed {
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(http.StatusServiceUnavailable)
				_ = json.NewEncoder(w).Encode(runnerapi.ProblemOf(core.Errorf(core.Unavailable, core.CodeVMMFailed, "the explorer has it fail"))) // who asked may be gone
				return
			}
			next.ServeHTTP(w, again())
			return
		}
		next.ServeHTTP(w, again())
		close(reached)
	})
}
