package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/blobtest"
)

const attempts = 4

// eager leaves almost no pause between attempts.
func eager(c *Config) { c.Attempts, c.Backoff = attempts, time.Millisecond }

// impatient is for a server that does not answer. On a very busy machine, even a good answer may take longer and an
// attempt may fail. So every test that uses it leaves enough attempts.
func impatient(c *Config) { c.Stall, c.MinRate = 2*time.Second, 1<<20 }

// asNeeded is impatient if one of the faults makes the store wait.
func asNeeded(faults ...tests3.Fault) func(*Config) {
	for _, f := range faults {
		switch f.Kind { //nolint:exhaustive // the faults that make the store wait
		case tests3.Stall, tests3.StallRequest, tests3.Slow, tests3.SlowRequest:
			return impatient
		}
	}
	return func(*Config) {}
}

// faulty is a store behind a proxy that causes faults.
type faulty struct {
	*Store
	proxy  *tests3.Proxy
	direct *Store
}

func openFaulty(t *testing.T, server *tests3.Server, change ...func(*Config)) faulty {
	t.Helper()
	bucket, proxy := server.Bucket(t), server.Proxy(t)
	return faulty{
		Store:  open(t, server, proxy.Address, bucket, "p", append([]func(*Config){eager}, change...)...),
		proxy:  proxy,
		direct: open(t, server, server.Address, bucket, "p"),
	}
}

const (
	object = "packs/object"
	oneBit = partSize / 2
	big    = 2*partSize + 12345
)

// TestPutFaults puts an object while one fault after the other happens: it is stored completely, and once.
func TestPutFaults(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	for name, c := range map[string]struct {
		size   int
		faults []tests3.Fault
	}{
		"nothing":                 {partSize, nil},
		"nothing, in parts":       {big, nil},
		"503":                     {10_000, []tests3.Fault{{Kind: tests3.Answer, Times: attempts - 1, Status: http.StatusServiceUnavailable, Code: "SlowDown"}}},
		"500":                     {10_000, []tests3.Fault{{Kind: tests3.Answer, Times: 1, Status: http.StatusInternalServerError, Code: "InternalError"}}},
		"409":                     {10_000, []tests3.Fault{{Kind: tests3.Answer, Times: 1, Status: http.StatusConflict, Code: "ConditionalRequestConflict"}}},
		"lost answer":             {10_000, []tests3.Fault{{Kind: tests3.Drop, Of: tests3.Puts, Times: 1}}},
		"lost answers":            {10_000, []tests3.Fault{{Kind: tests3.Drop, Of: tests3.Puts, Times: 1}, {Kind: tests3.Drop, Of: tests3.Heads, Times: 1}}},
		"reset in the body":       {partSize, []tests3.Fault{{Kind: tests3.ResetRequest, N: 5 << 20, Of: tests3.Puts, Times: attempts - 1}}},
		"stall in the body":       {partSize, []tests3.Fault{{Kind: tests3.StallRequest, N: 5 << 20, Of: tests3.Puts, Times: 1}}},
		"stall after the body":    {10_000, []tests3.Fault{{Kind: tests3.Stall, Of: tests3.Puts, Times: 1}}},
		"another bit":             {partSize, []tests3.Fault{{Kind: tests3.FlipRequest, N: oneBit, Of: tests3.Puts, Times: 1}}},
		"parts: all of it":        {big, everyPart()},
		"parts: another bit":      {big, []tests3.Fault{{Kind: tests3.FlipRequest, N: oneBit, Of: tests3.Parts, Times: 1}}},
		"parts: 503 at the end":   {big, []tests3.Fault{{Kind: tests3.Answer, Of: tests3.Completes, Times: 1, Status: http.StatusServiceUnavailable, Code: "SlowDown"}}},
		"parts: lost at the end":  {big, []tests3.Fault{{Kind: tests3.Drop, Of: tests3.Completes, Times: 1}}},
		"parts: 409 at the end":   {big, []tests3.Fault{{Kind: tests3.Answer, Of: tests3.Completes, Times: 1, Status: http.StatusConflict, Code: "ConditionalRequestConflict"}}},
		"parts: error in a 200":   {big, []tests3.Fault{{Kind: tests3.Answer, Of: tests3.Completes, Times: 1, Status: http.StatusOK, Code: "InternalError"}}},
		"parts: upload was swept": {big, []tests3.Fault{{Kind: tests3.Answer, Of: tests3.Completes, Times: 1, Status: http.StatusNotFound, Code: "NoSuchUpload"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := openFaulty(t, server, asNeeded(c.faults...), func(cfg *Config) {
				if len(c.faults) > 1 { // all of them may hit the attempts of one request
					cfg.Attempts += len(c.faults)
				}
			})
			data := blobtest.Bytes(1, c.size)
			s.proxy.Add(c.faults...)
			if err := blobtest.Put(t.Context(), s, object, data); err != nil {
				t.Fatal(err)
			}
			got, err := blobtest.Get(t.Context(), s.direct, object, 0, int64(c.size)+1)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes of %d are stored, %v", len(got), c.size, err)
			}
			if n := uploads(t, server, s); n > 1 { // uploads that were abandoned for another attempt; the server has not seen their end
				t.Errorf("%d uploads are left", n)
			}
		})
	}
}

