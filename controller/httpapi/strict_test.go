package httpapi

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi/strictjson"
	"github.com/coppice-dev/coppice/core"
)

// FuzzParseStrict wants what it accepts to be what encoding/json reads, and never a panic.
func FuzzParseStrict(f *testing.F) {
	for _, s := range []string{
		`{}`, `[]`, `null`, `1`, `"x"`, `{"a":{"b":[1,2.5e3,true,null]}}`, `{"a":1,"a":2}`, `{"a":1} x`, `{"a":"\u0000"}`, "{\"a\":\"\xff\"}", `{"a"`, `[1,`,
		strings.Repeat("[", 40) + strings.Repeat("]", 40), `{"\ud800":1}`, `-0`, `1e999`, ``, ` `, `{"count":2,"branch_name":"x"}`,
	} {
		f.Add([]byte(s))
	}
	schema := loadContract()["POST /v1/checkpoints/:checkpoint_id/fork"].body
	f.Fuzz(func(t *testing.T, body []byte) {
		got, err := strictjson.Parse(body, invalid)
		if err != nil {
			if core.CategoryOf(err) != core.Invalid {
				t.Fatalf("%q: %v", body, err)
			}
			return
		}
		var want any
		d := json.NewDecoder(strings.NewReader(string(body)))
		d.UseNumber()
		if err := d.Decode(&want); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("%q: got %#v, encoding/json has %#v, %v", body, got, want, err)
		}
		if err := schemaProblem("", schema.VisitJSON(got)); err != nil && core.CategoryOf(err) != core.Invalid {
			t.Fatalf("%q: %v", body, err)
		}
	})
}

// FuzzCursor wants every cursor to come back as it went, and anything else refused.
func FuzzCursor(f *testing.F) {
	for _, s := range []string{"", "MTpjaHB0", "x", "MTo", encodeCursor("ckpt_1"), encodeCursor("12:ckpt_1"), encodeCursor("' OR 1")} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		key, err := decodeCursor(s)
		if err != nil {
			if core.CodeOf(err) != core.CodeInvalidField {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		if key != "" {
			if again, err := decodeCursor(encodeCursor(key)); err != nil || again != key {
				t.Fatalf("%q: %q, %v", s, again, err)
			}
		}
		_, _, _ = parseTreeKey(key)
	})
}

// FuzzPathCursor wants the same of the cursors that hold a guest's path.
func FuzzPathCursor(f *testing.F) {
	for _, s := range []string{"", "x", "MTo", encodeCursor("/"), encodeCursor("/a/b"), encodeCursor("/\xff\n"), encodeCursor("/a\x00"), encodeCursor("a")} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		path, err := decodePathCursor(s)
		if err != nil {
			if core.CodeOf(err) != core.CodeInvalidField {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		if len(path) == 0 {
			return
		}
		if path[0] != '/' || strings.Contains(string(path), "\x00") {
			t.Fatalf("%q: %q", s, path)
		}
		if again, err := decodePathCursor(encodeCursor(string(path))); err != nil || string(again) != string(path) {
			t.Fatalf("%q: %q, %v", s, again, err)
		}
	})
}

// TestSlowBody sends headers and then nothing: the connection is not kept, whether the key is right or wrong.
func TestSlowBody(t *testing.T) {
	t.Parallel()
	slowBody(t, "k", http.StatusBadRequest, "did not come in time")
	slowBody(t, "wrong", http.StatusUnauthorized, "UNAUTHENTICATED")
}

func slowBody(t *testing.T, key string, status int, text string) {
	t.Helper()
	server := httptest.NewServer(newHandler(controller.New(controller.Config{}, knowingStore{}, nil, slog.New(slog.DiscardHandler)), slog.New(slog.DiscardHandler), 50*time.Millisecond))
	t.Cleanup(server.Close)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if _, err := fmt.Fprintf(conn, "POST /v1/workspaces HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{", key); err != nil {
		t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if b, err := io.ReadAll(res.Body); err != nil || res.StatusCode != status || !strings.Contains(string(b), text) {
		t.Errorf("%d %s, %v", res.StatusCode, b, err)
	}
}

// knowingStore knows every key but one and nothing else.
type knowingStore struct{ controller.Store }

type knowingTx struct{ controller.AllTx }

func (knowingStore) InTx(_ context.Context, _ controller.Scope, fn func(controller.AllTx) error) error {
	return fn(knowingTx{})
}

func (knowingTx) KeyByHash(_ context.Context, hash [32]byte) (controller.Key, error) {
	if hash == sha256.Sum256([]byte("wrong")) {
		return controller.Key{}, controller.ErrKeyEnded
	}
	return controller.Key{Scopes: []core.KeyScope{core.ScopeAdmin}}, nil
}

// TestEveryRouteIsListed compares the table of access with the contract: what is not in the table nobody may do, and what
// needs a key needs a scope.
func TestEveryRouteIsListed(t *testing.T) {
	t.Parallel()
	left := maps.Clone(routes)
	for path, op := range loadContract() {
		delete(left, op.id)
		if !op.listed {
			t.Errorf("%s (%s) is not in the table of access.go: nobody can use it; say which scopes it wants and which rate it counts for", path, op.id)
			continue
		}
		open := op.access.rate == controller.RateOpen || op.access.rate == ""
		if open == op.secured || open && len(op.access.scopes) > 0 || !open && len(op.access.scopes) == 0 && op.id != "getSelf" {
			t.Errorf("%s (%s): it needs a key: %v, rate %q, scopes %v", path, op.id, op.secured, op.access.rate, op.access.scopes)
		}
		for _, s := range op.access.scopes {
			if !s.Known() {
				t.Errorf("%s wants the scope %s, which no key can have", op.id, s)
			}
		}
	}
	for id := range left {
		t.Errorf("%s is in the table of access.go and not in the contract", id)
	}
}
