package writelog_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/runner/writelog"
)

const owner core.RunnerID = "rn_owner"

// TestMain is also the process that TestKill kills.
func TestMain(m *testing.M) {
	if path := os.Getenv("WRITELOG_TEST_FILE"); path != "" {
		if err := appendForEver(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	testleak.Main(m)
}

// appendForEver says each path once its write is kept.
func appendForEver(path string) error {
	l, err := writelog.Open(path, owner, slog.Default())
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		w := runnerapi.DataWrite{KeyID: core.KeyID(fmt.Sprint("key_", i/writelog.KeyWrites)), Path: fmt.Sprintf("/%d-%d", os.Getpid(), i)}
		if _, _, err := l.Append(w); core.CodeOf(err) == core.CodeRunnerUnreachable { // it is full
			_, list := l.Pending()
			if err := l.Recorded(list[0].Number); err != nil {
				return err
			}
			continue
		} else if core.CodeOf(err) == core.CodeRateLimited {
			continue
		} else if err != nil {
			return err
		}
		fmt.Println(w.Path)
	}
}

func open(t *testing.T, path string) *writelog.Log {
	t.Helper()
	l, err := writelog.Open(path, owner, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() }) // it may be closed already
	return l
}

func add(t *testing.T, l *writelog.Log, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if _, _, err := l.Append(runnerapi.DataWrite{KeyID: "key_1", SandboxID: "sb_1", Path: p}); err != nil {
			t.Fatal(err)
		}
	}
}

// reported are the paths that would be reported, with their numbers.
func reported(l *writelog.Log) string {
	_, list := l.Pending()
	var out []string
	for _, w := range list {
		out = append(out, fmt.Sprintf("%d:%s", w.Number, w.Path))
	}
	return strings.Join(out, " ")
}

func logOf(l *writelog.Log) string {
	log, _ := l.Pending()
	return log
}

// TestKill kills a process that appends, again and again. Every write that was acknowledged is reported afterwards.
func TestKill(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "writes.log")
	acknowledged := map[string]bool{}
	for round := range 8 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), "WRITELOG_TEST_FILE="+path)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); n++ {
			acknowledged[lines.Text()] = true
			if n == 20+13*round {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := cmd.Wait(); err == nil || stderr.Len() > 0 {
			t.Fatalf("round %d: %v, %s", round, err, stderr.String())
		}
	}
	there := map[string]bool{}
	_, list := open(t, path).Pending()
	for i, w := range list {
		there[w.Path] = true
		if i > 0 && w.Number != list[i-1].Number+1 {
			t.Errorf("number %d follows %d", w.Number, list[i-1].Number)
		}
	}
	for p := range acknowledged {
		if !there[p] {
			t.Errorf("%s was acknowledged and is lost", p)
		}
	}
	t.Logf("%d writes acknowledged, %d kept", len(acknowledged), len(list))
}

// TestNumbers: numbers go on after a restart, and after everything was recorded. What was forgotten is never another write's.
func TestNumbers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "writes.log")
	again := func(l *writelog.Log) *writelog.Log {
		t.Helper()
		log := logOf(l)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		l = open(t, path)
		if logOf(l) != log {
			t.Errorf("after a restart it is log %s, not %s", logOf(l), log)
		}
		return l
	}
	l := open(t, path)
	add(t, l, "a", "b", "c")
	if err := l.Recorded(2); err != nil {
		t.Fatal(err)
	}
	add(t, l, "d")
	if got := reported(l); got != "3:c 4:d" {
		t.Errorf("reported: %s", got)
	}
	l = again(l)
	if got := reported(l); !strings.HasSuffix(got, "3:c 4:d") {
		t.Errorf("reported after a restart: %s", got)
	}
	if err := l.Recorded(4); err != nil {
		t.Fatal(err)
	}
	l = again(l)
	add(t, l, "e")
	if got := reported(l); got != "5:e" {
		t.Errorf("reported: %s", got)
	}
}

