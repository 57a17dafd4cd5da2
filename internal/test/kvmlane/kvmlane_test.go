package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/test/kvmlane/wire"
)

func TestArguments(t *testing.T) {
	t.Parallel()
	s := shape{emulator: emulator{major: 10}, memoryMiB: 4096, cpus: 2, dir: "/run/lane"}
	r := rootFS{kernel: "/k", initrd: "/i", disk: "/d"}
	args := strings.Join(arguments(s, r), " ")
	for _, want := range []string{
		"-accel tcg,thread=multi -cpu max,", "cx16=off", "-smp 2 -m 4096M -kernel /k -initrd /i", "snapshot=on,cache=unsafe,discard=unmap,file=/d",
		"path=/run/lane/lane.sock -device virtserialport,chardev=lane,name=coppice.lane", "-no-user-config",
	} {
		if !strings.Contains(args, want) {
			t.Errorf("no %q in %s", want, args)
		}
	}
	// What KVM is for is emulated, and nothing of it is left to the host's own.
	for _, never := range []string{"kvm ", "accel=kvm", "svm=off", "payload"} {
		if strings.Contains(args, never) {
			t.Errorf("%q is in %s", never, args)
		}
	}
	s.payload = "/p"
	if args := strings.Join(arguments(s, r), " "); !strings.Contains(args, "snapshot=on,cache=unsafe,file=/p") {
		t.Errorf("no payload in %s", args)
	}
}

func TestEmulator(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{
		"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)": "tcg,thread=single",
		"QEMU emulator version 8.0.9":                                 "tcg,thread=single",
		"QEMU emulator version 8.1.0":                                 "tcg,thread=multi",
		"QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)":         "tcg,thread=multi",
	} {
		e := emulator{}
		if err := e.setVersion(version + "\nCopyright\n"); err != nil {
			t.Errorf("%s: %v", version, err)
		}
		if got := e.accelerator(); got != want {
			t.Errorf("%s: got %s, want %s", version, got, want)
		}
	}
	if e, err := openEmulator(t.Context(), "/bin/true", ""); err == nil {
		t.Errorf("a program that says nothing is %+v", e)
	}
}

const verbose = `=== RUN   TestA
=== RUN   TestA/one
=== PAUSE TestA/one
=== RUN   TestA/two
    a_test.go:7: --- PASS: not a test
--- FAIL: TestA (12.34s)
    --- PASS: TestA/one (0.00s)
    --- FAIL: TestA/two (1.00s)
        --- PASS: TestA/two/first (1.00s)
        --- FAIL: TestA/two/last (1.00s)
    --- SKIP: TestA/three (0.00s)
--- PASS: TestB (0.01s)
    --- PASS: TestB/x (0.01s)
--- PASS: TestBC (0.01s)
FAIL
`

func TestScanner(t *testing.T) {
	t.Parallel()
	for _, chunk := range []int{1, 7, len(verbose)} {
		var out bytes.Buffer
		var r result
		s := &scanner{out: &out, into: &r}
		for part := range slices.Chunk([]byte(verbose), chunk) {
			if _, err := s.Write(part); err != nil {
				t.Fatal(err)
			}
		}
		if out.String() != verbose {
			t.Error("the output is not passed on as it is")
		}
		for _, c := range []struct {
			name      string
			got, want []string
		}{
			{"passed", r.passed, []string{"TestA/one", "TestA/two/first", "TestB/x", "TestBC"}},
			{"failed", r.failed, []string{"TestA/two/last"}},
			{"skipped", r.skipped, []string{"TestA/three"}},
		} {
			if diff := cmp.Diff(c.want, c.got); diff != "" {
				t.Errorf("%s, in pieces of %d (-want +got):\n%s", c.name, chunk, diff)
			}
		}
	}
}

func TestVerdict(t *testing.T) {
	t.Parallel()
	well, broken := result{passed: []string{"TestA"}}, result{passed: []string{"TestA"}, failed: []string{"TestB"}}
	absent := result{notGiven: "cloud-hypervisor: not given"}
	died, empty, silent := well, result{}, well
	died.ended(0, errors.New("the machine has ended"))
	empty.ended(0, nil)
	silent.ended(2, nil)
	for name, c := range map[string]struct {
		results []result
		want    int
	}{
		"well":             {[]result{well}, 0},
		"well and absent":  {[]result{well, absent}, 0},
		"only absent":      {[]result{absent}, 1},
		"nothing":          {nil, 1},
		"a test failed":    {[]result{well, broken}, 1},
		"the machine died": {[]result{died, well}, 1},
		"nothing ran":      {[]result{well, empty}, 1},
		"no test says why": {[]result{silent}, 1},
	} {
		if got := verdict(c.results); got != c.want {
			t.Errorf("%s: got %d, want %d", name, got, c.want)
		}
	}
	for _, c := range []struct {
		r    result
		want string
	}{
		{well, "ok "},
		{broken, "FAILED "},
		{broken, "1 failed (TestB)"},
		{absent, "NOT RUN  cloud-hypervisor: not given"},
		{died, "the machine has ended"},
		{empty, "no test passed"},
		{silent, "exit status 2"},
	} {
		if got := c.r.String(); !strings.Contains(got, c.want) {
			t.Errorf("got %q, want %q in it", got, c.want)
		}
	}
}

