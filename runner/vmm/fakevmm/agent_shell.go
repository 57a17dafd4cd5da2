package fakevmm

import (
	"encoding/hex"
	"fmt"
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
//	exit N
//	echo WORDS
//	cat [FILES]      without files: stdin, until that is closed
//	inc              adds one to a count in memory and prints it
//	random           prints 32 bytes of the random generator in hex
//	sh -c SCRIPT     commands with ; between them
//
// A program waits only for stdin. Everything between two waits happens at once.
var commands = []string{"cat", "echo", "exit", "inc", "random", "sh"}

// session is a session with the commands that its program still has to run.
type session struct {
	guestapi.Session
	Commands [][]string // still to be run; the first one may be waiting
	Status   int        // of the last command
	Out, Err stream
	Stdin    []byte // not read yet
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

// start makes a session and runs it until it waits or ends.
func (s *agentState) start(spec guestapi.SessionSpec) (*session, error) {
	if len(spec.Command) == 0 {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "command must name a program")
	}
	if spec.ID == "" {
		spec.ID = core.NewID[core.SessionID]()
	}
	if s.session(spec.ID) != nil {
		return nil, core.Errorf(core.AlreadyExists, guestapi.CodeSessionExists, "the session %s exists already", spec.ID)
	}
	name := path.Base(spec.Command[0])
	if !slices.Contains(commands, name) {
		return nil, core.Errorf(core.NotFound, guestapi.CodeCommandNotFound, "%s: a fake guest has no such program", core.Clip(spec.Command[0]))
	}
	s.NextPID++
	n := &session{
		Session: guestapi.Session{
			ID: spec.ID, Command: spec.Command, Cwd: spec.Cwd, User: spec.User, PTY: spec.PTY, State: guestapi.SessionRunning,
			PID: s.NextPID, StartedAt: time.Now().UTC(), StdinOpen: spec.StdinOpen || spec.PTY,
		},
		Commands: [][]string{append([]string{name}, spec.Command[1:]...)}, Stdin: spec.Stdin,
	}
	if name == "sh" {
		n.Commands = nil
		for one := range strings.SplitSeq(strings.Join(spec.Command[min(2, len(spec.Command)):], " "), ";") {
			n.Commands = append(n.Commands, strings.Fields(one))
		}
	}
	s.Sessions = append(s.Sessions, n)
	s.advance(n)
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

// workload lists the programs that run.
func (s *agentState) workload() []core.WorkloadProcess {
	var out []core.WorkloadProcess
	for _, n := range s.Sessions {
		if n.State == guestapi.SessionRunning {
			out = append(out, core.WorkloadProcess{PID: n.PID, Command: core.Clip(n.Command[0])})
		}
	}
	return out
}

// advance runs a session until it waits or ends.
func (s *agentState) advance(n *session) {
	for ; len(n.Commands) > 0; n.Commands = n.Commands[1:] {
		if s.run(n, n.Commands[0]) {
			return
		}
	}
	now := time.Now().UTC()
	n.State, n.ExitCode, n.EndedAt, n.StdinOpen, n.Stdin = guestapi.SessionExited, &n.Status, &now, false, nil
}

// run runs one command. It reports whether the command waits; then it is called again.
func (s *agentState) run(n *session, words []string) (waits bool) {
	if len(words) == 0 {
		return false
	}
	args := words[1:]
	n.Status = 0
	switch words[0] {
	case "exit":
		n.Commands = n.Commands[:1]
		n.Status, _ = strconv.Atoi(strings.Join(args, "")) // 0 for anything else
	case "echo":
		n.Out.write([]byte(strings.Join(args, " ") + "\n"))
	case "cat":
		if len(args) == 0 {
			n.Out.write(n.Stdin)
			n.Stdin = nil
			return n.StdinOpen
		}
		for _, name := range args {
			f, ok := s.Files[clean(name)]
			if !ok {
				n.Status = 1
				n.Err.write(fmt.Appendf(nil, "cat: %s: No such file or directory\n", name))
			}
			n.Out.write(f.Data)
		}
	case "inc":
		s.Counter++
		n.Out.write(fmt.Appendf(nil, "%d\n", s.Counter))
	case "random":
		n.Out.write([]byte(hex.EncodeToString(s.draw()) + "\n"))
	default:
		n.Status = 127
		n.Err.write(fmt.Appendf(nil, "sh: %s: not found\n", words[0]))
	}
	return false
}
