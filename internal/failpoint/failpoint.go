// Package failpoint lets a test make a program fail at a named step: with an error, a panic, an exit, a kill -9, by
// hanging there until the test has looked around, or by stopping the whole process until a test outside has.
//
// A point is declared once, beside the code that it interrupts, and named like that step:
//
//	var afterRename = failpoint.New("checkpoint.after_rename")
//	...
//	if err := afterRename.Hit(ctx); err != nil {
//		return err
//	}
//
// Nothing happens unless a test arms the point with Arm, or the program's main function hands the text of
// COPPICE_FAILPOINTS to ArmList. A point that is not armed costs one atomic load. Names lists every point linked into
// the program, so that a crash test can go through them all.
package failpoint

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// ErrInjected is what a point armed with Fail returns unless the action has an error of its own.
var ErrInjected = errors.New("failpoint: injected failure")

// ExitStatus is the exit status of a program that a point has ended by Exit.
const ExitStatus = 86

// Kind is what happens at an armed point.
type Kind string

// The kinds, as ArmList spells them.
const (
	Fail  Kind = "error" // Hit returns an error
	Panic Kind = "panic"
	Exit  Kind = "exit" // os.Exit(ExitStatus): no deferred function runs
	Kill  Kind = "kill" // SIGKILL to the own process
	Hang  Kind = "hang" // Hit returns after Release, or with the context's cause
	Stop  Kind = "stop" // SIGSTOP to the own process, once: it goes on with SIGCONT
)

// Action arms a point.
type Action struct {
	Kind Kind
	// Err is what Fail returns; nil means ErrInjected.
	Err error
	// From is the first hit that fires, counted from 1; 0 means 1.
	From int
	// Times is how many hits fire, the first of them included; 0 means all.
	Times int
}

// Point is a named step. All its methods may be called by several goroutines at once.
type Point struct {
	name  string
	armed atomic.Pointer[Armed]
}

var (
	mu     sync.Mutex // guards points
	points = map[string]*Point{}
)

// New declares a point, in a package-level variable. A name that is taken panics: it is a mistake in the program.
func New(name string) *Point {
	mu.Lock()
	defer mu.Unlock()
	if _, taken := points[name]; taken || name == "" || strings.ContainsAny(name, "=,@ ") {
		panic("failpoint: bad or repeated name " + strconv.Quote(name))
	}
	p := &Point{name: name}
	points[name] = p
	return p
}

// Names returns every declared point, sorted.
func Names() []string {
	mu.Lock()
	defer mu.Unlock()
	return slices.Sorted(maps.Keys(points))
}

// Hit says that the program is at this step. The error is the armed one, to be returned like any other.
func (p *Point) Hit(ctx context.Context) error {
	if a := p.armed.Load(); a != nil {
		return a.fire(ctx)
	}
	return nil
}

// Armed is an armed point.
type Armed struct {
	point    *Point
	action   Action
	hits     atomic.Int64
	reached  chan struct{}
	once     sync.Once // closes reached
	released chan struct{}
	release  sync.Once // closes released
}

// Arm makes the named point fire until Disarm. A point that is armed already is armed again.
func Arm(name string, a Action) (*Armed, error) {
	mu.Lock()
	p := points[name]
	mu.Unlock()
	switch {
	case p == nil:
		return nil, fmt.Errorf("failpoint %q is not in this program; there are %s", name, strings.Join(Names(), ", "))
	case !slices.Contains([]Kind{Fail, Panic, Exit, Kill, Hang, Stop}, a.Kind):
		return nil, fmt.Errorf("failpoint %s: %q is no action; there are error, panic, exit, kill, hang and stop", name, a.Kind)
	}
	if a.Kind == Stop {
		a.Times = 1
	}
	if a.Err == nil {
		a.Err = fmt.Errorf("%w at %s", ErrInjected, name)
	}
	armed := &Armed{point: p, action: a, reached: make(chan struct{}), released: make(chan struct{})}
	if old := p.armed.Swap(armed); old != nil {
		old.Release()
	}
	return armed, nil
}

// ArmList arms points from a text like "checkpoint.after_rename=kill,fork.before_inject=error@3", where @3 means from
// the third hit on. It arms all of them or, with an error, none. The empty text arms nothing.
func ArmList(text string) error {
	var done []*Armed
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		a, err := armItem(item)
		if err != nil {
			for _, a := range done {
				a.Disarm()
			}
			return err
		}
		done = append(done, a)
	}
	return nil
}

func armItem(item string) (*Armed, error) {
	name, kind, ok := strings.Cut(item, "=")
	if !ok {
		return nil, fmt.Errorf("failpoint %q has no action; write name=action", item)
	}
	kind, from, counted := strings.Cut(kind, "@")
	a := Action{Kind: Kind(kind)}
	if counted {
		n, err := strconv.Atoi(from)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("failpoint %q: %q is not a count from 1", item, from)
		}
		a.From = n
	}
	return Arm(name, a)
}

// Hits returns how often the program was at the point since it was armed, whether it fired or not.
func (a *Armed) Hits() int64 { return a.hits.Load() }

// Reached is closed when the point fires for the first time.
func (a *Armed) Reached() <-chan struct{} { return a.reached }

// Release lets what hangs at the point go on, now and at every later hit.
func (a *Armed) Release() { a.release.Do(func() { close(a.released) }) }

// Disarm makes the point do nothing again, and releases what hangs there.
func (a *Armed) Disarm() {
	a.point.armed.CompareAndSwap(a, nil)
	a.Release()
}

func (a *Armed) fire(ctx context.Context) error {
	first := int64(max(1, a.action.From))
	if n := a.hits.Add(1); n < first || a.action.Times > 0 && n >= first+int64(a.action.Times) {
		return nil
	}
	a.once.Do(func() { close(a.reached) })
	switch a.action.Kind {
	case Fail:
		return a.action.Err
	case Panic:
		panic(a.action.Err)
	case Exit:
		os.Exit(ExitStatus)
	case Kill:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // cannot fail on ourselves
		select {}                                      // the signal is on its way; nothing more may happen
	case Stop:
		stop()
	case Hang:
		select {
		case <-a.released:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// stop stops the process and returns when it goes on. The signal may be taken by another thread: without a wait this one could do the next
// step before it is stopped, too.
func stop() {
	goesOn := make(chan os.Signal, 1)
	signal.Notify(goesOn, syscall.SIGCONT)
	defer signal.Stop(goesOn)
	_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) // cannot fail on ourselves
	<-goesOn
}
