package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

// qmp is a client of QEMU's machine protocol: JSON, one value per line, over a unix socket that can carry descriptors.
// QEMU runs one command at a time, in order. Each command has an id, so that the answer to an abandoned command is not
// taken for the answer to the next. QEMU is trusted only with its guest: whatever it sends costs bounded memory and
// blocks nobody.
type qmp struct {
	conn   *net.UnixConn
	turn   chan struct{} // of size 1; full while a command is under way
	events chan qmpEvent // the MIGRATION events; see deliver
	ended  chan struct{} // closed when the connection has ended

	mu      sync.Mutex // guards the fields below
	next    uint64     // id of the next command; 0 is the greeting
	waiting *waiter    // for the answer to the command under way
	err     error      // why the connection ended, once ended is closed
}

// waiter takes one answer.
type waiter struct {
	id    uint64
	reply chan qmpReply // of one
}

type qmpEvent struct {
	Name string
	Data json.RawMessage
}

type qmpReply struct {
	value json.RawMessage
	err   error
}

type qmpMessage struct {
	Greeting json.RawMessage `json:"QMP"`
	ID       *uint64         `json:"id"`
	Return   json.RawMessage `json:"return"`
	Event    string          `json:"event"`
	Data     json.RawMessage `json:"data"`
	Error    *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
}

const (
	migrationEvent = "MIGRATION" // the only event that is waited for
	eventBacklog   = 16          // a migration has four
	maxQMPLine     = 1 << 20
)

// dialQMP connects, reads the greeting and leaves the negotiation mode.
func dialQMP(ctx context.Context, path string) (*qmp, error) {
	c, err := dial(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("connect to the monitor: %w", err)
	}
	greeting := &waiter{reply: make(chan qmpReply, 1)}
	q := &qmp{
		conn: c.(*net.UnixConn), turn: make(chan struct{}, 1), events: make(chan qmpEvent, eventBacklog),
		ended: make(chan struct{}), next: 1, waiting: greeting,
	}
	go q.read()
	if _, err = q.wait(ctx, greeting); err == nil {
		_, err = q.execute(ctx, "qmp_capabilities", nil)
	}
	if err != nil {
		q.close()
		return nil, err
	}
	return q, nil
}

// read reads messages until the connection ends.
func (q *qmp) read() {
	lines := bufio.NewScanner(q.conn)
	lines.Buffer(make([]byte, 0, 4096), maxQMPLine)
	err := errors.New("its monitor closed the connection")
	for lines.Scan() {
		var m qmpMessage
		if json.Unmarshal(lines.Bytes(), &m) != nil {
			err = fmt.Errorf("its monitor sent a line that cannot be read: %q", core.Clip(lines.Text()))
			break
		}
		q.take(m)
	}
	if scanErr := lines.Err(); scanErr != nil {
		err = fmt.Errorf("its monitor's connection broke: %w", scanErr)
	}
	q.mu.Lock()
	q.err = fmt.Errorf("%w: %w", vmm.ErrGone, err)
	q.mu.Unlock()
	close(q.ended)
	q.close()
}

// take passes a message to its waiter, or drops it.
func (q *qmp) take(m qmpMessage) {
	switch {
	case m.Event == migrationEvent:
		q.deliver(qmpEvent{m.Event, m.Data})
	case m.Event != "":
	case m.Greeting != nil:
		q.answer(0, qmpReply{value: m.Greeting})
	case m.ID == nil:
	case m.Error != nil:
		q.answer(*m.ID, qmpReply{err: fmt.Errorf("the monitor refused: %s (%s)", core.Clip(m.Error.Desc), core.Clip(m.Error.Class))})
	default:
		q.answer(*m.ID, qmpReply{value: m.Return})
	}
}

func (q *qmp) answer(id uint64, r qmpReply) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.waiting != nil && q.waiting.id == id {
		q.waiting.reply <- r // there is room for the only answer
		q.waiting = nil
	}
}

// deliver drops the oldest event when nobody reads events: only the newest matter to a later waiter.
func (q *qmp) deliver(e qmpEvent) {
	for {
		select {
		case q.events <- e:
			return
		default:
		}
		select {
		case <-q.events:
		default:
		}
	}
}

func (q *qmp) wait(ctx context.Context, w *waiter) (json.RawMessage, error) {
	select {
	case r := <-w.reply:
		return r.value, r.err
	case <-q.ended:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the monitor: %w", context.Cause(ctx))
	}
	select {
	case r := <-w.reply: // it arrived just before the end
		return r.value, r.err
	default:
		return nil, q.cause()
	}
}

// over reports whether the connection has ended.
func (q *qmp) over() bool {
	select {
	case <-q.ended:
		return true
	default:
		return false
	}
}

func (q *qmp) cause() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

// execute runs one command; files are passed with it as descriptors. If ctx ends first, the command may still be
// executed.
func (q *qmp) execute(ctx context.Context, command string, arguments any, files ...*os.File) (json.RawMessage, error) {
	select {
	case q.turn <- struct{}{}:
		defer func() { <-q.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("%s: wait for another command: %w", command, context.Cause(ctx))
	}
	w, err := q.send(ctx, command, arguments, files)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	v, err := q.wait(ctx, w)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	return v, nil
}

func (q *qmp) send(ctx context.Context, command string, arguments any, files []*os.File) (*waiter, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	q.mu.Lock()
	w := &waiter{id: q.next, reply: make(chan qmpReply, 1)}
	q.next++
	q.waiting = w
	q.mu.Unlock()
	body := map[string]any{"execute": command, "id": w.id}
	if arguments != nil {
		body["arguments"] = arguments
	}
	line, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	line = append(line, '\n')
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = syscall.UnixRights(fds...)
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(vmmproc.CommandTime)
	}
	if err := q.conn.SetWriteDeadline(deadline); err != nil {
		return nil, errors.Join(vmm.ErrGone, err)
	}
	n, _, err := q.conn.WriteMsgUnix(line, rights, nil)
	runtime.KeepAlive(files)
	if err == nil && n < len(line) {
		err = errors.New("the monitor takes no commands")
	}
	if err != nil {
		q.close() // a part of the command may have been sent
		return nil, errors.Join(vmm.ErrGone, err)
	}
	return w, nil
}

// awaitMigration waits for the end of an incoming migration, which QEMU reports with events.
func (q *qmp) awaitMigration(ctx context.Context) error {
	for {
		var e qmpEvent
		select {
		case e = <-q.events:
		case <-ctx.Done():
			return fmt.Errorf("wait for device state to load: %w", context.Cause(ctx))
		case <-q.ended:
			select {
			case e = <-q.events: // it arrived just before the end
			default:
				return fmt.Errorf("load device state: %w", q.cause())
			}
		}
		var data struct {
			Status string `json:"status"`
		}
		if err := json.Unmarshal(e.Data, &data); err != nil {
			return fmt.Errorf("the monitor's report of the load cannot be read: %w", err)
		}
		switch data.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return core.Errorf(core.DataLoss, core.CodeVMMFailed, "the virtual machine could not load the device state of the checkpoint")
		}
	}
}

func (q *qmp) close() { _ = q.conn.Close() }
