package arbor

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestFirst: of a list without an end, as many items are read as are wanted.
func TestFirst(t *testing.T) {
	t.Parallel()
	read := 0
	endless := func(yield func(int, error) bool) {
		for ; yield(read, nil); read++ {
		}
	}
	if got, err := first(endless, maxCheckpoints); err != nil || len(got) != maxCheckpoints || read != maxCheckpoints-1 {
		t.Errorf("%d items, %d read, %v", len(got), read+1, err)
	}
	broken := errors.New("it is broken")
	if got, err := first(func(yield func(int, error) bool) { yield(0, broken) }, 1); !errors.Is(err, broken) || got != nil {
		t.Errorf("%v, %v", got, err)
	}
}

// TestAnswersAreBounded: an answer of the REST API that is too long is an error.
func TestAnswersAreBounded(t *testing.T) {
	t.Parallel()
	for size, good := range map[int]bool{100: true, maxAnswer + 100: false} {
		api := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusAccepted)
			_, _ = io.WriteString(w, `{"id":"op","step":"`+strings.Repeat("x", size)+`"}`)
		})
		l := layer{Config: Config{API: api, Log: slog.New(slog.DiscardHandler)}}
		if op, err := l.as("k").begin(t.Context(), "/v1/workspaces", nil); (err == nil) != good || good && op.ID != "op" {
			t.Errorf("%d bytes: %v, %v", size, op.ID, err)
		}
	}
}

func TestPassesAreBounded(t *testing.T) {
	t.Parallel()
	var p passes
	first, _, err := p.give("s", "secret", "k")
	if err != nil {
		t.Fatal(err)
	}
	for range maxPasses - 1 {
		if _, _, err := p.give("s", "secret", "k"); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := p.give("s", "secret", "k"); err == nil {
		t.Error("one more is given")
	}
	if _, _, err := p.give("s", "other", "o"); err != nil {
		t.Errorf("the tokens of one key are in the way of another: %v", err)
	}
	if pass, ok := p.take("s", first); !ok || pass.key != "secret" || pass.owner != "k" {
		t.Errorf("%+v, %t", pass, ok)
	}
	last, _, err := p.give("s", "secret", "k")
	if err != nil {
		t.Error("a pass that was used takes room")
	}
	p.given[last] = grantedPass{"s", "secret", "k", time.Now().Add(-time.Second)}
	if _, ok := p.take("s", last); ok {
		t.Error("a pass that has expired is good")
	}
}

func TestStreamsAreBounded(t *testing.T) {
	t.Parallel()
	var s streams
	var leave func()
	for range maxStreams {
		var err error
		if leave, err = s.enter("k"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.enter("k"); err == nil {
		t.Error("one more is open")
	}
	if _, err := s.enter("other"); err != nil {
		t.Error(err)
	}
	leave()
	if _, err := s.enter("k"); err != nil {
		t.Error(err)
	}
}
