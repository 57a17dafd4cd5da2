package firsthour

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/creack/pty"
)

// columns is the width of the terminal.
const columns = 100

// patience is how long anything may take. Machines are emulated here, perhaps beside other work.
const patience = 5 * time.Minute

// press is a key or a text that is typed when something is on the screen.
type press struct{ after, keys string }

// screen is a program in a terminal, and what it has printed.
type screen struct {
	cmd      *exec.Cmd
	terminal *os.File

	mu    sync.Mutex // guards text
	text  string
	more  chan struct{} // has a token when text has grown
	ended chan struct{} // closed when nothing more comes
}

// open starts a program in a terminal of its own.
func open(t *testing.T, cmd *exec.Cmd) *screen {
	t.Helper()
	f, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: columns, Rows: 40})
	if err != nil {
		t.Fatal(err)
	}
	s := &screen{cmd: cmd, terminal: f, more: make(chan struct{}, 1), ended: make(chan struct{})}
	go s.read()
	return s
}

func (s *screen) read() {
	defer close(s.ended)
	for buf := make([]byte, 4096); ; {
		n, err := s.terminal.Read(buf)
		s.mu.Lock()
		s.text += string(buf[:n])
		s.mu.Unlock()
		select {
		case s.more <- struct{}{}:
		default:
		}
		if err != nil { // the last program has closed the terminal
			return
		}
	}
}

// all is everything that was printed, as the screen shows it.
func (s *screen) all() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return shown(s.text)
}

// mark is how much was printed so far.
func (s *screen) mark() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.text)
}

// since is what was printed after a mark. The text of all may become shorter: a line of progress is taken away.
func (s *screen) since(mark int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return shown(s.text[mark:])
}

// await waits for a text behind what earlier calls have seen: it returns where the text ends.
func (s *screen) await(from int, text string) (int, error) {
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		s.mu.Lock()
		at := strings.Index(s.text[from:], text)
		s.mu.Unlock()
		if at >= 0 {
			return from + at + len(text), nil
		}
		select {
		case <-s.more:
		case <-s.ended:
			s.mu.Lock()
			at := strings.Index(s.text[from:], text)
			s.mu.Unlock()
			if at >= 0 {
				return from + at + len(text), nil
			}
			return 0, fmt.Errorf("the program ended before it printed %q", text)
		case <-late.C:
			return 0, fmt.Errorf("%q was not printed within %s", text, patience)
		}
	}
}

// wait returns the exit status of the program. It kills a program that does not end.
func (s *screen) wait() (int, error) {
	done := make(chan struct{})
	go func() {
		_ = s.cmd.Wait() // the state says it
		close(done)
	}()
	var err error
	select {
	case <-done:
	case <-time.After(patience):
		err = fmt.Errorf("it did not end within %s", patience)
		_ = s.cmd.Process.Kill()
		<-done
	}
	// A program in the background may keep the terminal open.
	select {
	case <-s.ended:
	case <-time.After(10 * time.Second):
	}
	_ = s.terminal.Close()
	<-s.ended
	return s.cmd.ProcessState.ExitCode(), err
}

// play runs a program to its end, and types what the presses say.
func play(t *testing.T, cmd *exec.Cmd, keys []press) (status int, text string) {
	t.Helper()
	s := open(t, cmd)
	at := 0
	for _, k := range keys {
		end, err := s.await(at, k.after)
		if err == nil {
			at = end
			_, err = s.terminal.WriteString(k.keys)
		}
		if err != nil {
			_ = s.cmd.Process.Kill()
			_, _ = s.wait()
			t.Errorf("%v; the screen shows:\n%s", err, s.all())
			return -1, s.all()
		}
	}
	status, err := s.wait()
	if err != nil {
		t.Errorf("%v; the screen shows:\n%s", err, s.all())
	}
	return status, s.all()
}

var (
	erased = regexp.MustCompile(`[^\n]*\r?\x1b\[K`) // a line of progress that was taken away
	escape = regexp.MustCompile(`\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]`)
)

