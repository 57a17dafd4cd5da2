package build

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// cpioEntry is what readCPIO finds.
type cpioEntry struct {
	Name         string
	Mode         uint32
	Nlink        uint32
	Major, Minor uint32
	Data         string
}

// readCPIO is a second reading of the format's description, to check the writer against.
func readCPIO(t *testing.T, raw []byte) []cpioEntry {
	t.Helper()
	var out []cpioEntry
	inodes := map[uint32]bool{}
	pos := 0
	take := func(n int) []byte {
		if pos+n > len(raw) {
			t.Fatalf("archive ends at %d, wanted %d bytes from %d", len(raw), n, pos)
		}
		b := raw[pos : pos+n]
		pos += n
		return b
	}
	align := func() {
		for pos%4 != 0 {
			if take(1)[0] != 0 {
				t.Fatal("padding is not zero")
			}
		}
	}
	for {
		if pos%4 != 0 {
			t.Fatalf("header at %d is not aligned", pos)
		}
		if magic := string(take(6)); magic != "070701" {
			t.Fatalf("magic is %q", magic)
		}
		var f [13]uint32
		for i := range f {
			v, err := strconv.ParseUint(string(take(8)), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			f[i] = uint32(v)
		}
		name := string(bytes.TrimSuffix(take(int(f[11])), []byte{0}))
		align()
		data := string(take(int(f[6])))
		align()
		if name == "TRAILER!!!" {
			if len(raw)%512 != 0 || strings.Trim(string(raw[pos:]), "\x00") != "" {
				t.Error("the end is not padded with zeros to 512 bytes")
			}
			return out
		}
		if inodes[f[0]] {
			t.Errorf("inode %d is used twice: the kernel would make a hard link", f[0])
		}
		inodes[f[0]] = true
		if f[2] != 0 || f[3] != 0 || f[5] != 0 {
			t.Errorf("%s: owner %d:%d, time %d, want root and 0", name, f[2], f[3], f[5])
		}
		out = append(out, cpioEntry{name, f[1], f[4], f[9], f[10], data})
	}
}

func TestCPIO(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	c := newCPIOWriter(&b)
	steps := []error{
		c.Dir("/dev", 0o755),
		c.Char("/dev/console", 0o600, 5, 1),
		c.File("/init", 0o755, []byte("odd")),
		c.File("/lib/modules/a.ko", 0o644, bytes.Repeat([]byte{0xff}, 4097)),
		c.File("lib/empty", 0o600, nil),
		c.Dir("/lib/", 0o755),
		c.Close(),
	}
	for i, err := range steps {
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	want := []cpioEntry{
		{"dev", 0o040755, 2, 0, 0, ""},
		{"dev/console", 0o020600, 1, 5, 1, ""},
		{"init", 0o100755, 1, 0, 0, "odd"},
		{"lib", 0o040755, 2, 0, 0, ""},
		{"lib/modules", 0o040755, 2, 0, 0, ""},
		{"lib/modules/a.ko", 0o100644, 1, 0, 0, strings.Repeat("\xff", 4097)},
		{"lib/empty", 0o100600, 1, 0, 0, ""},
	}
	if diff := cmp.Diff(want, readCPIO(t, b.Bytes())); diff != "" {
		t.Errorf("archive differs (-want +got):\n%s", diff)
	}
}

func TestCPIORefusesBadNames(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", "/", "TRAILER!!!", "a\x00b"} {
		if err := newCPIOWriter(io.Discard).File(name, 0o644, nil); err == nil {
			t.Errorf("File(%q) succeeded", name)
		}
	}
}

func TestCPIOReportsWriteErrors(t *testing.T) {
	t.Parallel()
	c := newCPIOWriter(failingWriter{})
	if err := c.Dir("x", 0o755); err == nil {
		t.Error("a failed write was not reported")
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, fmt.Errorf("disk on fire") }
