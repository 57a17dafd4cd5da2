package sidecar_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/sidecar"
)

// pair returns both ends of a connection.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	l, err := sidecar.Listen(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.DialUnix("unixpacket", nil, l.Addr().(*net.UnixAddr)); err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = a.Close()
		_ = b.Close()
	})
	return a, b
}

// TestFaults: a message that is too long or malformed is a fault of its own; the next message uses the same connection.
func TestFaults(t *testing.T) {
	t.Parallel()
	a, b := pair(t)
	next := func(after string) {
		t.Helper()
		var got string
		if err := sidecar.Send(a, "hello"); err != nil {
			t.Fatalf("after %s: %v", after, err)
		}
		if _, err := sidecar.Receive(b, &got); err != nil || got != "hello" {
			t.Errorf("after %s: %q, %v", after, got, err)
		}
	}
	if err := sidecar.Send(a, strings.Repeat("x", sidecar.MaxMessage)); !errors.Is(err, sidecar.ErrTooLong) || !sidecar.IsFault(err) {
		t.Errorf("a message that is too long was sent: %v", err)
	}
	next("one that was not sent")
	for raw, want := range map[string]error{strings.Repeat("x", sidecar.MaxMessage+1): sidecar.ErrTooLong, "{": sidecar.ErrMalformed, `"\u00`: sidecar.ErrMalformed} {
		if _, err := a.Write([]byte(raw)); err != nil {
			t.Fatal(err)
		}
		var got string
		if _, err := sidecar.Receive(b, &got); !errors.Is(err, want) || !sidecar.IsFault(err) {
			t.Errorf("%.5q: %v, want %v", raw, err, want)
		}
		next("one that was sent")
	}
	if err := sidecar.Send(a, strings.Repeat("x", sidecar.MaxMessage-2)); err != nil {
		t.Errorf("the longest message: %v", err)
	}
	_ = a.Close()
	var got string
	if _, err := sidecar.Receive(b, &got); err != nil {
		t.Errorf("the longest message: %v", err)
	}
	if _, err := sidecar.Receive(b, &got); err == nil || sidecar.IsFault(err) {
		t.Errorf("the end of a connection: %v", err)
	}
}

// TestManyFiles: a message has only a few descriptors. A message with more is refused, none of its
// descriptors stays open, and the next message uses the same connection.
func TestManyFiles(t *testing.T) {
	a, b := pair(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	const most = 4
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	many := slices.Repeat([]*os.File{null}, most+1)
	if err := sidecar.Send(a, "hello", many...); !errors.Is(err, sidecar.ErrTooLong) {
		t.Errorf("%d descriptors were sent: %v", len(many), err)
	}
	before := open()
	for range 50 { // a sender that ignores all rules
		if _, _, err := a.WriteMsgUnix([]byte(`"hello"`), unix.UnixRights(slices.Repeat([]int{int(null.Fd())}, 100)...), nil); err != nil {
			t.Fatal(err)
		}
		var got string
		if files, err := sidecar.Receive(b, &got); !errors.Is(err, sidecar.ErrTooLong) || !sidecar.IsFault(err) || len(files) > 0 {
			t.Errorf("100 descriptors: %d files, %v", len(files), err)
		}
	}
	if after := open(); after > before {
		t.Errorf("%d descriptors are open, and %d were before", after, before)
	}
	var got string
	if err := sidecar.Send(a, "hello", many[:most]...); err != nil {
		t.Fatal(err)
	}
	files, err := sidecar.Receive(b, &got)
	if err != nil || len(files) != most || got != "hello" {
		t.Errorf("%d descriptors: %q, %d files, %v", most, got, len(files), err)
	}
	sidecar.CloseAll(files)
}
