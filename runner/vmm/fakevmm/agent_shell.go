package fakevmm

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// The commands that a session can run, by the last element of their path:
//
//	true, false, exit N
//	echo [-n] WORDS
//	cat [FILES]      without files: stdin, until that is closed
//	sleep SECONDS    by the guest's clock, which stands still in a pause
//	printenv [NAME], hostname
//	inc              adds one to a count in memory and prints it
//	random           prints 32 bytes of the random generator in hex
//	spam N           prints N bytes
//	disk-read I OFFSET N, disk-write I OFFSET WORDS
//	poweroff
//	sh -c SCRIPT     commands with ; or line feeds, && and || between them, > and >> FILE after them, '' and "" around words,
//	                 and $NAME
//
// What is between two waits (for a clock, for stdin) happens at once.
var builtins = []string{
	"cat", "disk-read", "disk-write", "echo", "exit", "false", "hostname", "inc", "poweroff", "printenv", "random", "sh", "sleep",
	"spam", "true",
}

// command is one command of a session.
type command struct {
	Words  []string
	If     string // "&&" or "||": run it only if the last one succeeded or failed
	To     string // file that stdout goes to
	Append bool
}

// parseScript splits a script into commands.
func parseScript(script string, env map[string]string) ([]command, error) {
	var (
		out   []command
		cur   command
		word  strings.Builder
		begun bool // a word, perhaps empty
		quote rune
		file  bool // the next word is the file of a redirection
	)
	endWord := func() {
		if begun && file {
			cur.To, file = word.String(), false
		} else if begun {
			cur.Words = append(cur.Words, word.String())
		}
		word.Reset()
		begun = false
	}
	endCommand := func(next string) {
		endWord()
		if len(cur.Words) > 0 {
			out = append(out, cur)
		}
		cur = command{If: next}
	}
	runes := []rune(script)
	for i := 0; i < len(runes); i++ {
		c := runes[i]
		twice := i+1 < len(runes) && runes[i+1] == c
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case quote == '\'':
			word.WriteRune(c)
		case c == '$':
			name := i + 1
			for i+1 < len(runes) && (runes[i+1] == '_' || runes[i+1] >= '0' && runes[i+1] <= '9' || runes[i+1]|0x20 >= 'a' && runes[i+1]|0x20 <= 'z') {
				i++
			}
			word.WriteString(env[string(runes[name:i+1])])
			begun = true
		case quote != 0:
			word.WriteRune(c)
		case c == '\'' || c == '"':
			quote, begun = c, true
		case c == ' ' || c == '\t':
			endWord()
		case c == ';' || c == '\n':
			endCommand("")
		case (c == '&' || c == '|') && twice:
			endCommand(string(runes[i : i+2]))
			i++
		case c == '>':
			endWord()
			file = true
			if cur.Append = twice; twice {
				i++
			}
		case c == '&' || c == '|' || c == '<' || c == '(' || c == '`':
			return nil, fmt.Errorf("a fake shell has no %q", c)
		default:
			word.WriteRune(c)
			begun = true
		}
	}
	if quote != 0 {
		return nil, errors.New("unterminated quote")
	}
	endCommand("")
	return out, nil
}

// session is a session with the commands that its program still has to run.
type session struct {
	guestapi.Session
	Env      map[string]string
	Commands []command // still to be run; the first one may be waiting
	Status   int       // of the last command
	Out, Err stream
	Stdin    []byte        // not read yet
	WakeAt   time.Duration // end of a sleep, by the guest's clock; 0: none
	KillAt   time.Duration // end of a timeout
}

// stream is the output of a session: its end, and how many bytes before it were dropped.
type stream struct {
	Data  []byte
	First int64
}

const maxStream = 64 << 10

func (o *stream) write(b []byte) {
	o.Data = append(o.Data, b...)
	if over := len(o.Data) - maxStream; over > 0 {
		o.Data, o.First = o.Data[over:], o.First+int64(over)
	}
}

func (o *stream) end() int64 { return o.First + int64(len(o.Data)) }

// machineView is what commands need in addition to the state.
type machineView struct {
	now   time.Duration // the guest's clock
	disks []*Disk
	off   func()
}

