package guest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// The agent lives in the attacker's machine: each of these is a guest that means harm.

func TestDialFails(t *testing.T) {
	t.Parallel()
	broken := errors.New("no such socket")
	if _, err := Dial(t.Context(), func(context.Context) (net.Conn, error) { return nil, broken }); !errors.Is(err, broken) || core.CodeOf(err) != core.CodeGuestUnreachable {
		t.Errorf("a channel that is not there: %v", err)
	}
	g := listen(t, func(_ int, conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, g.connect); !errors.Is(err, context.DeadlineExceeded) || core.CodeOf(err) != core.CodeGuestUnreachable {
		t.Errorf("an agent that never answers: %v", err)
	}
}

// TestDialTriesAgain: a VMM that drops its first connections is waited for.
func TestDialTriesAgain(t *testing.T) {
	t.Parallel()
	g := listen(t, func(n int, conn net.Conn) {
		if n < 3 {
			_ = conn.Close()
			return
		}
		if link, err := greeted(conn); err == nil {
			_, _ = io.Copy(io.Discard, link)
		}
	})
	if v := g.dial().Version(); v != guestapi.Version {
		t.Errorf("version %d", v)
	}
}

func TestEndlessAnswers(t *testing.T) {
	t.Parallel()
	zeros := make([]byte, 64<<10)
	for name, h := range map[string]http.HandlerFunc{
		"body": func(w http.ResponseWriter, _ *http.Request) {
			for {
				if _, err := w.Write(zeros); err != nil {
					return
				}
			}
		},
		"length": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "4294967296")
			for {
				if _, err := w.Write(zeros); err != nil {
					return
				}
			}
		},
		"header": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("x", 10<<20))
			w.WriteHeader(http.StatusOK)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := serveHTTP(t, h)
			_, err := c.Health(t.Context())
			if code := core.CodeOf(err); code != core.CodeGuestProtocol && code != core.CodeGuestUnreachable {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestSlowAnswers: one byte now and then is no progress; the call's deadline ends it.
func TestSlowAnswers(t *testing.T) {
	t.Parallel()
	drip := func(w io.Writer, r *http.Request, b byte) {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-r.Context().Done():
				return
			case <-tick.C:
				if _, err := w.Write([]byte{b}); err != nil {
					return
				}
				if f, ok := w.(http.Flusher); ok {
					f.Flush()
				}
			}
		}
	}
	for name, h := range map[string]http.HandlerFunc{
		"never": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"body":  func(w http.ResponseWriter, r *http.Request) { drip(w, r, ' ') },
		"header": func(w http.ResponseWriter, r *http.Request) {
			conn, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer func() { _ = conn.Close() }()
			_, _ = rw.WriteString("HTTP/1.1 200 OK\r\nX: ")
			_ = rw.Flush()
			for {
				if _, err := conn.Write([]byte("x")); err != nil {
					return
				}
				select {
				case <-time.After(10 * time.Millisecond):
				case <-r.Context().Done():
					return
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := serveHTTP(t, h)
			ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
			defer cancel()
			begin := time.Now()
			_, err := c.Health(ctx)
			if core.CodeOf(err) != core.CodeGuestUnreachable || !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) > 2*time.Minute {
				t.Errorf("after %s: %v", time.Since(begin), err)
			}
		})
	}
}