// TestDamage: a last line that is cut was not acknowledged, and goes. Where another line is damaged, the writes before it are reported,
// no number is given twice, and the file is set aside. The file of another runner is set aside, and another log begins.
func TestDamage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		damage func(b []byte) []byte
		left   string
		aside  bool
		isNew  bool
	}{
		"cut in the last line":  {func(b []byte) []byte { return b[:len(b)-5] }, "1:a 2:b", false, false},
		"half a line more":      {func(b []byte) []byte { return append(b, `{"number":4,"pa`...) }, "1:a 2:b 3:c", false, false},
		"an odd line":           {func(b []byte) []byte { return bytes.Replace(b, []byte(`"number":2`), []byte(`"number":x`), 1) }, "1:a", true, false},
		"a number twice":        {func(b []byte) []byte { return bytes.Replace(b, []byte(`"number":2`), []byte(`"number":1`), 1) }, "1:a", true, false},
		"a long line":           {func(b []byte) []byte { return append(b, bytes.Repeat([]byte("x"), 1<<20)...) }, "1:a 2:b 3:c", true, false},
		"empty":                 {func([]byte) []byte { return nil }, "", true, true},
		"an odd first line":     {func(b []byte) []byte { return append([]byte("{}"), b[bytes.IndexByte(b, '\n'):]...) }, "", true, true},
		"of a runner of before": {func(b []byte) []byte { return bytes.Replace(b, []byte(owner), []byte("rn_other"), 1) }, "", true, true},
	} {
		path := filepath.Join(t.TempDir(), "writes.log")
		l := open(t, path)
		log := logOf(l)
		add(t, l, "a", "b", "c")
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		damaged := damageFile(t, path, c.damage)
		l = open(t, path)
		if got := reported(l); got != c.left {
			t.Errorf("%s: reported: %q, want %q", name, got, c.left)
		}
		if (logOf(l) != log) != c.isNew {
			t.Errorf("%s: the log was %s and is %s", name, log, logOf(l))
		}
		files := asideOf(t, path)
		if (len(files) == 1) != c.aside {
			t.Fatalf("%s: set aside: %v", name, files)
		}
		if c.aside {
			if kept, err := os.ReadFile(files[0]); err != nil || !bytes.Equal(kept, damaged) {
				t.Errorf("%s: the file is not set aside: %v", name, err)
			}
		}
		for range 2 { // the gap in the numbers must not be damage
			add(t, l, "next")
			_, list := l.Pending()
			if n := list[len(list)-1].Number; c.aside && !c.isNew && n <= 3 {
				t.Errorf("%s: number %d is given again", name, n)
			}
			before := reported(l)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			if l = open(t, path); reported(l) != before || len(asideOf(t, path)) != len(files) {
				t.Errorf("%s: reported %q before a restart, and %q after it", name, before, reported(l))
			}
		}
	}
}

func damageFile(t *testing.T, path string, damage func(b []byte) []byte) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b = damage(b)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return b
}

func asideOf(t *testing.T, path string) []string {
	t.Helper()
	files, err := filepath.Glob(path + ".aside-*")
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestAsideIsBounded damages the file again and again. The newest four files stay.
func TestAsideIsBounded(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "writes.log")
	var last []byte
	for i := range 7 {
		l := open(t, path)
		add(t, l, "a")
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		last = damageFile(t, path, func(b []byte) []byte { return append(b, fmt.Sprintln("odd", i)...) })
	}
	if got := reported(open(t, path)); strings.Count(got, ":a") != 7 {
		t.Errorf("reported: %s", got)
	}
	files := asideOf(t, path)
	if len(files) != 4 {
		t.Fatalf("set aside: %v", files)
	}
	if b, err := os.ReadFile(files[3]); err != nil || !bytes.Equal(b, last) {
		t.Errorf("the newest file is not set aside: %v", err)
	}
}

// TestFailedSync: the kernel reports a failed sync once, and drops the data. No write is acknowledged in that file any more.
func TestFailedSync(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "writes.log")
	l := open(t, path)
	add(t, l, "a")
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0) // it takes writes, keeps nothing and cannot be synced
	if err != nil {
		t.Fatal(err)
	}
	file := l.SwapFile(null)
	if _, _, err := l.Append(runnerapi.DataWrite{KeyID: "key_1", Path: "b"}); core.CodeOf(err) != core.CodeWriteNotLogged {
		t.Fatalf("with a failed sync: %v", err)
	}
	if err := l.SwapFile(file).Close(); err != nil {
		t.Fatal(err)
	}
	add(t, l, "c")
	if got := reported(l); got != "1:a 2:c" {
		t.Errorf("reported: %s", got)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := reported(open(t, path)); got != "1:a 2:c" {
		t.Errorf("reported after a restart: %s", got)
	}
}