// shown is what is left of a text on the screen.
func shown(text string) string {
	text = strings.ReplaceAll(text, "\r\n", "\n")
	text = erased.ReplaceAllString(text, "")
	return escape.ReplaceAllString(text, "")
}

// rawTexts are words of Go, cobra, the kernel and our own workshop, which mean nothing to a user.
var rawTexts = regexp.MustCompile(`dial tcp|dial unix|strconv\.|parsing "|accepts \d+ arg|requires at least \d|first path segment|context canceled|context deadline|` +
	`ended with its epoch|unexpected EOF|: EOF\b|i/o timeout|bind: address already|connection refused|json: cannot|unmarshal|invalid character '|` +
	`no such host|missing ']'|broken pipe|%!|<nil>|goroutine \d|\.go:\d|SQLSTATE|x509:|tls: |http: |exit status \d+: `)

// heading is the first line of a table.
var heading = regexp.MustCompile(`^[A-Z][A-Z/-]*( {2,}[A-Z][A-Z/-]*)+ *$`)

// faultsOf are what no output may have: raw texts, a line twice, and tables wider than the terminal.
func faultsOf(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		for _, found := range rawTexts.FindAllString(line, -1) {
			out = append(out, fmt.Sprintf("the raw text %q in %q", found, line))
		}
	}
	table := false
	before := ""
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimRight(line, " ")
		table = heading.MatchString(line) || table && line != ""
		if n := utf8.RuneCountInString(line); table && n > columns {
			out = append(out, fmt.Sprintf("a table has a line of %d columns: %s", n, line))
		}
		if strings.HasPrefix(line, "coppice: ") && line == before {
			out = append(out, fmt.Sprintf("twice: %s", line))
		}
		before = line
	}
	return out
}

func TestFaultsOf(t *testing.T) {
	t.Parallel()
	wide := strings.Repeat("x", columns+1)
	for text, want := range map[string]int{
		"fine\n":                                0,
		"Get \"x\": dial tcp 1.2.3.4: refused":  1,
		"NAME  AGE\na  " + wide + "\n":          1,
		"prose " + wide + "\n":                  0,
		"coppice: no\ncoppice: no\n":            1,
		"NAME  AGE\na  1s\n\nprose " + wide:     0,
		"accepts 1 arg(s), received 2: <nil>\n": 2,
	} {
		if got := faultsOf(text); len(got) != want {
			t.Errorf("%q has the faults %q", text, got)
		}
	}
}

func TestShown(t *testing.T) {
	t.Parallel()
	if got := shown("\r\x1b[Kworking … 1 s\r\x1b[Kworking … 2 s\r\x1b[Kdone\r\n\x1b[1mbold\x1b[0m\r\n"); got != "done\nbold\n" {
		t.Errorf("%q", got)
	}
}

// What differs from run to run: ids, addresses, times and amounts.
var volatile = []struct {
	what *regexp.Regexp
	as   string
}{
	{regexp.MustCompile(`\b(ws|ckpt|op|sess|prj)_[0-9a-z]{26}\b`), "${1}_ID"},
	{regexp.MustCompile(`\b[0-9a-hjkmnp-tv-z]{8}\b`), "TAIL"},
	{regexp.MustCompile(`\b\d+\.\d+\.\d+\.\d+\b`), "ADDRESS"},
	{regexp.MustCompile(`\d+(\.\d+)? (ms|s)\b`), "TIME"},
	{regexp.MustCompile(`\d+(\.\d+)? ([KMGT]i)?B\b`), "SIZE"},
	{regexp.MustCompile(`\b\d+s\b`), "AGE"},
	{regexp.MustCompile(`\b\d+m\b`), "AGE"},
	{regexp.MustCompile(`([a-z]+ TIME, )+…`), "STAGES"},
	{regexp.MustCompile(` +`), " "},
	{regexp.MustCompile(` (\n|$)`), "$1"},
}

// shape is a text without what differs from run to run.
func shape(text string) string {
	for _, v := range volatile {
		text = v.what.ReplaceAllString(text, v.as)
	}
	return strings.TrimSpace(text)
}