// TestTextsAreClipped: nothing that a guest says reaches a terminal or a log as it is.
func TestTextsAreClipped(t *testing.T) {
	t.Parallel()
	evil := "\x1b[2J\x00\n" + strings.Repeat("A", 1<<16)
	answer := http.StatusOK
	c := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(answer)
		if answer != http.StatusOK {
			_ = json.NewEncoder(w).Encode(guestapi.Problem{Category: core.Conflict, Code: "SOME_CODE", Message: evil})
			return
		}
		switch r.URL.Path {
		case guestapi.PathHealth:
			_ = json.NewEncoder(w).Encode(guestapi.Health{BootNonce: evil, Generation: evil, State: guestapi.State(evil), Kernel: evil, CaptureID: evil})
		case guestapi.PathReseal:
			report := core.ResealReport{Generation: evil, Steps: make([]core.ResealStep, 1000), StaleProcesses: make([]core.StaleProcess, 5000)}
			for i := range report.Steps {
				report.Steps[i] = core.ResealStep{Name: evil[:20], Status: core.ResealStatus(evil[:10]), Error: evil[:200], Evidence: map[string]string{}}
			}
			for i := range 200 {
				report.Steps[0].Evidence[fmt.Sprint(i, evil[:3])] = evil[:200]
			}
			report.StaleProcesses[0] = core.StaleProcess{Command: evil, Runtime: evil}
			_ = json.NewEncoder(w).Encode(report)
		}
	})
	check := func(what string, v any) {
		t.Helper()
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range string(b) {
			if r < 0x20 || r > 0x7e {
				t.Fatalf("%s has the character %q", what, r)
			}
		}
		if bytes.Contains(b, []byte(`\u001b`)) || bytes.Contains(b, []byte(strings.Repeat("A", 150))) {
			t.Errorf("%s holds foreign text as it was: %.200s", what, b)
		}
	}
	h, err := c.Health(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	check("health", h)
	report, err := c.Reseal(t.Context(), wantAll())
	if err != nil {
		t.Fatal(err)
	}
	check("report", report)
	if len(report.Steps) > maxSteps || len(report.Steps[0].Evidence) > maxEvidence || len(report.StaleProcesses) > maxProcesses {
		t.Errorf("kept %d steps, %d pieces of evidence, %d processes", len(report.Steps), len(report.Steps[0].Evidence), len(report.StaleProcesses))
	}
	answer = http.StatusTeapot
	_, err = c.Health(t.Context())
	check("an error", err.Error())
	if core.CodeOf(err) != "SOME_CODE" {
		t.Errorf("got %v", err)
	}
}

func TestProblemsAreNotBelieved(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]core.Code{
		`{"category":"conflict","code":"GUEST_STATE","message":"m"}`:           "GUEST_STATE",
		`{"category":"unauthenticated","code":"UNAUTHENTICATED","message":""}`: core.CodeGuestProtocol, // would be the caller's key
		`{"category":"strange","code":"A"}`:                                    core.CodeGuestProtocol,
		`{"category":"conflict","code":"a b\u001b"}`:                           core.CodeGuestProtocol,
		`{"category":"conflict","code":"` + strings.Repeat("A", 100) + `"}`:    core.CodeGuestProtocol,
		`{"category":"conflict"}`:                                              core.CodeGuestProtocol,
		`<html>`:                                                               core.CodeGuestProtocol,
		``:                                                                     core.CodeGuestProtocol,
	} {
		c := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusConflict)
			_, _ = io.WriteString(w, body)
		})
		if _, err := c.Health(t.Context()); core.CodeOf(err) != want {
			t.Errorf("%s: %v, want %s", body, err, want)
		}
	}
	for _, status := range []int{http.StatusCreated, http.StatusMovedPermanently, 999} {
		c := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "http://169.254.169.254/")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "{}")
		})
		if _, err := c.Health(t.Context()); core.CodeOf(err) != core.CodeGuestProtocol {
			t.Errorf("status %d: %v", status, err)
		}
	}
}

func TestWeakEntropyIsNotSent(t *testing.T) {
	t.Parallel()
	c := serveHTTP(t, func(http.ResponseWriter, *http.Request) { t.Error("a request was sent") })
	for _, e := range [][]byte{nil, make([]byte, guestapi.EntropySize), bytes.Repeat([]byte{7}, guestapi.EntropySize), make([]byte, 5)} {
		if _, err := c.Reseed(t.Context(), guestapi.ReseedRequest{Entropy: e}); core.CodeOf(err) != core.CodeResealFailed {
			t.Errorf("reseed with %v: %v", e, err)
		}
		if _, err := c.Reseal(t.Context(), guestapi.ResealRequest{Entropy: e}); core.CodeOf(err) != core.CodeResealFailed {
			t.Errorf("reseal with %v: %v", e, err)
		}
	}
}

func frame(version, kind byte, flags uint16, id, length uint32) []byte {
	b := binary.BigEndian.AppendUint16([]byte{version, kind}, flags)
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, id), length)
}