func everyPart() []tests3.Fault {
	return []tests3.Fault{
		{Kind: tests3.Answer, Of: tests3.Begins, Times: 1, Status: http.StatusServiceUnavailable, Code: "SlowDown"},
		{Kind: tests3.Drop, Of: tests3.Parts, Times: 1},
		{Kind: tests3.ResetRequest, N: 1 << 20, Of: tests3.Parts, Skip: 1, Times: 1},
		{Kind: tests3.StallRequest, N: 1 << 20, Of: tests3.Parts, Skip: 2, Times: 1},
		{Kind: tests3.Answer, Of: tests3.Parts, Skip: 1, Times: 1, Status: http.StatusInternalServerError, Code: "InternalError"},
	}
}

func uploads(t *testing.T, server *tests3.Server, s faulty) int {
	t.Helper()
	found, err := server.Client(t).ListMultipartUploads(t.Context(), s.cfg.Bucket, "", "", "", "", page)
	if err != nil {
		t.Fatal(err)
	}
	return len(found.Uploads)
}

// TestSlowPut: the server takes an object so slowly, without ever stalling, that it needs half a minute. At most nine
// seconds are allowed.
func TestSlowPut(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server, func(c *Config) { c.Stall, c.MinRate = 4*time.Second, 64<<20 })
	s.proxy.Add(tests3.Fault{Kind: tests3.SlowRequest, N: 32 << 10, Every: 50 * time.Millisecond, Of: tests3.Puts, Times: 1})
	if err := blobtest.Put(t.Context(), s, object, blobtest.Bytes(1, partSize)); err != nil {
		t.Error(err)
	}
	if n := len(s.proxy.Seen(tests3.Puts)); n < 2 {
		t.Errorf("%d requests, want that the first was given up", n)
	}
}

