package archtest

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const guestCommand = "cmd/coppice-guest"

// guestModules is all that the guest's program may link besides the standard library and this module. It is in the
// memory of every sandbox, and whatever it parses comes from a guest's processes.
var guestModules = []string{
	"github.com/coder/websocket",
	"github.com/creack/pty",
	"github.com/hashicorp/yamux",
	"github.com/mdlayher/netlink",
	"github.com/mdlayher/socket",
	"github.com/mdlayher/vsock",
	"github.com/vishvananda/netlink",
	"github.com/vishvananda/netns",
	"golang.org/x/crypto",
	"golang.org/x/net",
	"golang.org/x/sync",
	"golang.org/x/sys",
	"golang.org/x/text",
}

// What the guest's program must not link of the standard library: none of it is needed there, and each is big or opens a door.
var guestNever = []string{"net/http/pprof", "expvar", "testing", "plugin", "html/template", "text/template", "database/sql"}

// maxGuestBytes bounds the program: every image has a copy, and every boot reads it.
const maxGuestBytes = 10 << 20

func TestGuestLinksLittle(t *testing.T) {
	t.Parallel()
	all := packages(t)
	guest, ok := all[module+"/"+guestCommand]
	if !ok {
		t.Fatalf("%s is not there", guestCommand)
	}
	for _, dep := range guest.Deps {
		d := all[dep]
		switch {
		case d.Standard && under(dep, guestNever):
			t.Errorf("%s links %s", guestCommand, dep)
		case !d.Standard && d.path() == "" && !under(dep, guestModules):
			t.Errorf("%s links %s, which is not on the list in this test", guestCommand, dep)
		}
	}
}

func TestGuestIsSmallAndStatic(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "coppice-guest")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./"+guestCommand)
	cmd.Dir = rootDir(t)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", guestCommand, err, out)
	}
	fi, err := os.Stat(program)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s has %.1f MiB", guestCommand, float64(fi.Size())/(1<<20))
	if fi.Size() > maxGuestBytes {
		t.Errorf("%s has %d bytes, the bound is %d", guestCommand, fi.Size(), maxGuestBytes)
	}
	f, err := elf.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if libs, err := f.ImportedLibraries(); err != nil || len(libs) > 0 {
		t.Errorf("%s needs %s (%v), want a static program", guestCommand, strings.Join(libs, " "), err)
	}
}
