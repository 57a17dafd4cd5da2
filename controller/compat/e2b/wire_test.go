package e2b

import (
	"encoding/hex"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

func TestHostTarget(t *testing.T) {
	t.Parallel()
	id := "06e5bqv7z0f3m8k2h1t9r4w6xc"
	for host, want := range map[string]target{
		"49983-" + id + ".sandbox.example":                  {ID: id, Port: 49983},
		"3000-" + strings.ToUpper(id) + ".Sandbox.Example.": {ID: id, Port: 3000},
		"3000-" + id + ".sandbox.example:8443":              {ID: id, Port: 3000},
		"3000-" + id + ".other.example":                     {},
		"3000-" + id:                                        {},
		"03000-" + id + ".sandbox.example":                  {},
		"+3-" + id + ".sandbox.example":                     {},
		"0-" + id + ".sandbox.example":                      {},
		"65536-" + id + ".sandbox.example":                  {},
		"3000-" + id + "x.sandbox.example":                  {},
		"api.sandbox.example":                               {},
		"":                                                  {},
	} {
		if got, ok := sandboxhost.Decode(host, "sandbox.example"); got != want || ok != (want != target{}) {
			t.Errorf("%q: %v, %v", host, got, ok)
		}
	}
}

func FuzzHost(f *testing.F) {
	for _, s := range []string{"49983-06e5bqv7z0f3m8k2h1t9r4w6xc.sandbox.example", "[::1]:3000", "localhost:1", "a.b-c:x", "-.", "1-.sandbox.example"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, host string) {
		for _, domain := range []string{"", "sandbox.example"} {
			hostAllowed(host, domain)
			got, ok := sandboxhost.Decode(host, domain)
			if ok && (!bareID.MatchString(got.ID) || got.Port < 1 || got.Port > 65535) {
				t.Errorf("%q is %+v", host, got)
			}
			if ok && domain != "" && !hostAllowed(host, domain) {
				t.Errorf("%q leads to a sandbox, but is not served", host)
			}
		}
	})
}

func FuzzSignature(f *testing.F) {
	f.Add("/a", "read", "root", "key.mac", int64(0))
	f.Add("/a:read", "", "", "", int64(-1))
	f.Fuzz(func(t *testing.T, path, op, user, token string, expires int64) {
		k := link{path: path, op: op, user: user, expires: expires, signature: signature(path, op, user, token, expires)}
		if ok, err := k.verify(token, time.Unix(0, 0)); expires >= 0 && (!ok || err != nil) {
			t.Errorf("%+v: %v, %v", k, ok, err)
		}
		k.signature += "x"
		if ok, _ := k.verify(token, time.Unix(0, 0)); ok {
			t.Errorf("%+v was accepted", k)
		}
	})
}

func FuzzToken(f *testing.F) {
	tk := tokens{secret: []byte("0123456789abcdef0123456789abcdef")}
	f.Add("ws_a", tk.issue(purposeEnvd, "ws_a", "key_b"))
	f.Add("ws_b", "b..")
	f.Fuzz(func(t *testing.T, ws, token string) {
		key, ok := tk.check(purposeEnvd, ws, token)
		if ok && tk.issue(purposeEnvd, ws, key) != token {
			t.Errorf("%q was accepted for %q", token, ws)
		}
		if ok && ws != "ws_a" {
			t.Errorf("%q was made without the secret", token)
		}
		apiKey(token)
	})
}

func FuzzPartName(f *testing.F) {
	f.Add(`form-data; name="file"; filename="/b c"`)
	f.Add(`form-data; name="file"; filename*=UTF-8''%2fa`)
	f.Add(`attachment; name=file`)
	f.Fuzz(func(t *testing.T, header string) {
		field, name := partName(header)
		if kind, _, err := mime.ParseMediaType(header); (field != "" || name != "") && (err != nil || kind != "form-data") {
			t.Errorf("%q names %q, %q", header, field, name)
		}
		if p := (account{home: "/root"}).resolve(name); p == "" || p[0] != '/' || strings.Contains(p+"/", "/../") {
			t.Errorf("%q is at %q", name, p)
		}
	})
}

func FuzzMetadata(f *testing.F) {
	f.Add("a b", "c&d=ü")
	f.Add("", "\x00")
	f.Fuzz(func(t *testing.T, key, value string) {
		want := map[string]string{key: value}
		labels, err := labelsOf(want, "base")
		if err != nil {
			return
		}
		for name, v := range labels {
			if len(name) > 63 || len(v) > partBytes {
				t.Errorf("label %s has %d bytes", name, len(v))
			}
		}
		got := metadataOf(labels)
		want = map[string]string{strings.ToValidUTF8(key, "\ufffd"): strings.ToValidUTF8(value, "\ufffd")}
		if len(strings.ToValidUTF8(key, "")) == len(key) && len(strings.ToValidUTF8(value, "")) == len(value) && !maps.Equal(got, want) {
			t.Errorf("%q became %q", want, got)
		}
		twice := url.QueryEscape(url.QueryEscape(key) + "=" + url.QueryEscape(value))
		filter, err := metadataFilter(twice)
		if err != nil || !maps.Equal(filter, map[string]string{key: value}) {
			t.Errorf("%q, %v", filter, err)
		}
	})
}

