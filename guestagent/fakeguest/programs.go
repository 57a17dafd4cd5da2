package fakeguest

import (
	"cmp"
	"encoding/hex"
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

// The programs of a guest, by the last element of their path:
//
//	true, false, exit N
//	echo WORDS, err WORDS   to stdout, to stderr
//	fill N                  N bytes to stdout
//	cat [FILES]             without files: stdin, until that is closed
//	env                     the environment that the session was started with
//	inc                     adds one to a count in memory and prints it
//	random                  prints 32 bytes of the random generator in hex
//	sleep SECONDS
//	mkdir -p PATH, mv FROM TO
//	sh -c SCRIPT, bash -c SCRIPT   programs with ; between them
//
// A program waits only for stdin and for time. Everything between two waits happens at once.
var programs = []string{"true", "false", "exit", "echo", "err", "fill", "cat", "env", "inc", "random", "sleep", "mkdir", "mv", "sh", "bash"}

// Session is a session with the commands that its program still has to run.
type Session struct {
	guestapi.Session

	Env            map[string]string // of its start
	Commands       [][]string        // still to be run; the first one may be waiting
	Status         int               // of the last command
	Out, Err       Output
	Stdin          []byte        // not read yet
	Wake, Deadline time.Duration // uptimes at which a sleep ends, and at which the session is killed; 0: none
}

// Output is what is kept of an output of a session: its end, and how many bytes before it were dropped.
type Output struct {
	Data  []byte
	First int64
}

func (o *Output) end() int64 { return o.First + int64(len(o.Data)) }

func (s *State) print(o *Output, format string, a ...any) {
	o.Data = fmt.Appendf(o.Data, format, a...)
	if over := len(o.Data) - s.OutputBytes; over > 0 {
		o.Data, o.First = o.Data[over:], o.First+int64(over)
	}
}

// killed is the exit code of a program that was killed.
const killed = 137

// start makes a session and runs it until it waits or ends.
func (s *State) start(spec guestapi.SessionSpec) (*Session, error) {
	if len(spec.Command) == 0 {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "command must name a program")
	}
	id := cmp.Or(spec.ID, core.NewID[core.SessionID]())
	if _, err := s.session(id); err == nil {
		return nil, core.Errorf(core.AlreadyExists, guestapi.CodeSessionExists, "the session %s exists already", id)
	}
	name, args := path.Base(spec.Command[0]), spec.Command[1:]
	if !slices.Contains(programs, name) {
		return nil, core.Errorf(core.NotFound, guestapi.CodeCommandNotFound, "%s: a fake guest has no such program", core.Clip(spec.Command[0]))
	}
	s.NextPID++
	n := &Session{
		Session: guestapi.Session{
			ID: id, Command: spec.Command, Cwd: cmp.Or(spec.Cwd, "/workspace"), User: spec.User, PTY: spec.PTY, State: guestapi.SessionRunning,
			PID: s.NextPID, StartedAt: time.Now().UTC(), StdinOpen: spec.StdinOpen || spec.PTY,
		},
		Commands: [][]string{append([]string{name}, args...)}, Env: spec.Env, Stdin: spec.Stdin,
	}
	if name == "sh" || name == "bash" {
		n.Commands = nil
		if last := len(args) - 1; last > 0 && args[last-1] == "-c" { // also of a shell that another one starts
			for one := range strings.SplitSeq(args[last], ";") {
				n.Commands = append(n.Commands, strings.Fields(one))
			}
		}
	}
	if spec.TimeoutMS > 0 {
		n.Deadline = s.Uptime + time.Duration(spec.TimeoutMS)*time.Millisecond
	}
	s.Sessions = append(s.Sessions, n)
	s.advance(n)
	return n, nil
}

func (s *State) session(id core.SessionID) (*Session, error) {
	for _, n := range s.Sessions {
		if n.ID == id {
			return n, nil
		}
	}
	return nil, core.Errorf(core.NotFound, core.CodeSessionNotFound, "there is no session %q in this sandbox", core.Clip(string(id)))
}

// Workload lists the programs that run.
func (s *State) Workload() []core.WorkloadProcess {
	var out []core.WorkloadProcess
	for _, n := range s.Sessions {
		if n.State == guestapi.SessionRunning {
			out = append(out, core.WorkloadProcess{PID: n.PID, Command: core.Clip(n.Command[0])})
		}
	}
	return out
}

