package pager_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/snapshotstore"
)

// TestManyStalled: while the store is unreachable, the pager reports every image that waits for it and the waiting
// threads. All of them together do not fit into one message.
func TestManyStalled(t *testing.T) {
	const many, readers = 500, 40
	server := tests3.Start(t)
	proxy, bucket := server.Proxy(t), server.Bucket(t)
	x := newRig(t, settings{Store: proxy.URL(bucket), AccessKey: server.AccessKey, SecretKey: server.SecretKey})
	b := memory(rand.New(rand.NewPCG(15, 1)), 256)
	for p := range 256 {
		b[p*page] = 1 // no page is all zeros
	}
	src := sourceOf(x.seal(b, nil, nil))
	x.put(pager.Image{ID: "first", Source: src}, x.part(len(b))) // this reads the manifest
	x.await("first", func(s *pager.Status) bool { return s != nil && s.Whole })
	proxy.Down(t)
	name := func(i int) string { return fmt.Sprintf("image-%s-%04d", strings.Repeat("x", 100), i) }
	for i := range many {
		x.put(pager.Image{ID: name(i), Source: src}, x.part(len(b)))
	}
	var files []*os.File
	for i := range readers {
		f, err := x.client.Open(t.Context(), name(0))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
		go func() { _, _ = f.ReadAt(make([]byte, page), int64(i*5*page)) }() // until the pager ends
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	heard := errors.New("heard")
	watching, stop := context.WithCancelCause(ctx)
	var size int
	err := x.client.Watch(watching, func(list []pager.Status) {
		stalled := 0
		for _, st := range list {
			if st.Problem != nil {
				stalled++
			}
		}
		ids := make([]string, len(list))
		for i, st := range list {
			ids[i] = st.ID
		}
		if !slices.IsSorted(ids) || len(slices.Compact(ids)) != len(list) {
			t.Errorf("images are told of twice, or in no order: %d", len(list))
		}
		i := slices.IndexFunc(list, func(s pager.Status) bool { return s.ID == name(0) })
		if stalled == many && len(list) == many+1 && i >= 0 && list[i].Waiting > 1 {
			if len(list[i].Waiters) > 32 || list[i].Waiting < len(list[i].Waiters) {
				t.Errorf("%d wait, and %d are named", list[i].Waiting, len(list[i].Waiters))
			}
			encoded, _ := json.Marshal(list)
			size = len(encoded)
			stop(heard)
		}
	})
	if !errors.Is(err, heard) || size < sidecar.MaxMessage {
		t.Errorf("watching ended with %v; the images take %d bytes", err, size)
	}
	if list, _, err := x.client.List(ctx); err != nil || len(list) != many+1 {
		t.Errorf("%d images, %v", len(list), err)
	}
	if h, err := x.client.Hello(ctx); err != nil || h.PID != x.pid {
		t.Errorf("the pager is %+v, %v", h, err)
	}
	proxy.Up(t)
	for _, f := range files {
		_ = f.Close()
	}
}

// TestLongMessages: a message that is too long or malformed gets an error, and the pager goes on as before.
func TestLongMessages(t *testing.T) {
	x := newDirRig(t)
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: pager.SocketPath(x.cfg.Dir), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var out struct {
		Problem, Hello map[string]any
	}
	for _, message := range []string{strings.Repeat("x", sidecar.MaxMessage+1), "no JSON"} {
		if _, err := conn.Write([]byte(message)); err != nil {
			t.Fatal(err)
		}
		if _, err := sidecar.Receive(conn, &out); err != nil || out.Problem == nil {
			t.Fatalf("%.10q: %+v, %v", message, out, err)
		}
	}
	if err := sidecar.Send(conn, map[string]string{"op": "hello"}); err != nil {
		t.Fatal(err)
	}
	if _, err := sidecar.Receive(conn, &out); err != nil || out.Hello == nil {
		t.Errorf("afterwards: %+v, %v", out, err)
	}
	long := pager.Image{ID: strings.Repeat("x", sidecar.MaxMessage)}
	if _, err := x.client.Put(t.Context(), long, x.part(page)); err == nil || errors.Is(err, pager.ErrGone) || !errors.Is(err, sidecar.ErrTooLong) {
		t.Errorf("an image that no message takes: %v", err)
	}
	b := memory(rand.New(rand.NewPCG(15, 2)), 64)
	im := pager.Image{ID: "hints", Source: sourceOf(x.seal(b, nil, nil))}
	for range 10_000 { // hints beyond the bound are left out
		im.Want = append(im.Want, pager.Range{First: 1 << 60, Count: 1 << 60})
	}
	x.put(im, x.part(len(b)))
	x.await("hints", func(s *pager.Status) bool { return s != nil && s.Whole })
}

// TestAlive: the end of a pager is not confused with the end of a connection.
func TestAlive(t *testing.T) {
	x := newDirRig(t)
	h, err := x.client.Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !x.client.Alive(t.Context(), h.Instance) || x.client.Alive(t.Context(), "another") {
		t.Error("a pager that runs")
	}
	if err := x.client.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if x.client.Alive(t.Context(), h.Instance) {
		t.Error("a pager that has ended")
	}
}

// TestManyTouched: when a machine touches all of its memory, no more pages than the bound are recorded, and it can
// still read the others.
func TestManyTouched(t *testing.T) {
	x := newDirRig(t)
	const most, pages = 64 << 10, 64<<10 + 512
	part := x.part(pages * page)
	if _, err := x.client.Put(t.Context(), pager.Image{ID: "a", Record: true, Memory: true}, part); err != nil {
		t.Fatal(err)
	}
	f, err := x.client.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, f); err != nil || n != pages*page {
		t.Errorf("%d bytes were read: %v", n, err)
	}
	touched, err := x.client.Touched(t.Context(), "a")
	var n int64
	for _, r := range touched {
		n += r.Count
	}
	if err != nil || n != most {
		t.Errorf("%d pages are noted, want %d: %v", n, most, err)
	}
	if err := errors.Join(f.Close(), x.client.Drop(t.Context(), "a")); err != nil {
		t.Error(err)
	}
}

