package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testvm"
	pages "github.com/coppice-dev/coppice/runner/memory"
)

// snapshot takes one of a paused VM, without its RAM.
func (p *process) snapshot() (dir string) {
	p.t.Helper()
	dir = p.path("snap")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "memory-ranges"), nil, 0o600)); err != nil {
		p.t.Fatal(err)
	}
	p.want(500, chainOf("Error from API", "The VM could not be snapshotted", "Cannot send VM snapshot", "Failed to send migratable component snapshot",
		fmt.Sprintf("Error creating memory snapshot file %q", filepath.Join(dir, "memory-ranges")), "File exists (os error 17)"),
		"PUT", "vm.snapshot", object{"destination_url": "file://" + dir})
	if got := p.state(); got != "Paused" {
		p.t.Errorf("the state is %s after a snapshot that failed", got)
	}
	return dir
}

func TestSnapshotFiles(t *testing.T) {
	t.Parallel()
	p := booted(t, testvm.BuildFakeCloudHypervisor(t).Path)
	p.ok("vm.pause", nil)
	dir := p.snapshot()
	for name, kind := range map[string]string{"config.json": "config", "state.json": "state"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !json.Valid(b) {
			t.Errorf("%s: %v, %q", name, err, b)
		}
		other := p.path("only-" + kind)
		if err := errors.Join(os.Mkdir(other, 0o700), os.WriteFile(filepath.Join(other, name), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		p.want(500, chainOf("Error from API", "The VM could not be snapshotted", "Cannot send VM snapshot", "Failed to send migratable component snapshot",
			"Error creating VM "+kind+" snapshot file", "File exists (os error 17)"), "PUT", "vm.snapshot", object{"destination_url": "file://" + other})
		_, err = os.Stat(filepath.Join(other, "config.json"))
		if _, late := os.Stat(filepath.Join(other, "memory-ranges")); err != nil || late == nil {
			t.Errorf("%s is there: the order of the files is another (%v, %v)", name, err, late)
		}
	}
	p.want(500, chainOf("Error from API", "The VM could not be snapshotted", "Cannot send VM snapshot", "Failed to send migratable component snapshot",
		`Destination is not a directory: "/nowhere"`), "PUT", "vm.snapshot", object{"destination_url": "file:///nowhere"})
	p.want(500, chainOf("Error from API", "The VM could not be snapshotted", "Cannot send VM snapshot", "Failed to send migratable component snapshot",
		"Could not extract path from URL: /tmp"), "PUT", "vm.snapshot", object{"destination_url": "/tmp"})
	whole := p.path("whole")
	if err := os.Mkdir(whole, 0o700); err != nil {
		t.Fatal(err)
	}
	p.ok("vm.snapshot", object{"destination_url": "file://" + whole})
	if info, err := os.Stat(filepath.Join(whole, "memory-ranges")); err != nil || info.Size() != ramBytes || info.Mode().Perm() != 0o600 {
		t.Errorf("the memory is %v, %v", info, err)
	}
	p.ok("vm.resume", nil)
	if got := p.ask("inc"); got != "1" {
		t.Errorf("the guest counts %s after its snapshots", got)
	}
}

// clone makes a directory to restore from: the files of another, edited.
func (p *process) clone(from *process, dir string, edit func(state string) string) string {
	p.t.Helper()
	config, err1 := os.ReadFile(filepath.Join(dir, "config.json"))
	state, err2 := os.ReadFile(filepath.Join(dir, "state.json"))
	disk, err3 := os.ReadFile(from.path("disk"))
	to := p.path("from")
	if err := errors.Join(err1, err2, err3, os.Mkdir(to, 0o700), os.WriteFile(p.path("disk"), disk, 0o600), os.WriteFile(p.path("kernel"), nil, 0o600)); err != nil {
		p.t.Fatal(err)
	}
	own := strings.ReplaceAll(string(config), from.dir+"/", p.dir+"/")
	own = strings.ReplaceAll(own, p.dir+"/base", from.dir+"/base")
	if err := errors.Join(os.WriteFile(filepath.Join(to, "config.json"), []byte(own), 0o600), os.WriteFile(filepath.Join(to, "state.json"), []byte(edit(string(state))), 0o600)); err != nil {
		p.t.Fatal(err)
	}
	return to
}

// region is where the process maps the base.
func (p *process) region(base string) pages.Region {
	p.t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for l := range strings.Lines(string(maps)) {
		var low, high uint64
		if _, err := fmt.Sscanf(l, "%x-%x rw-p", &low, &high); err == nil && strings.HasSuffix(strings.TrimSpace(l), base) {
			return pages.OnePart(p.cmd.Process.Pid, low, int64(high-low))
		}
	}
	p.t.Fatalf("the base is not mapped:\n%s", maps)
	return pages.Region{}
}

// TestRestore restores without reading RAM, and writes it from outside, as the driver does; and, for comparison, by copy.
func TestRestore(t *testing.T) {
	t.Parallel()
	program := testvm.BuildFakeCloudHypervisor(t).Path
	source := booted(t, program)
	for _, request := range []string{"inc", "inc", "fill 1", "write 0 0 4711"} {
		source.ask(request)
	}
	sum := source.ask("sum")
	open, lines := source.dial("1024") // open at the snapshot
	if _, err := lines.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	capture, err := pages.Prepare(source.region("base"))
	if err != nil {
		t.Fatal(err)
	}
	defer capture.Close()
	source.ok("vm.pause", nil)
	dir := source.snapshot()
	if err := capture.Copy(); err != nil {
		t.Fatal(err)
	}
	whole := source.path("whole")
	if err := os.Mkdir(whole, 0o700); err != nil {
		t.Fatal(err)
	}
	source.ok("vm.snapshot", object{"destination_url": "file://" + whole})
	source.ok("vm.resume", nil)
	if _, err := fmt.Fprintln(open, "count"); err != nil {
		t.Fatal(err)
	}
	if got, err := lines.ReadString('\n'); err != nil || got != "2\n" {
		t.Errorf("the source's connection is answered %q, %v", got, err)
	}

	edited := func(s string) string {
		return regexp.MustCompile(`\\"memory_ranges\\":\{\\"data\\":\[[^\]]*\]\}`).ReplaceAllString(s, `\"memory_ranges\":{\"data\":[]}`)
	}
	late := start(t, program) // its devices have taken their places when the memory comes
	late.ok("vm.restore", object{"source_url": "file://" + late.clone(source, dir, edited)})
	if got := late.state(); got != "Paused" {
		t.Errorf("the state is %s", got)
	}
	region := late.region("base")
	if private, err := pages.Scan(region); err != nil || pages.TotalBytes(private) != 0 {
		t.Errorf("%d bytes are private right after a restore, %v", pages.TotalBytes(private), err)
	}
	if err := capture.Delta().Inject(region); err != nil {
		t.Fatal(err)
	}
	late.ok("vm.resume", nil)
	if conn, err := net.Dial("unix", late.path("vsock")); err == nil {
		t.Error("a guest whose memory came after the restore has its channel", conn.Close())
	}

	fork := start(t, program)
	holes := fork.clone(source, dir, func(s string) string { return s })
	f, err := os.Create(filepath.Join(holes, "memory-ranges"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(capture.Delta().Size), capture.Delta().Each(func(e pages.Extent, data []byte) error {
		_, err := f.WriteAt(data, e.Offset)
		return err
	}), f.Close()); err != nil {
		t.Fatal(err)
	}
	fork.ok("vm.restore", object{"source_url": "file://" + holes})
	if private, err := pages.Scan(fork.region("base")); err != nil || pages.TotalBytes(private) != capture.Bytes() {
		t.Errorf("%d bytes are private after a restore with a delta of %d, %v", pages.TotalBytes(private), capture.Bytes(), err)
	}
	fork.want(500, chainOf("Error from API", "The VM could not be restored", "VM is already created"), "PUT", "vm.restore", object{"source_url": "file://" + dir})
	fork.ok("vm.resume", nil)

	byCopy := start(t, program)
	from := byCopy.clone(source, whole, func(s string) string { return s })
	if err := os.Link(filepath.Join(whole, "memory-ranges"), filepath.Join(from, "memory-ranges")); err != nil {
		t.Fatal(err)
	}
	byCopy.ok("vm.restore", object{"source_url": "file://" + from, "resume": true})
	for who, p := range map[string]*process{"the fork": fork, "the copy": byCopy} {
		if got := p.ask("count") + " " + p.ask("sum") + " " + p.ask("read 0 0"); got != "2 "+sum+" 4711" {
			t.Errorf("%s has %s, want 2 %s 4711", who, got, sum)
		}
	}
	if got, want := fork.seen(), []string{"vmm starting", "vm restoring", "vm restored", "vm resuming", "vm resumed"}; !slices.Equal(got, want) {
		t.Errorf("the events are %q, want %q", got, want)
	}

	for name, c := range map[string]struct {
		edit  func(string) string
		words string
	}{
		"a number that lost digits": {func(s string) string {
			return strings.ReplaceAll(edited(s), "18446744073709551615", "18446744073709552000")
		}, "more differs"},
		"one of a vCPU": {func(s string) string {
			return strings.Replace(edited(s), "18446744071579503391", "18446744071579500544", 1)
		}, "more differs"},
		"another number": {func(s string) string {
			return strings.Replace(edited(s), `\"next_memory_slot\":1`, `\"next_memory_slot\":2`, 1)
		}, "more differs"},
		"a device less": {func(s string) string { return strings.Replace(edited(s), `"__rng":{`, `"__rgn":{`, 1) }, "more differs"},
		"cut off":       {func(s string) string { return s[:len(s)/2] }, "EOF while parsing"},
	} {
		p := start(t, program)
		code, b, err := p.call(http.MethodPut, "vm.restore", object{"source_url": "file://" + p.clone(source, dir, c.edit)})
		if err != nil || code != 500 || !strings.Contains(b, c.words) {
			t.Errorf("%s: got %d %s, %v", name, code, b, err)
		}
		p.want(404, "*", "GET", "vm.info", nil)
	}
	// A zone of another name is not missed before there is none.
	p := start(t, program)
	from = p.clone(source, dir, edited)
	b, err := os.ReadFile(filepath.Join(from, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(from, "config.json"), bytes.Replace(b, []byte(`"mem0"`), []byte(`"mem1"`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	p.want(500, chainOf("Error from API", "The VM could not be restored", "Memory manager error", "Guest region collection error", "No memory region found"),
		"PUT", "vm.restore", object{"source_url": "file://" + from})
}