// TestGetFaults reads an object while faults happen: every byte arrives, and no byte is requested again that had
// arrived.
func TestGetFaults(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	const size = 3 << 20
	for name, faults := range map[string][]tests3.Fault{
		"nothing":              nil,
		"503":                  {{Kind: tests3.Answer, Of: tests3.Gets, Times: attempts - 1, Status: http.StatusServiceUnavailable, Code: "SlowDown"}},
		"reset before it":      {{Kind: tests3.Reset, Of: tests3.Gets, Times: attempts - 1}},
		"cut in the middle":    {{Kind: tests3.Cut, N: 1000, Of: tests3.Gets, Times: attempts - 1}},
		"reset in the middle":  {{Kind: tests3.Reset, N: 1000, Of: tests3.Gets, Times: attempts - 1}},
		"reset often":          {{Kind: tests3.Cut, N: enough, Of: tests3.Gets, Times: 2}, {Kind: tests3.Reset, N: 10, Of: tests3.Gets, Times: attempts - 1}},
		"stall before it":      {{Kind: tests3.Stall, Of: tests3.Gets, Times: 1}},
		"stall in the middle":  {{Kind: tests3.Stall, N: 2 << 20, Of: tests3.Gets, Times: 1}},
		"a byte at a time":     {{Kind: tests3.Slow, Of: tests3.Gets, Times: 1, Every: 10 * time.Millisecond}},
		"truncated":            {{Kind: tests3.Truncate, N: 1 << 20, Of: tests3.Gets, Times: 1}},
		"truncated to nothing": {{Kind: tests3.Truncate, N: 0, Of: tests3.Gets, Times: 1}},
		"truncated with a 200": {{Kind: tests3.Whole, N: 1 << 20, Of: tests3.Gets, Times: 1}},
		"the whole instead":    {{Kind: tests3.Whole, N: size, Of: tests3.Gets, Times: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := openFaulty(t, server, asNeeded(faults...))
			data := blobtest.Bytes(2, size)
			if err := blobtest.Put(t.Context(), s.direct, object, data); err != nil {
				t.Fatal(err)
			}
			s.proxy.Add(faults...)
			for _, c := range []struct{ off, n int64 }{{0, size}, {7, size - 9}, {5, 10 * size}} {
				got, err := blobtest.Get(t.Context(), s, object, c.off, c.n)
				if want := data[c.off:min(c.off+c.n, size)]; err != nil || !bytes.Equal(got, want) {
					t.Fatalf("%d from %d on: %d bytes, %v", c.n, c.off, len(got), err)
				}
			}
		})
	}
}

// TestResumedFromThere checks the range of the request after a reset.
func TestResumedFromThere(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server)
	data := blobtest.Bytes(2, 3<<20)
	if err := blobtest.Put(t.Context(), s.direct, object, data); err != nil {
		t.Fatal(err)
	}
	s.proxy.Add(tests3.Fault{Kind: tests3.Cut, N: 2 << 20, Of: tests3.Gets, Times: 1})
	got, err := blobtest.Get(t.Context(), s, object, 0, 3<<20)
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	var ranges []string
	for _, r := range s.proxy.Seen(tests3.Gets) {
		ranges = append(ranges, r.Header.Get("Range"))
	}
	if len(ranges) != 2 || ranges[0] != "bytes=0-3145727" || ranges[1] != "bytes=2097152-3145727" {
		t.Errorf("asked for %q", ranges)
	}
}

// TestReadsNoMore: the store disappears for good after an attempt has brought enough bytes to count as a success.
func TestReadsNoMore(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server)
	if err := blobtest.Put(t.Context(), s.direct, object, blobtest.Bytes(2, 3<<20)); err != nil {
		t.Fatal(err)
	}
	s.proxy.Add(
		tests3.Fault{Kind: tests3.Cut, N: 2 << 20, Of: tests3.Gets, Times: 1},
		tests3.Fault{Kind: tests3.Reset, Of: tests3.Gets},
	)
	got, err := blobtest.Get(t.Context(), s, object, 0, 3<<20)
	if len(got) != 2<<20 || core.CodeOf(err) != core.CodeStoreUnavailable {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if n := len(s.proxy.Seen(tests3.Gets)); n > 1+2*attempts { // net/http repeats some requests itself
		t.Errorf("%d requests", n)
	}
}

// call is a call of each method of a store.
type call struct {
	name string
	do   func(ctx context.Context, b blob.Blobs) error
}