// TestMultiplexerGarbage: whatever a guest puts into the multiplexer ends the connection, soon and at no cost.
func TestMultiplexerGarbage(t *testing.T) {
	const syn, typeData, typeWindow, typePing = 1, 0, 1, 2
	flood := func(b []byte) func(*guestapi.Link) {
		return func(l *guestapi.Link) {
			many := bytes.Repeat(b, 2000)
			for {
				if _, err := l.Write(many); err != nil {
					return
				}
			}
		}
	}
	for name, misbehave := range map[string]func(*guestapi.Link){
		"pings":              flood(frame(0, typePing, syn, 0, 7)),
		"streams":            flood(append(frame(0, typeWindow, syn, 2, 0), frame(0, typeWindow, syn, 4, 0)...)),
		"data of no stream":  flood(append(frame(0, typeData, 0, 9, 100), make([]byte, 100)...)),
		"empty frames":       flood(frame(0, typeData, 0, 9, 0)),
		"windows":            flood(frame(0, typeWindow, 0, 9, 1)),
		"a huge frame":       flood(frame(0, typeData, 0, 1, 0xffffffff)),
		"text":               flood([]byte("HTTP/1.1 200 OK\r\n\r\n")),
		"another version":    flood(frame(1, typeData, 0, 0, 0)),
		"an unknown type":    flood(frame(0, 77, 0, 0, 0)),
		"zeros":              flood(make([]byte, 100)),
		"a new announcement": flood(append([]byte{0}, frame(0, 3, 0, 0, 2)...)),
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			c := serveRaw(t, misbehave)
			select {
			case <-c.Done():
			case <-time.After(5 * time.Minute):
				t.Fatal("the connection still stands")
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 8<<20 {
				t.Errorf("%d bytes are kept", grown)
			}
			if n := runtime.NumGoroutine(); n > 200 {
				t.Errorf("%d goroutines", n)
			}
			if _, err := c.Health(t.Context()); core.CodeOf(err) != core.CodeGuestUnreachable {
				t.Errorf("a call after it: %v", err)
			}
		})
	}
}

// TestUnreadAnswersAreBounded: a guest that sends more than it is asked for, on requests that nobody reads, fills a window each
// and no more.
func TestUnreadAnswersAreBounded(t *testing.T) {
	zeros := make([]byte, 64<<10)
	c := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
		for {
			if _, err := w.Write(zeros); err != nil {
				return
			}
		}
	})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const n = 20
	for range n {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://guest"+guestapi.PathProcesses, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := c.Transport().RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for range 25 { // it goes on writing all the while
		<-tick.C
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > n*(maxFrame*4) {
		t.Errorf("%d unread answers hold %d bytes", n, grown)
	}
}

// TestAnswersOfManyElements: a small answer never becomes a large heap, whatever it is made of. Each ends in its time.
func TestAnswersOfManyElements(t *testing.T) { //nolint:paralleltest // it measures the heap of the process
	const size = 1000 << 10
	many := func(open, each, end string) string {
		return open + strings.Repeat(each+",", size/(len(each)+1)) + each + end
	}
	for name, body := range map[string]string{
		"steps":     many(`{"steps":[`, "{}", "]}"),
		"evidence":  many(`{"steps":[{"evidence":{`, `"a":""`, "}}]}"),
		"processes": many(`{"stale_processes":[`, "{}", "]}"),
		"levels":    strings.Repeat(`{"x":[`, size/6),
		"NULs":      `{"generation":"` + strings.Repeat(`\u0000`, size/6) + `"}`,
		"raw NULs":  strings.Repeat("\x00", size),
		"ANSI":      `{"generation":"` + strings.Repeat(`\u001b[2J`, size/10) + `"}`,
		"a number":  `{"duration_ms":` + strings.Repeat("9", size) + `}`,
	} {
		c := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })
		if _, err := c.Health(t.Context()); err != nil && core.CodeOf(err) != core.CodeGuestProtocol {
			t.Errorf("%s: %v", name, err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		report, err := c.Reseal(t.Context(), wantAll())
		runtime.ReadMemStats(&after)
		if err != nil && core.CodeOf(err) != core.CodeGuestProtocol {
			t.Errorf("%s: %v", name, err)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 6<<20 {
			t.Errorf("%s: %d KiB were allocated for an answer of %d", name, grown>>10, size>>10)
		}
		if len(report.Steps) > maxSteps || len(report.Generation) > 130 || strings.ContainsAny(report.Generation, "\x00\x1b") {
			t.Errorf("%s: %d steps, generation %.40q", name, len(report.Steps), report.Generation)
		}
	}
}