func FuzzMetadataFilter(f *testing.F) {
	f.Add("a%2520b%3Dc")
	f.Fuzz(func(_ *testing.T, value string) { _, _ = metadataFilter(value) })
}

func FuzzRange(f *testing.F) {
	f.Add("bytes=0-", int64(10))
	f.Add("bytes=-5", int64(3))
	f.Add("bytes=9-8", int64(10))
	f.Fuzz(func(t *testing.T, header string, size int64) {
		if size < 0 {
			return
		}
		from, to, _, err := byteRange(header, size)
		if err == nil && (from < 0 || from > to || to > size) {
			t.Errorf("%q of %d bytes: %d to %d", header, size, from, to)
		}
	})
}

const guestSample = `cpu  100 0 100 800 0 0 0 0 0 0
cpu0 50 0 50 400 0 0 0 0 0 0
cpu1 50 0 50 400 0 0 0 0 0 0
intr 1 2 3
MemTotal:        1024 kB
MemFree:          100 kB
MemAvailable:     256 kB
Cached:            64 kB
disk: /dev/vda 4096 1024 3072 25% /
cpu  110 0 105 885 0 0 0 0 0 0
`

func TestSample(t *testing.T) {
	t.Parallel()
	got, ok := parseSample(guestSample)
	want := sample{cpus: 2, cpuPercent: 15, memTotal: 1 << 20, memUsed: 768 << 10, memCache: 64 << 10, diskTotal: 4 << 20, diskUsed: 1 << 20}
	if !ok || got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if _, ok := parseSample("sh: not found"); ok {
		t.Error("a guest without its programs has metrics")
	}
}

func FuzzSample(f *testing.F) {
	f.Add(guestSample)
	f.Add("cpu 9223372036854775807 9223372036854775807 0 0 0 0 0 0\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, _ := parseSample(text)
		if !(s.cpuPercent >= 0 && s.cpuPercent <= 100) || s.memUsed < 0 || s.memUsed > s.memTotal || s.diskTotal < 0 || s.diskUsed < 0 {
			t.Errorf("%+v", s)
		}
	})
}

func FuzzUploadMetadata(f *testing.F) {
	f.Add("X-Metadata-A", "b")
	f.Add("X-Metadata-", "")
	f.Fuzz(func(t *testing.T, name, value string) {
		got, err := uploadMetadata(http.Header{name: {value}})
		if err != nil {
			return
		}
		for key, v := range got {
			if key == "" || len(attributePrefix)+len(key) > 255 || len(v) > maxMetadataBytes {
				t.Errorf("%q: %q", key, v)
			}
		}
	})
}

func TestKeyForms(t *testing.T) {
	t.Parallel()
	if got := apiKey(WrapKey("cpk_a_b")); got != "cpk_a_b" {
		t.Error(got)
	}
	if got := apiKey("e2b_zz"); got != "e2b_zz" {
		t.Error(got)
	}
	if got := apiKey("e2b_" + hex.EncodeToString(make([]byte, maxToken))); got != "" {
		t.Error("a key has no bound")
	}
}

func TestIssuedIsBounded(t *testing.T) {
	t.Parallel()
	var i issued
	for n := range 3 * maxIssued {
		i.add(strconv.Itoa(n), "first")
	}
	if len(i.now)+len(i.old) > maxIssued {
		t.Errorf("%d are remembered", len(i.now)+len(i.old))
	}
	i.add("quiet", "other")
	for n := range 3 * maxIssued {
		i.add("x"+strconv.Itoa(n), "first")
	}
	if got := i.keys("quiet"); len(got) != 1 {
		t.Error("one key has driven another out")
	}
	for n := range 2 * maxIssuedKeys {
		i.add("ws", strconv.Itoa(n))
		i.add("ws", "again")
	}
	keys := i.keys("ws")
	if len(keys) != maxIssuedKeys || keys[0] != "again" || keys[1] != strconv.Itoa(2*maxIssuedKeys-1) {
		t.Errorf("%v", keys)
	}
}

func TestKeepalive(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]time.Duration{
		"": defaultKeepalive, "x": defaultKeepalive, "0": defaultKeepalive, "-1": defaultKeepalive, "50": 50 * time.Second, "9999999999": maxKeepalive,
	} {
		if got := keepalive(http.Header{headerKeepalive: {value}}); got != want {
			t.Errorf("%q: %v, want %v", value, got, want)
		}
	}
}

