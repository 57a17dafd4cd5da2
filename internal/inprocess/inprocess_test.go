package inprocess_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/inprocess"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

func client(h http.HandlerFunc) *http.Client {
	return &http.Client{Transport: inprocess.Transport{Handler: h}}
}

func request(ctx context.Context, t *testing.T, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://here/a/b?c=d", body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

func TestExchange(t *testing.T) {
	t.Parallel()
	c := client(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil || r.RequestURI != "/a/b?c=d" || r.RemoteAddr != "192.0.2.7:99" || r.Host != "here" {
			t.Errorf("body %v, uri %q, remote %q, host %q", err, r.RequestURI, r.RemoteAddr, r.Host)
		}
		w.Header().Set("Trailer", "X-End")
		w.Header().Set("X-Head", "1")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusTeapot)
		w.Header().Set("X-Late", "not sent")
		_, _ = w.Write(b)
		w.Header().Set("X-End", "2")
	})
	resp, err := c.Do(request(inprocess.WithRemote(t.Context(), "192.0.2.7:99"), t, strings.NewReader("hello")))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || string(b) != "hello" || resp.StatusCode != http.StatusTeapot || resp.Header.Get("X-Head") != "1" ||
		resp.Header.Get("X-Late") != "" || resp.Trailer.Get("X-End") != "2" {
		t.Errorf("%q, %v, %+v", b, err, resp)
	}
}

// A follower sees what is written when it is flushed, and the handler's request ends when the follower hangs up.
func TestStreamAndHangUp(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{})
	c := client(func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		_ = http.NewResponseController(w).Flush()
		_, _ = w.Write([]byte("x"))
		<-r.Context().Done()
	})
	resp, err := c.Do(request(t.Context(), t, nil))
	if err != nil {
		t.Fatal(err)
	}
	if b := make([]byte, 1); resp.ContentLength != -1 {
		t.Errorf("length %d", resp.ContentLength)
	} else if _, err := io.ReadFull(resp.Body, b); err != nil || b[0] != 'x' {
		t.Errorf("%q, %v", b, err)
	}
	_ = resp.Body.Close()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the handler did not end")
	}
}

func TestBrokenOff(t *testing.T) {
	t.Parallel()
	c := client(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("half"))
		panic(http.ErrAbortHandler)
	})
	resp, err := c.Do(request(t.Context(), t, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadAll(resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a broken answer ended with %v", err)
	}
	silent := client(func(http.ResponseWriter, *http.Request) { panic("boom") })
	if _, err := silent.Do(request(t.Context(), t, nil)); err == nil || !strings.Contains(err.Error(), "panicked") { //nolint:bodyclose // there is none
		t.Errorf("a panic gave %v", err)
	}
}

func TestCallerGoesBeforeTheHead(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	c := client(func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	})
	if _, err := c.Do(request(ctx, t, nil)); !errors.Is(err, context.Canceled) { //nolint:bodyclose // there is none
		t.Errorf("%v", err)
	}
}