// start makes a session and runs it until it waits or ends.
func (s *agentState) start(spec guestapi.SessionSpec, m machineView) (*session, error) {
	if len(spec.Command) == 0 || spec.Command[0] == "" || spec.TimeoutMS < 0 {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "command must name a program")
	}
	if spec.ID == "" {
		spec.ID = core.NewID[core.SessionID]()
	} else if _, err := core.ParseID[core.SessionID](string(spec.ID)); err != nil {
		return nil, err
	}
	if s.session(spec.ID) != nil {
		return nil, core.Errorf(core.AlreadyExists, guestapi.CodeSessionExists, "the session %s exists already", spec.ID)
	}
	env := map[string]string{"PATH": "/usr/bin:/bin", "HOME": "/root"}
	maps.Copy(env, s.Env)
	maps.Copy(env, spec.Env)
	name := path.Base(spec.Command[0])
	if !slices.Contains(builtins, name) {
		return nil, core.Errorf(core.NotFound, guestapi.CodeCommandNotFound, "%s: no such program, or its interpreter or working directory is missing", core.Clip(spec.Command[0]))
	}
	commands := []command{{Words: append([]string{name}, spec.Command[1:]...)}}
	if name == "sh" {
		if len(spec.Command) < 3 || spec.Command[1] != "-c" {
			return nil, core.Errorf(core.Invalid, guestapi.CodeCommandFailed, "a fake shell needs -c and a script")
		}
		var err error
		if commands, err = parseScript(spec.Command[2], env); err != nil {
			return nil, core.Errorf(core.Invalid, guestapi.CodeCommandFailed, "sh: %v", err)
		}
	}
	s.NextPID++
	n := &session{
		Session: guestapi.Session{
			ID: spec.ID, Command: spec.Command, Cwd: spec.Cwd, User: spec.User, PTY: spec.PTY, State: guestapi.SessionRunning,
			PID: s.NextPID, StartedAt: time.Now().UTC(), StdinOpen: spec.StdinOpen || spec.PTY,
		},
		Env: env, Commands: commands, Stdin: spec.Stdin,
	}
	if spec.TimeoutMS > 0 {
		n.KillAt = m.now + time.Duration(spec.TimeoutMS)*time.Millisecond
	}
	s.Sessions = append(s.Sessions, n)
	s.advance(n, m)
	return n, nil
}

func (s *agentState) session(id core.SessionID) *session {
	for _, n := range s.Sessions {
		if n.ID == id {
			return n
		}
	}
	return nil
}

func (s *agentState) workload() []core.WorkloadProcess {
	var out []core.WorkloadProcess
	for _, n := range s.Sessions {
		if n.State == guestapi.SessionRunning {
			out = append(out, core.WorkloadProcess{PID: n.PID, Command: core.Clip(n.Command[0])})
		}
	}
	return out
}

func (s *agentState) running() int {
	count := 0
	for _, n := range s.Sessions {
		if n.State == guestapi.SessionRunning {
			count++
		}
	}
	return count
}

// advance runs a session until it waits or ends.
func (s *agentState) advance(n *session, m machineView) {
	for n.State == guestapi.SessionRunning {
		if n.KillAt > 0 && m.now >= n.KillAt {
			n.TimedOut = true
			n.kill("SIGKILL", 9)
			return
		}
		if len(n.Commands) == 0 {
			n.exit(n.Status)
			return
		}
		c := n.Commands[0]
		if c.If == "&&" && n.Status != 0 || c.If == "||" && n.Status == 0 {
			n.Commands = n.Commands[1:]
			continue
		}
		waits := s.run(n, c, m)
		if waits {
			return
		}
		if n.State == guestapi.SessionRunning {
			n.Commands = n.Commands[1:]
		}
	}
}

func (n *session) exit(status int) {
	now := time.Now().UTC()
	n.State, n.ExitCode, n.EndedAt, n.StdinOpen, n.Commands, n.Stdin = guestapi.SessionExited, &status, &now, false, nil, nil
}

func (n *session) kill(name string, number int) {
	n.Signal = name
	n.exit(128 + number)
}

// call is one run of a command.
type call struct {
	s       *agentState
	n       *session
	m       machineView
	command command
	args    []string
	out     []byte
}

// arg is the first argument.
func (c *call) arg() string {
	if len(c.args) == 0 {
		return ""
	}
	return c.args[0]
}

func (c *call) fail(format string, a ...any) {
	c.n.Err.write(fmt.Appendf(nil, c.command.Words[0]+": "+format+"\n", a...))
	c.n.Status = 1
}

