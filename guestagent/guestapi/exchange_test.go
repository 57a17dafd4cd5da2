package guestapi

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
)

// message returns the types of a request's body and of its answer's body.
func message(method, path string, status int) (request, answer any) {
	path, _, _ = strings.Cut(path, "?")
	if rest, ok := strings.CutPrefix(path, PathSessions+"/"); ok {
		_, verb, _ := strings.Cut(rest, "/")
		path = PathSession + "/" + verb
	}
	switch {
	case method == "POST" && path == PathSessions:
		request, answer = new(SessionSpec), new(Session)
	case path == PathSessions:
		answer = new(Sessions)
	case path == PathSession+"/wait", path == PathSession+"/":
		answer = new(Session)
	case path == PathFiles && method == "PUT":
		request, answer = new(string), new(FileInfo) // the recorded file is a JSON string
	case path == PathFiles:
		answer = new(FileList)
	case path == PathProcesses:
		answer = new(Processes)
	case path == PathPorts:
		answer = new(Ports)
	case path == PathHealth:
		answer = new(Health)
	case path == PathQuiesce:
		request, answer = new(QuiesceRequest), new(QuiesceResponse)
	case path == PathReseed:
		request, answer = new(ReseedRequest), new(ReseedResponse)
	case path == PathReseal:
		request, answer = new(ResealRequest), new(core.ResealReport)
	case path == PathRelease:
		request, answer = new(ReleaseRequest), new(ReleaseResponse)
	}
	if status >= 400 {
		answer = new(Problem)
	}
	return request, answer
}

// TestRecordedExchange compares today's types with a recorded exchange of an agent of version 1. No field may have
// disappeared or changed its meaning, because checkpoints keep agents of that version for ever.
func TestRecordedExchange(t *testing.T) {
	t.Parallel()
	var list []struct {
		Method, Path    string
		Request, Answer json.RawMessage
		Status          int
	}
	b, err := os.ReadFile("testdata/v1/exchange.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &list); err != nil {
		t.Fatal(err)
	}
	if len(list) < 20 {
		t.Fatalf("only %d exchanges are recorded", len(list))
	}
	for _, x := range list {
		request, answer := message(x.Method, x.Path, x.Status)
		for what, part := range map[string]struct {
			raw  json.RawMessage
			into any
		}{"request": {x.Request, request}, "answer": {x.Answer, answer}} {
			if len(part.raw) == 0 {
				continue
			}
			if part.into == nil {
				t.Errorf("%s %s: no type for its %s", x.Method, x.Path, what)
				continue
			}
			dec := json.NewDecoder(bytes.NewReader(part.raw))
			dec.DisallowUnknownFields()
			if err := dec.Decode(part.into); err != nil {
				t.Errorf("%s %s: %s: %v", x.Method, x.Path, what, err)
				continue
			}
			again, err := json.Marshal(part.into)
			if err != nil {
				t.Fatal(err)
			}
			var was, is any
			if err := json.Unmarshal(part.raw, &was); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(again, &is); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(was, is); diff != "" {
				t.Errorf("%s %s: the %s is written otherwise today:\n%s", x.Method, x.Path, what, diff)
			}
		}
	}
}

// TestRecordedHandshake checks the bytes of version 1's handshake and stuffing.
func TestRecordedHandshake(t *testing.T) {
	t.Parallel()
	var golden struct{ Nonce, Record, Data, Wire string }
	b, err := os.ReadFile("testdata/v1/handshake.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &golden); err != nil {
		t.Fatal(err)
	}
	raw := func(s string) []byte {
		b, err := hex.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	r := record{version: 1, nonce: [nonceLen]byte(raw(golden.Nonce))}
	if got := hex.EncodeToString(r.bytes()); got != golden.Record {
		t.Errorf("record %s, want %s", got, golden.Record)
	}
	var e encoder
	if got := hex.EncodeToString(e.encode(raw(golden.Data))); got != golden.Wire {
		t.Errorf("data on the wire %s, want %s", got, golden.Wire)
	}
	d := newDecoder(bytes.NewReader(append(raw(golden.Wire), raw(golden.Record)...)))
	buf := make([]byte, 100)
	n, rec, err := d.next(buf)
	if err != nil || rec == nil || *rec != r || hex.EncodeToString(buf[:n]) != golden.Data+golden.Record[:2*(magicLen-1)] {
		t.Errorf("decoded %x, %+v, %v", buf[:n], rec, err)
	}
}