// TestLongID: the id of an image is limited to the length of a file name.
func TestLongID(t *testing.T) {
	x := newDirRig(t)
	for n, want := range map[int]core.Code{255: "", 256: core.CodeInvalidField, 100_000: core.CodeInvalidField} {
		_, err := x.client.Put(t.Context(), pager.Image{ID: strings.Repeat("a", n), Record: true}, x.part(page))
		if core.CodeOf(err) != want {
			t.Errorf("an id of %d bytes: %v", n, err)
		}
	}
	list, _, err := x.client.List(t.Context())
	if err != nil || len(list) != 1 {
		t.Errorf("%d images are served: %v", len(list), err)
	}
	if err := x.client.Drop(t.Context(), strings.Repeat("a", 255)); err != nil {
		t.Error(err)
	}
}

// TestManifestsAreBounded: the pager keeps the manifests of the last four checkpoints. For images of others it reads them again, and where it
// cannot, no other image suffers.
func TestManifestsAreBounded(t *testing.T) {
	const kept = 4
	files, aside := t.TempDir(), t.TempDir()
	x := newRig(t, settings{Store: "dir:" + files})
	b := memory(rand.New(rand.NewPCG(15, 4)), 16)
	var sealed []*snapshotstore.Written
	for range kept + 1 {
		sealed = append(sealed, x.seal(b, nil, nil))
	}
	move := func(from, to string, i int) {
		t.Helper()
		name := filepath.Join(to, sealed[i].Manifest.Key)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.Rename(filepath.Join(from, sealed[i].Manifest.Key), name)); err != nil {
			t.Fatal(err)
		}
	}
	images := 0
	put := func(i int) (string, error) {
		images++
		id := fmt.Sprint("image-", images)
		_, err := x.client.Put(t.Context(), pager.Image{ID: id, Source: sourceOf(sealed[i])}, x.part(len(b)))
		return id, err
	}
	works := func(what string, list ...int) {
		t.Helper()
		for _, i := range list {
			id, err := put(i)
			if err != nil {
				t.Errorf("%s: an image of checkpoint %d: %v", what, i, err)
				continue
			}
			wantEqual(t, x.mapped(id, len(b)), b, what)
		}
	}
	works("each once", 0, 1, 2, 3)
	for i := range kept {
		move(files, aside, i)
	}
	works("without manifests in the store", 3, 2, 1, 0)
	works("one more", kept)
	if id, err := put(0); err == nil {
		t.Errorf("%s is there, though its manifest should have been dropped and is not in the store", id)
	}
	works("the others", 1, 2, 3, kept)
	move(aside, files, 0)
	works("read again", 0)
	if id, err := put(1); err == nil {
		t.Errorf("%s is there, though its manifest was the oldest", id)
	}
	works("the last four", 2, 3, kept, 0)
}