// TestHeartbeatWaitsForNoDisk: what a heartbeat calls returns while the disk does not answer.
func TestHeartbeatWaitsForNoDisk(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "writes.log")
	l := open(t, path)
	add(t, l, "a", "b")
	release := l.HoldDisk()
	appended := make(chan error, 1)
	go func() {
		_, _, err := l.Append(runnerapi.DataWrite{KeyID: "key_1", Path: "c"})
		appended <- err
	}()
	beaten := make(chan error, 1)
	go func() { beaten <- errors.Join(l.Recorded(1), l.Recorded(2)) }()
	select {
	case err := <-beaten:
		if err != nil {
			t.Error(err)
		}
		if got := reported(l); got != "" { // what is not durable is not reported
			t.Errorf("reported: %s", got)
		}
	case <-time.After(5 * time.Minute):
		t.Error("a heartbeat waits for the disk")
	}
	release()
	if err := <-appended; err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := reported(open(t, path)); got != "3:c" {
		t.Errorf("reported after a restart: %s", got)
	}
}

// TestCompactionLosesNothing appends from many goroutines while the file is compacted again and again, and reads it afterwards.
func TestCompactionLosesNothing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "writes.log")
	l := open(t, path)
	var appending sync.WaitGroup
	const each, many = 500, 8
	for g := range many {
		appending.Go(func() {
			for i := 0; i < each; {
				_, _, err := l.Append(runnerapi.DataWrite{KeyID: core.KeyID(fmt.Sprint(g, i%50)), Path: "p"})
				switch core.CodeOf(err) {
				case core.CodeRunnerUnreachable, core.CodeRateLimited: // it is full
				default:
					if err != nil {
						t.Error(err)
					}
					i++
				}
			}
		})
	}
	done := make(chan struct{})
	go func() {
		appending.Wait()
		close(done)
	}()
	check := func(list []runnerapi.DataWrite, first int64) {
		for i, w := range list {
			if w.Number != first+int64(i) {
				t.Errorf("write %d is reported in the place of %d", w.Number, first+int64(i))
				return
			}
		}
	}
	first := int64(1)
	for more := true; more; {
		select {
		case <-done:
			more = false
		default:
		}
		_, list := l.Pending()
		check(list, first)
		if n := len(list) - 3; n > 0 && more {
			if err := l.Recorded(list[n].Number); err != nil {
				t.Error(err)
			}
			first = list[n].Number + 1
		}
	}
	_, before := l.Pending()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	_, list := open(t, path).Pending()
	check(list, first)
	if len(list) != len(before) || first+int64(len(list)) != many*each+1 || len(asideOf(t, path)) > 0 {
		t.Errorf("%d writes from %d on are reported after a restart, %d before it; set aside: %v", len(list), first, len(before), asideOf(t, path))
	}
}

// TestFileIsBounded appends and records for long, with one write that always waits. The file stays within its bound.
func TestFileIsBounded(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "writes.log")
	l := open(t, path)
	long := strings.Repeat("p", runnerapi.MaxDataPath)
	most := int64(0)
	for range 3 * runnerapi.MaxDataWrites {
		add(t, l, long)
		_, list := l.Pending()
		if err := l.Recorded(list[len(list)-1].Number - 1); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, info.Size())
	}
	t.Logf("the file had at most %d KiB", most>>10)
	if most > 2*runnerapi.MaxDataWrites*2*runnerapi.MaxDataPath {
		t.Errorf("the file grew to %d bytes", most)
	}
}