var calls = []call{
	{"put", func(ctx context.Context, b blob.Blobs) error { return blobtest.Put(ctx, b, "new", []byte("x")) }},
	{"put in parts", func(ctx context.Context, b blob.Blobs) error {
		return blobtest.Put(ctx, b, "new-big", blobtest.Bytes(1, partSize+1))
	}},
	{"get", func(ctx context.Context, b blob.Blobs) error {
		_, err := blobtest.Get(ctx, b, object, 0, 10)
		return err
	}},
	{"stat", func(ctx context.Context, b blob.Blobs) error {
		_, err := b.Stat(ctx, object)
		return err
	}},
	{"list", func(ctx context.Context, b blob.Blobs) error {
		for _, err := range b.List(ctx, "") {
			if err != nil {
				return err
			}
		}
		return nil
	}},
	{"delete", func(ctx context.Context, b blob.Blobs) error { return b.Delete(ctx, "gone") }},
	{"sweep", func(ctx context.Context, b blob.Blobs) error { return b.Sweep(ctx, time.Now().Add(-time.Hour)) }},
}

// TestEveryCallFails: each call meets a permanent fault. It fails in bounded time with the right code, names the store
// and shows no secret; without the fault it works again.
func TestEveryCallFails(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	for name, c := range map[string]struct {
		fault tests3.Fault
		down  bool
		want  core.Code
		most  int // requests
	}{
		"down":             {down: true, want: core.CodeStoreUnavailable},
		"503":              {fault: tests3.Fault{Kind: tests3.Answer, Status: http.StatusServiceUnavailable, Code: "SlowDown"}, want: core.CodeStoreUnavailable, most: attempts},
		"500":              {fault: tests3.Fault{Kind: tests3.Answer, Status: http.StatusInternalServerError, Code: "InternalError"}, want: core.CodeStoreUnavailable, most: attempts},
		"501":              {fault: tests3.Fault{Kind: tests3.Answer, Status: http.StatusNotImplemented, Code: "NotImplemented"}, want: core.CodeStoreUnavailable, most: 1},
		"403":              {fault: tests3.Fault{Kind: tests3.Answer, Status: http.StatusForbidden, Code: "AccessDenied"}, want: core.CodeStoreAuth, most: deniedAttempts},
		"401":              {fault: tests3.Fault{Kind: tests3.Answer, Status: http.StatusUnauthorized, Code: "Unauthorized"}, want: core.CodeStoreAuth, most: 1},
		"an expired token": {fault: tests3.Fault{Kind: tests3.Answer, Status: http.StatusBadRequest, Code: "ExpiredToken"}, want: core.CodeStoreAuth, most: 1},
		"no bucket":        {fault: tests3.Fault{Kind: tests3.Answer, Status: http.StatusNotFound, Code: "NoSuchBucket"}, want: core.CodeStoreUnavailable, most: 1},
		"resets":           {fault: tests3.Fault{Kind: tests3.Reset}, want: core.CodeStoreUnavailable, most: 2 * attempts}, // net/http repeats some requests itself
		"stalls":           {fault: tests3.Fault{Kind: tests3.Stall}, want: core.CodeStoreUnavailable, most: attempts},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var all sync.WaitGroup
			for _, call := range calls {
				if name == "no bucket" && (call.name == "stat" || call.name == "put in parts") { // the answer to a HEAD does not say so
					continue
				}
				s := openFaulty(t, server, asNeeded(c.fault))
				if err := blobtest.Put(t.Context(), s.direct, object, []byte("0123456789")); err != nil {
					t.Fatal(err)
				}
				if c.down {
					s.proxy.Down(t)
				} else {
					s.proxy.Add(c.fault)
				}
				all.Go(func() {
					err := call.do(t.Context(), s)
					if core.CodeOf(err) != c.want {
						t.Errorf("%s: got %v (%s), want %s", call.name, err, core.CodeOf(err), c.want)
					} else if m := core.MessageOf(err); !strings.Contains(m, s.proxy.Address) || !strings.Contains(m, s.cfg.Bucket) || strings.Contains(err.Error(), server.SecretKey) {
						t.Errorf("%s: the message is %q", call.name, m)
					}
					if n := len(s.proxy.Seen(nil)); n > c.most {
						t.Errorf("%s: %d requests, want %d at most", call.name, n, c.most)
					}
					s.proxy.Clear()
					s.proxy.Up(t)
					if err := call.do(t.Context(), s); err != nil {
						t.Errorf("%s afterwards: %v", call.name, err)
					}
				})
			}
			all.Wait()
		})
	}
}

