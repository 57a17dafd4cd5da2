package build

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// bootLimit bounds one boot. Under emulation on a busy machine it takes ten seconds.
const bootLimit = 3 * time.Minute

// probeEvent is what testdata/probe reports on the console.
type probeEvent struct {
	Step        string            `json:"step"`
	MS          float64           `json:"ms"`
	TookMS      float64           `json:"took_ms"`
	Error       string            `json:"error"`
	Name        string            `json:"name"`
	Release     string            `json:"release"`
	ClockSource string            `json:"clocksource"`
	Argv        []string          `json:"argv"`
	Stdout      string            `json:"stdout"`
	Stderr      string            `json:"stderr"`
	Before      int64             `json:"before"`
	After       int64             `json:"after"`
	Threads     []string          `json:"threads"`
	Path        string            `json:"path"`
	Mode        uint32            `json:"mode"`
	UID         uint32            `json:"uid"`
	GID         uint32            `json:"gid"`
	Nlink       uint64            `json:"nlink"`
	Mtime       int64             `json:"mtime"`
	Attrs       map[string]string `json:"attrs"`
	Interrupts  map[string]uint64 `json:"interrupts"`
}

// requireImage skips where images cannot be built and booted.
func requireImage(t *testing.T) {
	t.Helper()
	_, err := exec.LookPath("qemu-system-x86_64")
	ok := os.Geteuid() == 0 && len(MissingPrograms()) == 0 && err == nil && runtime.GOARCH == "amd64"
	require.That(t, "image", ok, "make setup, then run the tests as root on amd64")
}

// boot starts an image whose /init is the probe, under emulation, and returns what it reported until it powered off.
// diskBytes is the size of the overlay disk.
func boot(t *testing.T, img images.Image, diskBytes int64, words ...string) []probeEvent {
	t.Helper()
	disk := filepath.Join(t.TempDir(), "overlay")
	if _, err := copyNonZero(img.Overlay, disk); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(disk, diskBytes); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bootLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-M", "pc,usb=off,vmport=off,smm=off,hpet=off",
		"-accel", "tcg,thread=multi", "-cpu", "max", "-m", "512M", "-smp", "1",
		"-kernel", img.Kernel, "-initrd", img.Initrd, "-append", img.CommandLine+" "+strings.Join(words, " "), "-serial", "stdio",
		"-device", "virtio-serial-pci,max_ports=2", "-device", "virtio-rng-pci",
		"-drive", "file="+img.RootFS+",if=none,id=root,format=raw,readonly=on", "-device", "virtio-blk-pci,drive=root",
		"-drive", "file="+disk+",if=none,id=disk,format=raw,discard=unmap", "-device", "virtio-blk-pci,drive=disk",
	)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	events, console := readProbe(t, out)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("qemu: %v; console:\n%s", errors.Join(err, context.Cause(ctx)), console)
	}
	for _, e := range events {
		if e.Step == "failed" {
			t.Errorf("the guest said: %s", e.Error)
		}
	}
	if find(events, "done") == nil {
		t.Fatalf("the guest did not come to its end; console:\n%s", console)
	}
	return events
}

func readProbe(t *testing.T, r io.Reader) (events []probeEvent, console string) {
	t.Helper()
	var all strings.Builder
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		line := lines.Text()
		raw, ok := strings.CutPrefix(line, "PROBE ")
		if !ok {
			all.WriteString(line + "\n")
			continue
		}
		var e probeEvent
		if err := json.Unmarshal([]byte(raw), &e); err != nil {
			t.Errorf("line %q: %v", raw, err)
			continue
		}
		events = append(events, e)
	}
	return events, all.String()
}

// find returns the first event of a step, or nil.
func find(events []probeEvent, step string) *probeEvent {
	for i := range events {
		if events[i].Step == step {
			return &events[i]
		}
	}
	return nil
}