// TestAtOnce appends from many goroutines while others record.
func TestAtOnce(t *testing.T) {
	t.Parallel()
	l := open(t, filepath.Join(t.TempDir(), "writes.log"))
	var wg sync.WaitGroup
	const each, many = 100, 8
	var mu sync.Mutex
	seen := map[string]int{}
	for g := range many {
		wg.Go(func() {
			for i := range each {
				if _, _, err := l.Append(runnerapi.DataWrite{KeyID: core.KeyID(strconv.Itoa(g)), Path: fmt.Sprint(g, "/", i)}); err != nil {
					t.Error(err)
				}
				if i%10 == 9 {
					mu.Lock()
					_, list := l.Pending()
					for _, w := range list {
						seen[w.Path]++
					}
					if len(list) > 0 { // else another has taken them
						if err := l.Recorded(list[len(list)-1].Number); err != nil {
							t.Error(err)
						}
					}
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	_, list := l.Pending()
	for _, w := range list {
		seen[w.Path]++
	}
	for p, n := range seen {
		if n != 1 {
			t.Errorf("%s was reported %d times", p, n)
		}
	}
	if len(seen) != each*many {
		t.Errorf("%d of %d writes were reported", len(seen), each*many)
	}
}

// TestFullDisk: where a record cannot be kept the write is refused. What was kept stays, and with room it goes on.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, "writes.log")
	l := open(t, path)
	add(t, l, "a")
	if err := os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 180<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	var refused error
	kept := 1
	for i := range runnerapi.MaxDataWrites {
		if _, _, refused = l.Append(runnerapi.DataWrite{KeyID: core.KeyID(strconv.Itoa(i)), Path: strings.Repeat("p", 1000)}); refused != nil {
			break
		}
		kept++
	}
	if core.CodeOf(refused) != core.CodeWriteNotLogged || core.CategoryOf(refused) != core.Unavailable {
		t.Fatalf("on a full disk: %v", refused)
	}
	if _, list := l.Pending(); len(list) != kept {
		t.Errorf("%d writes are reported, and %d were acknowledged", len(list), kept)
	}
	if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
		t.Fatal(err)
	}
	add(t, l, "b")
	before := reported(l)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if again := open(t, path); reported(again) != before {
		t.Error("after a restart other writes are reported")
	}
}

// TestRestartForgetsNothing: a restart tells what waits and not what was recorded. A file without the mark of what was recorded
// holds more than one heartbeat may carry: it is reported in parts, and each write is reported.
func TestRestartForgetsNothing(t *testing.T) {
	t.Parallel()
	const recorded, last = 1999, 3910
	path := filepath.Join(t.TempDir(), "writes.log")
	l := open(t, path)
	for i := 1; i <= last; i++ {
		if _, _, err := l.Append(runnerapi.DataWrite{KeyID: core.KeyID(strconv.Itoa(i)), Path: "p"}); err != nil {
			t.Fatal(err)
		}
		if i == recorded+1 {
			if err := l.Recorded(recorded); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	unmarked := fmt.Appendf(nil, "{\"log\":\"old\",\"runner\":\"%s\",\"next\":1}\n", owner)
	for i := 1; i <= last; i++ {
		unmarked = fmt.Appendf(unmarked, "{\"number\":%d,\"path\":\"p\"}\n", i)
	}
	for name, c := range map[string]struct {
		file  []byte
		first int64
	}{
		"marked":   {whole, recorded + 1},
		"unmarked": {unmarked, 1},
	} {
		path := filepath.Join(t.TempDir(), "writes.log")
		if err := os.WriteFile(path, c.file, 0o600); err != nil {
			t.Fatal(err)
		}
		l := open(t, path)
		want := c.first
		for _, list := l.Pending(); len(list) > 0; _, list = l.Pending() {
			if len(list) > runnerapi.MaxDataWrites {
				t.Fatalf("%s: %d writes are reported at once", name, len(list))
			}
			for _, w := range list {
				if w.Number != want {
					t.Fatalf("%s: write %d is reported in the place of %d", name, w.Number, want)
				}
				want++
			}
			if err := l.Recorded(list[len(list)-1].Number); err != nil {
				t.Fatal(err)
			}
		}
		if want != last+1 {
			t.Errorf("%s: the writes up to %d were reported, and not up to %d", name, want-1, last)
		}
	}
}