// TestSuites makes sure that every suite names tests that exist, and fits into the time.
func TestSuites(t *testing.T) {
	t.Parallel()
	for _, s := range suites {
		names := 0
		files, err := filepath.Glob(filepath.Join("..", "..", "..", s.pkg, "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Errorf("%s: %s has no tests (%v)", s.name, s.pkg, err)
		}
		want := strings.Split(strings.Trim(s.run, "^()$"), "|")
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range want {
				if w == "." || strings.Contains(string(b), "\nfunc "+w+"(t *testing.T)") {
					names++
				}
			}
		}
		if names < len(want) {
			t.Errorf("%s: %s has %d of the tests %v", s.name, s.pkg, names, want)
		}
		if c := strings.Join(s.command(), " "); !strings.Contains(c, "-test.timeout=") || !strings.HasPrefix(c, payloadDir+"/tests/"+s.pkg) {
			t.Errorf("%s: %s", s.name, c)
		}
	}
}

// machineOf answers requests as the machine does.
func machineOf(t *testing.T, conn net.Conn, answer func(wire.Request) []wire.Reply) {
	t.Helper()
	go func() {
		_ = wire.Read(conn, func(r wire.Request) error { // ends with the connection
			for _, v := range answer(r) {
				if err := wire.Write(conn, v); err != nil {
					return err
				}
			}
			return nil
		})
		_ = conn.Close()
	}()
}

func listen(t *testing.T, answer func(wire.Request) []wire.Reply) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		// What an earlier connection left behind comes first.
		_, _ = conn.Write([]byte("out\":\"AAAA\"}\n{\"id\":7,\"stdout\":\"eA==\"}\n"))
		machineOf(t, conn, answer)
	}()
	return path
}

func TestClient(t *testing.T) {
	t.Parallel()
	var put bytes.Buffer
	path := listen(t, func(r wire.Request) []wire.Reply {
		switch {
		case r.Put != nil:
			put.Write(r.Put.Data)
			return []wire.Reply{{ID: r.ID, Exit: new(0)}}
		case r.Run != nil && r.Run.Command[0] == "fail":
			return []wire.Reply{{ID: r.ID, Error: "no such program"}}
		case r.Run != nil:
			return []wire.Reply{{ID: r.ID, Stdout: []byte("out\n")}, {ID: r.ID, Stderr: []byte("err\n")}, {ID: r.ID, Exit: new(3)}}
		}
		return nil
	})
	c, err := dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	status, err := c.run(t.Context(), wire.Run{Command: []string{"x"}}, &out, &errOut)
	if status != 3 || err != nil || out.String() != "out\n" || errOut.String() != "err\n" {
		t.Errorf("got %d, %v, %q, %q", status, err, &out, &errOut)
	}
	if _, err := c.run(t.Context(), wire.Run{Command: []string{"fail"}}, io.Discard, io.Discard); err == nil || err.Error() != "no such program" {
		t.Errorf("got %v", err)
	}
	want := bytes.Repeat([]byte("0123456789"), wire.MaxData/4)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, want, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.put(t.Context(), file, "/there"); err != nil || !bytes.Equal(put.Bytes(), want) {
		t.Errorf("put: %v, %d bytes of %d", err, put.Len(), len(want))
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// TestClientKills ends a program whose caller has given up, and learns of a machine that ends.
func TestClientKills(t *testing.T) {
	t.Parallel()
	started, killed := make(chan uint64, 1), make(chan uint64, 1)
	path := listen(t, func(r wire.Request) []wire.Reply {
		switch {
		case r.Run != nil:
			started <- r.ID
		case r.Kill:
			killed <- r.ID
		}
		return nil
	})
	c, err := dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	over := errors.New("enough")
	go func() { <-started; cancel(over) }()
	if _, err := c.run(ctx, wire.Run{Command: []string{"x"}}, io.Discard, io.Discard); !errors.Is(err, over) {
		t.Errorf("got %v", err)
	}
	select {
	case <-killed:
	case <-time.After(10 * time.Second):
		t.Error("the program was not killed")
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.run(t.Context(), wire.Run{Command: []string{"x"}}, io.Discard, io.Discard); err == nil {
		t.Error("a machine that is not there answers")
	}
}