// TestImageBoots: the kernel of a Debian image starts /init, all its modules load in the order that the list gives, the
// two disks become a writable root, and what the image promises is in it and runs.
func TestImageBoots(t *testing.T) {
	t.Parallel()
	b := baseImage(t)
	const big = 64 << 30
	events := boot(t, b.img, big,
		`probe.exec=/usr/bin/python3,-c,print(__import__("ssl").OPENSSL_VERSION)`,
		`probe.exec=/bin/sh,-c,python3${IFS}-vc${IFS}'__import__("asyncio")'${IFS}2>&1|grep${IFS}-c${IFS}wrote`,
		"probe.exec=/usr/bin/git,--version", "probe.exec=/usr/bin/curl,--version",
		"probe.exec=/bin/sh,-c,echo${IFS}written>/root/file&&cat${IFS}/root/file", "probe.exec=/usr/bin/hostname", "probe.exec=/bin/ps,--version",
		"probe.stat=/usr/bin/su", "probe.stat=/etc/shadow", "probe.stat=/tmp", "probe.stat=/etc/machine-id", "probe.stat=/etc/coppice/reseal.d",
		"probe.resize=68719476736", "probe.idle=12",
	)
	mounted := find(events, "mounted")
	t.Logf("init after %.0f ms, root mounted after %.0f ms of guest time", find(events, "init").MS, mounted.MS)
	if mounted.Release != b.img.KernelRelease {
		t.Errorf("kernel %s booted, the image says %s", mounted.Release, b.img.KernelRelease)
	}
	if mounted.ClockSource != "tsc" {
		t.Errorf("the clock source is %s under emulation, want tsc", mounted.ClockSource)
	}
	var loaded []string
	for _, e := range events {
		if e.Step == "module" {
			loaded = append(loaded, e.Name)
		}
	}
	if got, want := strings.Join(loaded, " "), strings.Join(b.img.Recipe.Modules, " "); got != want {
		t.Errorf("modules loaded:\n%s\nwant\n%s", got, want)
	}
	checkExecs(t, events, map[string]string{
		"python3 -c": "OpenSSL 3", "grep": "0\n", "git": "git version", "curl": "curl ", "written": "written\n", "hostname": "(none)", "ps": "ps from",
	})
	checkStats(t, events)
	grown := find(events, "resize")
	t.Logf("the overlay grew from %d to %d MiB in %.0f ms", grown.Before>>20, grown.After>>20, grown.TookMS)
	if grown.Before > 1<<30 || grown.After < big*9/10 {
		t.Errorf("the overlay grew from %d to %d bytes, want from below 1 GiB to near %d", grown.Before, grown.After, int64(big))
	}
	for _, thread := range grown.Threads {
		if strings.Contains(thread, "lazyinit") {
			t.Errorf("the kernel initialises the disk in the background: %s", thread)
		}
	}
	begin, end := find(events, "idle-begin"), find(events, "idle-end")
	perSecond := float64(end.Interrupts["LOC"]-begin.Interrupts["LOC"]) / (end.MS - begin.MS) * 1000
	t.Logf("%.1f timer interrupts a second while idle", perSecond)
	if perSecond > 12 { // 2 to 5 when quiet; 13 to 16 with Debian's default command line
		t.Errorf("%.1f timer interrupts a second in an idle guest", perSecond)
	}
}

// checkExecs compares the programs' output: the key is part of the command, the value of its standard output.
func checkExecs(t *testing.T, events []probeEvent, want map[string]string) {
	t.Helper()
	for command, text := range want {
		found := false
		for _, e := range events {
			if e.Step == "exec" && strings.Contains(strings.Join(e.Argv, " "), command) {
				found = true
				if !strings.Contains(e.Stdout, text) {
					t.Errorf("%v printed %q and %q (%s), want %q", e.Argv, e.Stdout, e.Stderr, e.Error, text)
				}
				break
			}
		}
		if !found {
			t.Errorf("nothing was run for %q", command)
		}
	}
}

func checkStats(t *testing.T, events []probeEvent) {
	t.Helper()
	want := map[string]struct{ mode, gid uint32 }{
		"/usr/bin/su": {0o104755, 0}, "/etc/shadow": {0o100640, 42}, "/tmp": {0o041777, 0}, "/etc/machine-id": {0o100644, 0}, "/etc/coppice/reseal.d": {0o040755, 0},
	}
	for _, e := range events {
		if w, ok := want[e.Path]; e.Step == "stat" && ok {
			delete(want, e.Path)
			if e.Mode != w.mode || e.UID != 0 || e.GID != w.gid {
				t.Errorf("%s has mode %o, owner %d:%d, want %o, 0:%d", e.Path, e.Mode, e.UID, e.GID, w.mode, w.gid)
			}
		}
	}
	for path := range want {
		t.Errorf("%s was not looked at", path)
	}
}
