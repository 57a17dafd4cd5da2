package firsthour

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/test/testvm"
)

var (
	hour = flag.Bool("hour", false, "run TestFirstHour, which takes minutes")
	only = flag.String("only", "", "run only the documents and items whose names match this regular expression, such as README or ^1")
)

func chosen(name string) bool { return regexp.MustCompile(*only).MatchString(name) }

func TestMain(m *testing.M) {
	daemon.EnterConfined()
	flag.Parse()
	os.Exit(m.Run())
}

// user is somebody at a terminal on a machine with `coppice dev`.
type user struct {
	dir string // home, and the working directory
	dev *screen
	log *os.File // everything that was typed and shown
}

// newUser starts a server in a terminal.
func newUser(t *testing.T) *user {
	t.Helper()
	store, _ := testvm.Image(t)
	dir := t.TempDir()
	u := &user{dir: dir}
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := testvm.Compile(t.Context(), filepath.Join(dir, "bin", "coppice"), "github.com/coppice-dev/coppice/cmd/coppice"); err != nil {
		t.Fatal(err)
	}
	var err error
	if u.log, err = os.Create(transcript(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = u.log.Close() })
	t.Setenv("COPPICE_IMAGES_DIR", store.Dir())
	u.start(t)
	return u
}

// transcript is where the session is written: COPPICE_TRANSCRIPT, or a file that goes with the test.
func transcript(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("COPPICE_TRANSCRIPT"); path != "" {
		return path
	}
	return filepath.Join(t.TempDir(), "transcript")
}

// shell makes a command that a shell runs in the user's directory.
func (u *user) shell(ctx context.Context, line string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "bash", "-c", line)
	cmd.Dir = u.dir
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "COPPICE_") && !strings.HasPrefix(v, "COPPICE_IMAGES_DIR")
	}),
		"PATH="+filepath.Join(u.dir, "bin")+":"+os.Getenv("PATH"), "HOME="+u.dir, "XDG_CONFIG_HOME="+filepath.Join(u.dir, ".config"), "TERM=xterm", "LANG=C.UTF-8")
	if server, token := u.connection(); server != "" {
		cmd.Env = append(cmd.Env, "SERVER="+server, "KEY="+token)
	}
	return cmd
}

// connection is the server and the key of the context that `coppice dev` has entered.
func (u *user) connection() (server, token string) {
	b, err := os.ReadFile(filepath.Join(u.dir, ".config/coppice/connection.json"))
	if err != nil {
		return "", ""
	}
	var file struct{ Server, Token string }
	if json.Unmarshal(b, &file) != nil {
		return "", ""
	}
	return file.Server, file.Token
}

// start runs `coppice dev` until it says that it is ready.
func (u *user) start(t *testing.T) {
	t.Helper()
	u.dev = open(t, u.shell(context.WithoutCancel(t.Context()), "exec coppice dev --data-dir data --listen 127.0.0.1:0"))
	if _, err := u.dev.await(0, "coppice ws resume."); err != nil {
		t.Fatalf("%v:\n%s", err, u.dev.all())
	}
	ended := u.dev
	t.Cleanup(func() {
		if ended.cmd.ProcessState == nil {
			_ = ended.cmd.Process.Signal(syscall.SIGINT)
			time.AfterFunc(patience, func() { _ = ended.cmd.Process.Kill() })
			_ = ended.cmd.Wait()
		}
	})
}

// stop presses Ctrl-C in the server's terminal and returns what it said, and its status.
func (u *user) stop(t *testing.T) (int, string) {
	t.Helper()
	before := u.dev.mark()
	if _, err := u.dev.terminal.WriteString(ctrlC); err != nil {
		t.Fatal(err)
	}
	status, err := u.dev.wait()
	if err != nil {
		t.Error(err)
	}
	return status, u.dev.since(before)
}