// run runs one command. It reports whether the command waits; then it is called again.
func (s *agentState) run(n *session, cmd command, m machineView) (waits bool) {
	c := &call{s: s, n: n, m: m, command: cmd, args: cmd.Words[1:]}
	n.Status = 0
	switch cmd.Words[0] {
	case "true":
	case "false":
		n.Status = 1
	case "exit":
		status, err := strconv.Atoi(c.arg())
		if err != nil {
			status = 0
		}
		n.exit(status)
	case "echo":
		if c.arg() == "-n" {
			c.out = []byte(strings.Join(c.args[1:], " "))
		} else {
			c.out = []byte(strings.Join(c.args, " ") + "\n")
		}
	case "cat":
		waits = c.cat()
	case "sleep":
		waits = c.sleep()
	case "printenv":
		if c.out = printenv(n.Env, c.arg()); len(c.out) == 0 {
			n.Status = 1
		}
	case "hostname":
		c.out = []byte(s.Identity.Hostname + "\n")
	case "inc":
		s.Counter++
		c.out = fmt.Appendf(nil, "%d\n", s.Counter)
	case "random":
		c.out = []byte(hex.EncodeToString(s.draw()) + "\n")
	case "spam":
		c.spam()
	case "disk-read", "disk-write":
		var err error
		if c.out, err = disk(cmd.Words[0], c.args, m.disks); err != nil {
			c.fail("%v", err)
		}
	case "poweroff":
		m.off()
	default:
		c.fail("not found")
		n.Status = 127
	}
	s.emit(n, cmd, c.out)
	return waits
}

func (c *call) cat() (waits bool) {
	if len(c.args) == 0 {
		c.out, c.n.Stdin = c.n.Stdin, nil
		if waits = c.n.StdinOpen; waits {
			c.n.Commands[0].Append = true // for the next output of this command
		}
	}
	for _, name := range c.args {
		f, ok := c.s.Files[clean(name)]
		if !ok {
			c.fail("%s: No such file or directory", name)
		}
		c.out = append(c.out, f.Data...)
	}
	return waits
}

func (c *call) sleep() (waits bool) {
	if c.n.WakeAt == 0 {
		seconds, err := strconv.ParseFloat(c.arg(), 64)
		if err != nil || seconds < 0 {
			c.fail("invalid time interval %q", c.arg())
			return false
		}
		c.n.WakeAt = c.m.now + time.Duration(seconds*float64(time.Second)) + 1 // 0 means no sleep
	}
	if c.m.now < c.n.WakeAt {
		return true
	}
	c.n.WakeAt = 0
	return false
}

func (c *call) spam() {
	count, err := strconv.Atoi(c.arg())
	if err != nil || count < 0 || count > 64<<20 {
		c.fail("invalid number %q", c.arg())
		return
	}
	c.out = []byte(strings.Repeat("0123456789abcde\n", count/16+1)[:count])
}

// emit sends the output of a command to its destination.
func (s *agentState) emit(n *session, c command, out []byte) {
	if c.To == "" {
		n.Out.write(out)
		return
	}
	name := clean(c.To)
	f := s.Files[name]
	if f.Mode == "" {
		f.Mode = "0644"
	}
	if c.Append {
		f.Data = append(slices.Clone(f.Data), out...)
	} else {
		f.Data = out
	}
	f.Changed = time.Now().UTC()
	s.Files[name] = f
}

func printenv(env map[string]string, name string) []byte {
	if name != "" {
		if v, ok := env[name]; ok {
			return []byte(v + "\n")
		}
		return nil
	}
	var out []byte
	for _, k := range slices.Sorted(maps.Keys(env)) {
		out = fmt.Appendf(out, "%s=%s\n", k, env[k])
	}
	return out
}

func disk(verb string, args []string, disks []*Disk) ([]byte, error) {
	if len(args) < 3 {
		return nil, errors.New("needs a disk, an offset, and a length or words")
	}
	i, err1 := strconv.Atoi(args[0])
	offset, err2 := strconv.ParseInt(args[1], 10, 64)
	if err := errors.Join(err1, err2); err != nil || i < 0 || i >= len(disks) || offset < 0 {
		return nil, fmt.Errorf("no disk %q with an offset %q", args[0], args[1])
	}
	if verb == "disk-write" {
		_, err := disks[i].WriteAt([]byte(strings.Join(args[2:], " ")), offset)
		return nil, err
	}
	n, err := strconv.Atoi(args[2])
	if err != nil || n < 0 || n > maxStream {
		return nil, fmt.Errorf("invalid length %q", args[2])
	}
	b := make([]byte, n)
	_, err = disks[i].ReadAt(b, offset)
	return append(b, '\n'), err
}