// TestDeniedForAMoment: MinIO denies a write whose directory a delete removes at the same moment. The write is tried
// again.
func TestDeniedForAMoment(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server)
	s.proxy.Add(tests3.Fault{Kind: tests3.Answer, Times: deniedAttempts - 1, Status: http.StatusForbidden, Code: "AccessDenied"})
	if err := blobtest.Put(t.Context(), s, object, []byte("x")); err != nil {
		t.Error(err)
	}
	if n := len(s.proxy.Seen(nil)); n != deniedAttempts {
		t.Errorf("%d requests", n)
	}
}

// TestEveryCallIsCancelled cancels calls that wait for a server.
func TestEveryCallIsCancelled(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server, func(c *Config) { c.Stall = time.Hour })
	s.proxy.Add(tests3.Fault{Kind: tests3.Stall})
	cause := errors.New("the operation was given up")
	for _, call := range calls {
		ctx, cancel := context.WithCancelCause(t.Context())
		seen := len(s.proxy.Seen(nil))
		go func() {
			for len(s.proxy.Seen(nil)) == seen && ctx.Err() == nil {
				<-time.After(time.Millisecond)
			}
			cancel(cause)
		}()
		if err := call.do(ctx, s); !errors.Is(err, cause) {
			t.Errorf("%s: got %v, want the cause", call.name, err)
		}
		cancel(nil)
	}
}

// TestWrongBytes reads an object whose bytes change on the way. The backend does not know the right bytes; the reader
// does, and reads again.
func TestWrongBytes(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server)
	data := blobtest.Bytes(3, 10_000)
	if err := blobtest.Put(t.Context(), s.direct, object, data); err != nil {
		t.Fatal(err)
	}
	s.proxy.Add(tests3.Fault{Kind: tests3.Flip, N: 5000, Of: tests3.Gets, Times: 1})
	got, err := blobtest.Get(t.Context(), s, object, 0, 10_000)
	if err != nil || bytes.Equal(got, data) || core.DigestOf(got) == core.DigestOf(data) {
		t.Errorf("the first time: %d bytes, %v", len(got), err)
	}
	if got, err := blobtest.Get(t.Context(), s, object, 0, 10_000); err != nil || !bytes.Equal(got, data) {
		t.Errorf("the second time: %d bytes, %v", len(got), err)
	}
}

// TestDeletedWhileRead deletes an object between two answers.
func TestDeletedWhileRead(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server)
	if err := blobtest.Put(t.Context(), s.direct, object, blobtest.Bytes(3, 3<<20)); err != nil {
		t.Fatal(err)
	}
	s.proxy.Add(
		tests3.Fault{Kind: tests3.Reset, N: 1000, Of: tests3.Gets, Times: 1},
		tests3.Fault{Kind: tests3.Answer, Of: tests3.Gets, Times: 1, Status: http.StatusNotFound, Code: "NoSuchKey"},
	)
	if _, err := blobtest.Get(t.Context(), s, object, 0, 3<<20); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

// TestShrinksWhileRead: the second answer comes from another, shorter object.
func TestShrinksWhileRead(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server)
	if err := blobtest.Put(t.Context(), s.direct, object, blobtest.Bytes(3, 3<<20)); err != nil {
		t.Fatal(err)
	}
	s.proxy.Add(
		tests3.Fault{Kind: tests3.Reset, N: 1000, Of: tests3.Gets, Times: 1},
		tests3.Fault{Kind: tests3.Answer, Of: tests3.Gets, Status: http.StatusRequestedRangeNotSatisfiable, Code: "InvalidRange"},
	)
	if _, err := blobtest.Get(t.Context(), s, object, 0, 3<<20); core.CodeOf(err) != core.CodeStoreUnavailable {
		t.Errorf("got %v, want STORE_UNAVAILABLE", err)
	}
}

