// Package terminal connects the terminal that the program runs on to a session of a workspace.
package terminal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// How long attempts to replace a lost connection last, the time between two of them, and how often a silent connection is tested.
const (
	reconnectFor   = 5 * time.Minute
	reconnectPause = time.Second
	pingInterval   = 15 * time.Second
	pingTimeout    = 20 * time.Second
)

// errLeft says that the user has left the session. The session continues.
var errLeft = errors.New("left the session")

// Own is the terminal that this program runs on.
type Own struct {
	Plain bool // no key leaves the session

	stdin          io.Reader
	stdout, stderr io.Writer
	in, out        int // file descriptors
}

// Open returns the terminal that standard input and output are.
func Open(stdin io.Reader, stdout, stderr io.Writer) (*Own, error) {
	in, okIn := Descriptor(stdin)
	out, okOut := Descriptor(stdout)
	if !okIn || !okOut {
		return nil, exit.Misuse(errors.New("standard input and output must both be a terminal; to run a program without one, use coppice ws exec"))
	}
	return &Own{stdin: stdin, stdout: stdout, stderr: stderr, in: in, out: out}, nil
}

// Size is the size of its window.
func (o *Own) Size() (cols, rows int, err error) { return term.GetSize(o.out) }

// Attach connects the terminal to a session until the session ends or the user leaves it.
func (o *Own) Attach(ctx context.Context, client *coppice.Client, session coppice.Session) error {
	old, err := term.MakeRaw(o.in)
	if err != nil {
		return err
	}
	var end *coppice.AttachEnd
	defer func() {
		_ = term.Restore(o.in, old)
		if end == nil {
			fmt.Fprintf(o.stderr, "\ncoppice: session %s goes on; attach to it again with coppice ws shell --session %s\n", session.ID, render.Short(session.ID))
		}
	}()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	keys := &keyboard{in: o.readKeys(ctx), plain: o.Plain, lineStart: true}
	link := &terminalLink{own: o, keys: keys, resized: resized, offset: session.StdoutFirst}
	lost, told := time.Now(), false
	for {
		link.connected = time.Time{}
		link.greet = told
		end, err = link.run(ctx, client, session.ID)
		var refused *coppice.Error
		switch {
		case end != nil:
			return exit.PassOn(end.ExitCode)
		case errors.Is(err, errLeft):
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.As(err, &refused) && refused.Status < 500:
			return err
		}
		if !link.connected.IsZero() {
			lost, told = time.Now(), false
			if time.Since(link.connected) > reconnectPause {
				continue // at once
			}
		}
		if time.Since(lost) > reconnectFor {
			return err
		}
		if !told {
			told = true
			_, _ = io.WriteString(o.stdout, "\r\n[coppice: the connection is lost; connecting again; Ctrl-C gives up]\r\n")
		}
		if err := keys.pause(ctx, reconnectPause); errors.Is(err, errLeft) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// readKeys reads standard input for as long as the process lives: a read of a terminal cannot be taken back.
func (o *Own) readKeys(ctx context.Context) <-chan []byte {
	keys := make(chan []byte)
	go func() {
		defer close(keys)
		for {
			buf := make([]byte, 4096)
			n, err := o.stdin.Read(buf)
			if n > 0 {
				select {
				case keys <- buf[:n]:
				case <-ctx.Done():
					return
				}
			}
			if err != nil {
				return
			}
		}
	}()
	return keys
}

// keyboard is what was typed and not sent yet. It outlives connections; one goroutine at a time uses it.
type keyboard struct {
	in        <-chan []byte // nil after its end
	plain     bool          // there is no escape
	pending   []byte        // typed, but not known to be sent
	lineStart bool          // the next key is the first of a line
	tilde     bool          // a tilde at the beginning of a line waits for the next key
}

// What is typed while there is no connection is kept up to a bound.
const (
	interrupt  = 0x03
	maxPending = 64 << 10
)

// typed accepts keys. It returns errLeft at the escape.
func (k *keyboard) typed(keys []byte) error {
	for _, c := range keys {
		switch {
		case k.plain:
		case k.tilde && c == '.':
			return errLeft
		case k.tilde:
			k.tilde = false
			if c != '~' {
				k.pending = append(k.pending, '~')
			}
		case k.lineStart && c == '~':
			k.tilde, k.lineStart = true, false
			continue
		}
		k.lineStart = c == '\r' || c == '\n' || c == interrupt
		k.pending = append(k.pending, c)
	}
	k.pending = k.pending[:min(len(k.pending), maxPending)]
	return nil
}

// pause keeps what is typed while there is no connection. There, Ctrl-C is for this program.
func (k *keyboard) pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
			return nil
		case keys, ok := <-k.in:
			if !ok {
				k.in = nil
				continue
			}
			if slices.Contains(keys, interrupt) {
				return errLeft
			}
			if err := k.typed(keys); err != nil {
				return err
			}
		}
	}
}