// elapse kills and continues the sessions whose time has come, unless the workload is frozen.
func (s *State) elapse() {
	if s.State != guestapi.StateReleased {
		return
	}
	for _, n := range s.Sessions {
		switch {
		case n.State == guestapi.SessionExited:
		case n.Deadline > 0 && n.Deadline <= s.Uptime:
			n.TimedOut = true
			n.end(killed, "SIGKILL")
		case n.Wake > 0 && n.Wake <= s.Uptime:
			s.advance(n)
		}
	}
}

// next is the time until elapse has something to do; -1: never.
func (s *State) next() time.Duration {
	next := time.Duration(-1)
	for _, n := range s.Sessions {
		for _, at := range []time.Duration{n.Wake, n.Deadline} {
			if left := max(at-s.Uptime, 0); at > 0 && s.State == guestapi.StateReleased && n.State == guestapi.SessionRunning && (next < 0 || left < next) {
				next = left
			}
		}
	}
	return next
}

// advance runs a session until it waits or ends.
func (s *State) advance(n *Session) {
	for ; len(n.Commands) > 0; n.Commands = n.Commands[1:] {
		if s.run(n, n.Commands[0]) {
			return
		}
	}
	n.end(n.Status, "")
}

func (n *Session) end(code int, signal string) {
	if n.State == guestapi.SessionExited {
		return
	}
	now := time.Now().UTC()
	n.State, n.ExitCode, n.Signal, n.EndedAt, n.StdinOpen, n.Stdin = guestapi.SessionExited, &code, signal, &now, false, nil
}

// input gives input to a session.
func (s *State) input(n *Session, b []byte, shut bool) error {
	if !n.StdinOpen {
		return core.Errorf(core.Conflict, guestapi.CodeSessionEnded, "the stdin of session %s is closed", n.ID)
	}
	n.Stdin, n.StdinOpen = append(n.Stdin, b...), !shut
	s.advance(n)
	return nil
}

// run runs one command. It reports whether the command waits; then it is called again.
func (s *State) run(n *Session, words []string) (waits bool) {
	if len(words) == 0 {
		return false
	}
	args := words[1:]
	last := func(i int) string { return words[max(len(words)-i, 0)] }
	n.Status = 0
	switch words[0] {
	case "true", "sh", "bash":
	case "false":
		n.Status = 1
	case "exit":
		n.Commands = n.Commands[:1]
		n.Status, _ = strconv.Atoi(strings.Join(args, "")) // 0 for anything else
	case "echo":
		s.print(&n.Out, "%s\n", strings.Join(args, " "))
	case "err":
		s.print(&n.Err, "%s\n", strings.Join(args, " "))
	case "fill":
		count, _ := strconv.Atoi(strings.Join(args, "")) // as with exit
		b := make([]byte, min(max(count, 0), maxFill))
		for i := range b {
			b[i] = byte(i)
		}
		s.print(&n.Out, "%s", b)
	case "cat":
		return s.cat(n, args)
	case "env":
		for _, name := range slices.Sorted(maps.Keys(n.Env)) {
			s.print(&n.Out, "%s=%s\n", name, n.Env[name])
		}
	case "inc":
		s.Counter++
		s.print(&n.Out, "%d\n", s.Counter)
	case "random":
		s.print(&n.Out, "%s\n", hex.EncodeToString(s.draw()))
	case "sleep":
		seconds, _ := strconv.ParseFloat(strings.Join(args, ""), 64) // as with exit
		if n.Wake == 0 {
			n.Wake = s.Uptime + time.Duration(seconds*float64(time.Second))
		}
		if s.Uptime < n.Wake {
			return true
		}
		n.Wake = 0
	case "mkdir":
		s.mkdir(clean(last(1)), "")
	case "mv":
		if s.move(clean(last(2)), clean(last(1))) != nil {
			n.Status = 1
		}
	default:
		n.Status = 127
		s.print(&n.Err, "sh: %s: not found\n", words[0])
	}
	return false
}

func (s *State) cat(n *Session, files []string) (waits bool) {
	if len(files) == 0 {
		s.print(&n.Out, "%s", n.Stdin)
		n.Stdin = nil
		return n.StdinOpen
	}
	for _, name := range files {
		f, ok := s.Files[clean(name)]
		if !ok {
			n.Status = 1
			s.print(&n.Err, "cat: %s: No such file or directory\n", name)
		}
		s.print(&n.Out, "%s", f.Data)
	}
	return false
}
