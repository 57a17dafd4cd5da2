package arbor

import (
	"testing"
	"time"
)

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