// run types a line and returns what it printed. Every output is checked.
func (u *user) run(t *testing.T, line string, keys ...press) (int, string) {
	t.Helper()
	began := time.Now()
	status, text := play(t, u.shell(t.Context(), line), keys)
	fmt.Fprintf(u.log, "$ %s\n%s[%d after %.1f s]\n\n", line, text, status, time.Since(began).Seconds())
	for _, fault := range faultsOf(text) {
		t.Errorf("%s: %s\n%s", line, fault, text)
	}
	return status, text
}

// must runs a line that has to succeed.
func (u *user) must(t *testing.T, line string) string {
	t.Helper()
	status, text := u.run(t, line)
	if status != 0 {
		t.Fatalf("%s: status %d:\n%s", line, status, text)
	}
	return text
}

// clear ends all workspaces and takes the names of checkpoints away, so that the next page can use them.
func (u *user) clear(t *testing.T) {
	t.Helper()
	u.must(t, `coppice ws rm --all; for c in $(coppice --json ckpt ls | jq -r '.[] | select(.name) | .id'); do coppice ckpt rename $c '' || exit 1; done
		coppice --json project ls | jq -r '.[].name' | grep -qx blue && coppice project rm blue; true`)
}

// TestFirstHour runs the commands of all documents and makes the mistakes of issue 22, in a terminal of 100 columns.
func TestFirstHour(t *testing.T) {
	if !*hour {
		return // ten minutes on a busy machine: make test-first-hour
	}
	u := newUser(t)
	if chosen("hints") {
		t.Run("hints", func(t *testing.T) { u.hints(t) })
	}
	for _, p := range pages {
		if p.all != "" || !chosen(p.file) {
			continue
		}
		t.Run(p.file, func(t *testing.T) { u.page(t, p) })
	}
	u.items(t)
	if faults := faultsOf(u.dev.all()); len(faults) > 0 {
		t.Errorf("the server's terminal: %q", faults)
	}
}

// hints runs the commands that `coppice dev` says to try.
func (u *user) hints(t *testing.T) {
	t.Helper()
	text := u.dev.all()
	_, list, ok := strings.Cut(text, "Try this in another terminal")
	lines := regexp.MustCompile(`(?m)^  (coppice .*?)(?:  .*)?$`).FindAllStringSubmatch(list, -1)
	if !ok || len(lines) < 3 {
		t.Fatalf("coppice dev says:\n%s", text)
	}
	for _, m := range lines {
		if m[1] != "coppice image build" { // the image is there
			u.must(t, m[1])
		}
	}
	u.clear(t)
}

// page runs the commands of a document.
func (u *user) page(t *testing.T, p page) {
	t.Helper()
	for _, line := range p.setup {
		u.must(t, line)
	}
	for _, c := range skipUsage(p.file, readPage(t, p.file)) {
		r := p.rules[c.line]
		if r.skip != "" {
			continue
		}
		if r.before != "" {
			u.must(t, r.before)
		}
		line := named(c.line)
		if r.instead != "" {
			line = r.instead
		} else if word := firstWord(c.line); !slices.Contains(programs, word) {
			t.Fatalf("%s has the line %q, and %q is not among the programs that documents may run as root", p.file, c.line, word)
		}
		if strings.Contains(line, "$COPPICE_SERVER") {
			line = "COPPICE_SERVER=$SERVER COPPICE_TOKEN=$KEY; " + line
		}
		status, text := u.run(t, line, r.keys...)
		if status != r.status {
			t.Errorf("%s: status %d, want %d; it printed:\n%s", line, status, r.status, text)
		}
		for _, want := range r.says {
			if !strings.Contains(text, want) {
				t.Errorf("%s does not print %q:\n%s", line, want, text)
			}
		}
		if c.prints != "" && !r.differs {
			if diff := cmp.Diff(strings.Split(shape(c.prints), "\n"), strings.Split(shape(text), "\n")); diff != "" {
				t.Errorf("%s prints something else (+) than %s says (-):\n%s", line, p.file, diff)
			}
		}
	}
	u.clear(t)
}