// TestCredentialsExpire: the store refuses credentials in the middle of an upload. New ones are requested once. Then
// the upload goes on, or it fails and leaves nothing behind.
func TestCredentialsExpire(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	good := Credentials{AccessKey: server.AccessKey, SecretKey: server.SecretKey}
	data := blobtest.Bytes(4, big)
	expired := tests3.Fault{Kind: tests3.Answer, Of: tests3.Parts, Skip: 2, Times: 1, Status: http.StatusForbidden, Code: "ExpiredToken"}
	for name, c := range map[string]struct {
		renew  func(context.Context) (Credentials, error)
		always bool
		want   core.Code
	}{
		"renewed":             {func(context.Context) (Credentials, error) { return good, nil }, false, ""},
		"there are no others": {nil, false, core.CodeStoreAuth},
		"refused again":       {func(context.Context) (Credentials, error) { return good, nil }, true, core.CodeStoreAuth},
		"no others available": {func(context.Context) (Credentials, error) { return good, errors.New("no") }, false, core.CodeStoreAuth},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int32
			s := openFaulty(t, server, func(cfg *Config) {
				if c.renew != nil {
					cfg.Credentials.Renew = func(ctx context.Context) (Credentials, error) {
						asked.Add(1)
						return c.renew(ctx)
					}
				}
			})
			fault := expired
			if c.always {
				fault.Times = 0
			}
			s.proxy.Add(fault)
			err := blobtest.Put(t.Context(), s, object, data)
			if core.CodeOf(err) != c.want {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if n := asked.Load(); name != "no others available" && c.renew != nil && n != 1 {
				t.Errorf("others were asked for %d times", n)
			}
			s.proxy.Clear()
			if c.want == "" {
				return
			}
			if _, err := s.direct.Stat(t.Context(), object); !errors.Is(err, blob.ErrNotFound) {
				t.Errorf("got %v, want nothing", err)
			}
			if c.renew == nil || c.always {
				if n := uploads(t, server, s); n != 0 {
					t.Errorf("%d uploads are left", n)
				}
			}
		})
	}
}

// TestCredentialsAreRenewed starts with credentials that a real server refuses, without credentials, and with
// credentials that are about to expire.
func TestCredentialsAreRenewed(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	renew := func(context.Context) (Credentials, error) {
		return Credentials{AccessKey: server.AccessKey, SecretKey: server.SecretKey, Expires: time.Now().Add(time.Hour)}, nil
	}
	for name, begin := range map[string]Credentials{
		"wrong":    {AccessKey: server.AccessKey, SecretKey: "old", Renew: renew},
		"none":     {Renew: renew},
		"expiring": {AccessKey: server.AccessKey, SecretKey: "old", Expires: time.Now().Add(time.Second), Renew: renew},
	} {
		for _, call := range calls {
			s := openFaulty(t, server, func(c *Config) { c.Credentials = begin })
			if err := blobtest.Put(t.Context(), s.direct, object, []byte("0123456789")); err != nil {
				t.Fatal(err)
			}
			if err := call.do(t.Context(), s); err != nil {
				t.Errorf("%s, %s: %v", name, call.name, err)
			}
		}
	}
}

// TestManyAtOnce uses more readers than connections, with a store that resets every third answer.
func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	s := openFaulty(t, server, func(c *Config) { c.Attempts = 100 }) // every reset may hit the same reader
	data := blobtest.Bytes(5, 1<<20)
	if err := blobtest.Put(t.Context(), s.direct, object, data); err != nil {
		t.Fatal(err)
	}
	var n atomic.Int32
	third := func(r *http.Request) bool { return tests3.Gets(r) && n.Add(1)%3 == 0 }
	s.proxy.Add(tests3.Fault{Kind: tests3.Reset, N: 1000, Of: third})
	errs := make(chan error)
	const readers = 64
	for range readers {
		go func() {
			got, err := blobtest.Get(t.Context(), s, object, 0, 1<<20)
			if err == nil && !bytes.Equal(got, data) {
				err = fmt.Errorf("%d other bytes", len(got))
			}
			errs <- err
		}()
	}
	for range readers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}