// An idle stream gets signs of life until its end.
func TestKeepAliveOfIdleStream(t *testing.T) {
	t.Parallel()
	sent := make(chan string)
	b := &beating[string]{send: func(m string) error { sent <- m; return nil }, pulse: func() string { return "pulse" }}
	still := b.beat(t.Context(), time.Millisecond)
	for range 2 {
		if m := <-sent; m != "pulse" {
			t.Error(m)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		still()
	}()
	for {
		select {
		case <-sent: // one may be under way
		case <-done:
			return
		}
	}
}

// What a watcher has read is remembered, in bounds; the watchers of a fork are its own.
func TestCursorsOfWatchers(t *testing.T) {
	t.Parallel()
	w := &watchers{}
	k := watcherKey{"ws_a", "w"}
	w.moveTo(k, 7)
	w.moveTo(k, 3)
	if got := w.cursor(k); got != 7 {
		t.Errorf("the watcher went back to %d", got)
	}
	if got := w.cursor(watcherKey{"ws_fork", "w"}); got != 0 {
		t.Errorf("a fork's watcher is at %d", got)
	}
	for n := range 3 * maxCursors {
		w.moveTo(watcherKey{"ws_b", strconv.Itoa(n)}, 1)
	}
	if len(w.now)+len(w.old) > maxCursors {
		t.Errorf("%d are remembered", len(w.now)+len(w.old))
	}
}

func TestMetadataOfUploads(t *testing.T) {
	t.Parallel()
	got, err := uploadMetadata(http.Header{"X-Metadata-Some-Key": {"v"}, "Content-Type": {"x"}})
	if err != nil || !maps.Equal(got, map[string]string{"some-key": "v"}) {
		t.Errorf("%v, %v", got, err)
	}
	for name, h := range map[string]http.Header{
		"no key": {"X-Metadata-": {"v"}}, "two values": {"X-Metadata-A": {"v", "w"}}, "a long key": {"X-Metadata-" + strings.Repeat("x", maxMetadataKey+1): {"v"}},
		"long values": {"X-Metadata-A": {strings.Repeat("x", maxMetadataBytes/2)}, "X-Metadata-B": {strings.Repeat("x", maxMetadataBytes/2)}},
	} {
		if _, err := uploadMetadata(h); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestFilesOfAForm(t *testing.T) {
	t.Parallel()
	part := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/a/../b c\"\r\n\r\nx\r\n"
	for n, want := range map[int]bool{0: true, 1: true, maxUploadFiles: true, maxUploadFiles + 1: false} {
		got := 0
		err := eachFile(multipart.NewReader(strings.NewReader(strings.Repeat(part, n)+"--b--\r\n"), "b"), "", func(name string, from io.Reader) error {
			if b, err := io.ReadAll(from); name != "/a/../b c" || string(b) != "x" {
				t.Errorf("%q: %q, %v", name, b, err)
			}
			got++
			return nil
		})
		if want != (err == nil) || got != min(n, maxUploadFiles) {
			t.Errorf("%d files: %d were written, %v", n, got, err)
		}
	}
}

// deadlines notes the deadlines of reading.
type deadlines struct {
	http.ResponseWriter
	set []time.Time
}

func (d *deadlines) SetReadDeadline(t time.Time) error {
	d.set = append(d.set, t)
	return nil
}

// A body has its time before anybody looks at a key, and has it no longer when it has been read.
func TestBodiesHaveATime(t *testing.T) {
	t.Parallel()
	l := &layer{}
	l.control = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = shared.HurriedBody{ReadCloser: r.Body, Writer: w}
		if err := readJSON(r, new(map[string]any)); err != nil {
			t.Error(err)
		}
	})
	began := time.Now()
	w := &deadlines{ResponseWriter: httptest.NewRecorder()}
	r := httptest.NewRequest(http.MethodPost, "http://127.0.0.1/sandboxes", strings.NewReader("{}"))
	l.ServeHTTP(w, r)
	if len(w.set) < 2 || w.set[0].Before(began.Add(shared.BodyTime)) || !w.set[len(w.set)-1].IsZero() {
		t.Errorf("%v", w.set)
	}
	w.set = nil
	l.control = http.NotFoundHandler() // the body is not read
	l.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "http://127.0.0.1/sandboxes", strings.NewReader("{}")))
	if len(w.set) != 1 || w.set[0].IsZero() {
		t.Errorf("not read: %v", w.set)
	}
	w.set = nil
	l.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://127.0.0.1/sandboxes", http.NoBody))
	if len(w.set) != 0 {
		t.Errorf("without a body: %v", w.set)
	}
}
