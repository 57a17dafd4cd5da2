package boundjson_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/coppice-dev/coppice/internal/boundjson"
)

var small = boundjson.Bound{Name: "the test's message", Bytes: 4 << 10, Elements: 100, List: 20, Depth: 6, String: 100, Text: 300, Cut: 4, Keep: 3}

func decode(t *testing.T, text string, b boundjson.Bound) (any, error) {
	t.Helper()
	var whole, slow any
	err := boundjson.Decode(strings.NewReader(text), b, nil, &whole)
	err2 := boundjson.Decode(iotest.OneByteReader(strings.NewReader(text)), b, nil, &slow)
	if (err == nil) != (err2 == nil) || !reflect.DeepEqual(whole, slow) {
		t.Errorf("%.60s: %v, %v; byte by byte %v, %v", text, whole, err, slow, err2)
	}
	return whole, err
}

func TestBoundsRefuse(t *testing.T) {
	t.Parallel()
	for what, text := range map[string]string{
		"bytes":                  `{"a":1,` + strings.Repeat(" ", 5<<10) + `"b":2}`,
		"elements":               "[" + strings.Repeat("[1,1,1,1,1,1,1,1,1,1],", 15) + "1]",
		"elements in one list":   "[" + strings.Repeat("1,", 25) + "1]",
		"levels":                 strings.Repeat("[", 10) + strings.Repeat("]", 10),
		"characters in a number": "[" + strings.Repeat("1", 100) + "]",
	} {
		_, err := decode(t, text, small)
		if e, ok := errors.AsType[*boundjson.Error](err); !ok || e.What != what {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestBoundsCut(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 200)
	for text, want := range map[string]string{
		`{"a":"` + long + `","b":"y"}`:                              `{"a":"` + long[:100] + `","b":"y"}`,
		`{"a":"` + strings.Repeat("x", 96) + `\u0041\u0042z"}`:      `{"a":"` + strings.Repeat("x", 96) + `"}`,
		`{"a":"` + strings.Repeat("x", 94) + `\u0041\"z"}`:          `{"a":"` + strings.Repeat("x", 94) + `A"}`,
		`{"l":[{"args":["1","2","3","4,]","5"],"n":1},{"n":2}]}`:    `{"l":[{"args":["1","2","3"],"n":1},{"n":2}]}`,
		`{"l":[{"args":[1,2,3,[{}],{"x":[1,"]"]}],"n":1}]}`:         `{"l":[{"args":[1,2,3],"n":1}]}`,
		`[ 1 ,   2,` + "\n\t" + `{"a" : "b c" } ]`:                  `[1,2,{"a":"b c"}]`,
		"[" + strings.Repeat(`"`+long+`",`, 19) + `"` + long + `"]`: "",
	} {
		got, err := decode(t, text, small)
		if err != nil {
			t.Errorf("%.60s: %v", text, err)
			continue
		}
		if want == "" { // only the sum matters
			sum := 0
			for _, s := range got.([]any) { //nolint:forcetypeassert // it is written above
				if len(s.(string)) < boundjson.ShortString { //nolint:forcetypeassert // likewise
					t.Errorf("%d bytes are left of a string", len(s.(string))) //nolint:forcetypeassert // likewise
				}
				sum += len(s.(string)) //nolint:forcetypeassert // likewise
			}
			if sum > 20*boundjson.ShortString+small.Text {
				t.Errorf("%d bytes of text are kept", sum)
			}
			continue
		}
		var w any
		if err := json.Unmarshal([]byte(want), &w); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, w) {
			t.Errorf("%.80s\ngot  %v\nwant %v", text, got, w)
		}
	}
	for _, text := range []string{`tr ue`, `{"a":1}}`, `[1 2]`, `"\u"`, `{"a"`, `[1,2`, ``} {
		var v any
		if err := boundjson.Decode(strings.NewReader(text), small, nil, &v); (err == nil) != (json.NewDecoder(strings.NewReader(text)).Decode(&v) == nil) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestHeap decodes the message that made a heap of 8.5 GiB out of 31 MiB.
func TestHeap(t *testing.T) {
	type session struct{ A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P string }
	text := io.MultiReader(strings.NewReader(`{"sessions":[`), io.LimitReader(repeat("{},"), 31<<20), strings.NewReader(`{}]}`))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var out struct{ Sessions []session }
	err := boundjson.Decode(text, boundjson.Bound{Name: "it", Bytes: 32 << 20, Elements: 1 << 16, List: 512, Depth: 8, String: 4096, Text: 1 << 20}, nil, &out)
	runtime.ReadMemStats(&after)
	if _, ok := errors.AsType[*boundjson.Error](err); !ok {
		t.Errorf("it is read: %v", err)
	}
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 4<<20 {
		t.Errorf("%d bytes were allocated", grown)
	}
}

type repeat string

func (s repeat) Read(p []byte) (int, error) {
	n := 0
	for len(p)-n >= len(s) {
		n += copy(p[n:], s)
	}
	if n == 0 {
		return copy(p, s[:len(p)]), nil
	}
	return n, nil
}

func TestBudget(t *testing.T) {
	t.Parallel()
	b := &boundjson.Budget{Total: 1000, Share: 400, Free: 10}
	var held []*boundjson.Account
	for _, c := range []struct {
		owner string
		n     int
		want  error
	}{{"a", 410, nil}, {"a", 11, boundjson.ErrFull}, {"a", 10, nil}, {"b", 410, nil}, {"c", 411, boundjson.ErrFull}, {"c", 210, nil}, {"d", 11, boundjson.ErrFull}, {"d", 10, nil}} {
		a := b.Open(c.owner)
		held = append(held, a)
		if err := a.Grow(c.n); !errors.Is(err, c.want) {
			t.Errorf("%s takes %d: %v, want %v", c.owner, c.n, err, c.want)
		}
	}
	for _, a := range held {
		a.Close()
	}
	if used, full := b.Used(); used != 0 || full != 3 {
		t.Errorf("%d bytes are held, %d found no room", used, full)
	}
	a := b.Open("a")
	defer a.Close()
	var v any
	if err := boundjson.Decode(strings.NewReader(`["`+strings.Repeat("x", 500)+`"]`), boundjson.Bound{Bytes: 1 << 20, Elements: 9, List: 9, Depth: 9, String: 1 << 20, Text: 1 << 20}, a, &v); !errors.Is(err, boundjson.ErrFull) {
		t.Errorf("a message beyond the share: %v", err)
	}
}

func TestReserve(t *testing.T) {
	t.Parallel()
	b := &boundjson.Budget{Total: 1000, Share: 400, Free: 10}
	first, second := b.Open("a"), b.Open("a")
	if !first.Reserve(300) || second.Reserve(300) {
		t.Error("the share of an owner is reserved twice, or not at all")
	}
	if err := first.Grow(300); err != nil {
		t.Errorf("what was reserved: %v", err)
	}
	if used, full := b.Used(); used != 290 || full != 0 {
		t.Errorf("%d bytes are held, %d found no room", used, full)
	}
	first.Close()
	if !second.Reserve(300) {
		t.Error("there is room, and it is not reserved")
	}
	if err := second.Grow(411); !errors.Is(err, boundjson.ErrFull) {
		t.Errorf("more than was reserved and than there is: %v", err)
	}
	second.Close()
	if used, _ := b.Used(); used != 0 {
		t.Errorf("%d bytes are held", used)
	}
}

// FuzzDecode compares with encoding/json: what passes within the bounds is the same value.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"a":[1,2,{"b":"c\u0041\"d"}],"e":null}`))
	f.Add([]byte(`[[[[1,2,3,4,5]]]]`))
	f.Add([]byte(`{"a":"` + strings.Repeat("x", 200) + `"}`))
	wide := boundjson.Bound{Bytes: 1 << 20, Elements: 1 << 20, List: 1 << 20, Depth: 10000, String: 1 << 20, Text: 1 << 20}
	f.Fuzz(func(t *testing.T, b []byte) {
		var got, want any
		errWant := json.NewDecoder(bytes.NewReader(b)).Decode(&want)
		err := boundjson.Decode(bytes.NewReader(b), wide, nil, &got)
		if _, ok := errors.AsType[*boundjson.Error](err); !ok && ((err == nil) != (errWant == nil) || !reflect.DeepEqual(got, want)) {
			t.Errorf("got %v, %v; want %v, %v", got, err, want, errWant)
		}
		_ = boundjson.Decode(bytes.NewReader(b), small, nil, &got) // it must not panic
	})
}