// terminalLink is a terminal's way to a session, over one connection after the other.
type terminalLink struct {
	own       *Own
	keys      *keyboard
	resized   <-chan os.Signal
	offset    int64     // of the next byte to be shown
	connected time.Time // when the present connection was made
	greet     bool      // say so
	writing   atomic.Bool
}

// run carries keys, sizes and output until the session ends, the user leaves or the connection is lost.
func (l *terminalLink) run(ctx context.Context, client *coppice.Client, id coppice.SessionID) (*coppice.AttachEnd, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conn, err := client.Attach(ctx, id, coppice.AttachOptions{StdoutOffset: l.offset})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	l.connected = time.Now()
	if l.greet {
		_, _ = io.WriteString(l.own.stdout, "[coppice: connected again]\r\n")
	}
	sent, pinged := make(chan struct{}), make(chan struct{})
	defer func() {
		cancel(nil)
		<-sent
		<-pinged
	}()
	go func() {
		defer close(sent)
		if err := l.send(ctx, conn); err != nil {
			cancel(err)
		}
	}()
	go func() {
		defer close(pinged)
		if err := l.ping(ctx, conn); err != nil {
			cancel(err)
		}
	}()
	for {
		event, err := conn.Next(ctx)
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return nil, cause
			}
			return nil, err
		}
		switch m := event.Message; {
		case m == nil:
			if err := l.show(event); err != nil {
				return nil, err
			}
		case m.Type == coppice.AttachExit && m.Session != nil:
			return m.Session, nil
		case m.Type == coppice.AttachTruncated:
			_, _ = io.WriteString(l.own.stdout, "\r\n[coppice: output was lost here]\r\n")
		}
	}
}

// show writes output, but none that was shown before.
func (l *terminalLink) show(event coppice.AttachEvent) error {
	data, seen := event.Data, int64(0)
	if event.Stream == coppice.Stdout {
		seen = min(max(l.offset-event.Offset, 0), int64(len(data)))
		l.offset = max(l.offset, event.Offset+int64(len(data)))
	}
	_, err := l.own.stdout.Write(data[seen:])
	return err
}

// ping finds out whether a silent connection still works. While keys are under way, a program that does not read them also delays the
// answer.
func (l *terminalLink) ping(ctx context.Context, conn *coppice.Attached) error {
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if l.writing.Load() {
			continue
		}
		within, cancel := context.WithTimeout(ctx, pingTimeout)
		err := conn.Ping(within)
		cancel()
		if err != nil && !l.writing.Load() {
			return fmt.Errorf("the connection is silent: %w", err)
		}
	}
}

// send passes keys and sizes on until the connection ends. What could not be sent stays with the keyboard.
func (l *terminalLink) send(ctx context.Context, conn *coppice.Attached) error {
	resize := func() error {
		cols, rows, err := l.own.Size()
		if err != nil {
			return err
		}
		return conn.Resize(ctx, cols, rows)
	}
	if err := resize(); err != nil {
		return err
	}
	k := l.keys
	for {
		if len(k.pending) > 0 {
			l.writing.Store(true)
			err := conn.Write(ctx, k.pending)
			l.writing.Store(false)
			if err != nil {
				return err
			}
			k.pending = k.pending[:0]
		}
		select {
		case <-ctx.Done():
			return nil
		case <-l.resized:
			if err := resize(); err != nil {
				return err
			}
		case keys, ok := <-k.in:
			if !ok {
				k.in = nil // standard input is gone; output still comes
				if err := conn.CloseStdin(ctx); err != nil {
					return err
				}
				continue
			}
			if err := k.typed(keys); err != nil { // what was typed before the escape is still sent
				if len(k.pending) > 0 {
					err = errors.Join(err, conn.Write(ctx, k.pending))
				}
				return err
			}
		}
	}
}
