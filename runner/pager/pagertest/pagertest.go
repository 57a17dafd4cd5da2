// Package pagertest stands in for a pager in tests of a runner. It speaks the pager's protocol on the
// pager's socket, needs no root and serves no pages: the test says how each image fares.
package pagertest

import (
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/pager"
)

// Pager is a pager that a test speaks for. It is safe for concurrent use.
type Pager struct {
	t      testing.TB
	dir    string
	empty  *os.File // the directory that has no image's file
	listen *net.UnixListener
	served sync.WaitGroup

	mu        sync.Mutex // guards what follows
	instances int
	conns     map[*net.UnixConn]bool
	images    map[string]pager.Status
	refusal   *runnerapi.Problem // the answer to a put of an image; nil: it is accepted
	version   int64
	news      chan struct{} // closed when the version is another
}

// Start has a pager listen until Close, or the end of the test.
func Start(t testing.TB) *Pager {
	t.Helper()
	dir, err := os.MkdirTemp("", "pager") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &Pager{t: t, dir: dir, instances: 1, conns: map[*net.UnixConn]bool{}, images: map[string]pager.Status{}, version: 1, news: make(chan struct{})}
	if p.listen, err = sidecar.Listen(pager.SocketPath(dir)); err != nil {
		t.Fatal(err)
	}
	if p.empty, err = os.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	p.served.Go(func() {
		for {
			c, err := p.listen.AcceptUnix()
			if err != nil {
				return
			}
			p.mu.Lock()
			p.conns[c] = true
			p.mu.Unlock()
			p.served.Go(func() { p.converse(c) })
		}
	})
	t.Cleanup(p.Close)
	return p
}

// Process is what a runner needs to find the pager. It cannot start another, and nobody asks whether this one hangs.
func (p *Pager) Process() *pager.Process {
	return &pager.Process{Dir: p.dir, Command: []string{"/bin/false"}, Pulse: sidecar.Pulse{Every: time.Hour, Limit: time.Hour}}
}

// Say changes the status of an image.
func (p *Pager) Say(id string, change func(*pager.Status)) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	st, there := p.images[id]
	if !there {
		p.t.Fatalf("image %s was not put", id)
	}
	change(&st)
	p.images[id] = st
	p.changed()
}

// Complete says that an image has everything.
func (p *Pager) Complete(id string) {
	p.t.Helper()
	p.Say(id, func(st *pager.Status) { st.Here, st.Whole = st.Pages, true })
}

// Restart is the death of the pager, and another that has no image yet. It refuses every image with a problem; nil: with none.
func (p *Pager) Restart(refusal *runnerapi.Problem) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.instances++
	p.refusal = refusal
	clear(p.images)
	p.changed()
	p.hangUp()
}

// Take ends the refusal of Restart: images are taken when they are offered next.
func (p *Pager) Take() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusal = nil
}

// Close is the death of the pager, without another.
func (p *Pager) Close() {
	_ = p.listen.Close()
	p.mu.Lock()
	p.hangUp()
	p.changed()
	p.mu.Unlock()
	p.served.Wait()
	_ = p.empty.Close()
}

// hangUp ends all connections. The caller holds mu.
func (p *Pager) hangUp() {
	for c := range p.conns {
		_ = c.Close()
	}
}

// changed wakes those who watch. The caller holds mu.
func (p *Pager) changed() {
	p.version++
	close(p.news)
	p.news = make(chan struct{})
}

// The messages, as package pager writes them.
type (
	request struct {
		Op      string       `json:"op"`
		ID      string       `json:"id"`
		Image   *pager.Image `json:"image"`
		Version int64        `json:"version"`
	}
	response struct {
		Problem *runnerapi.Problem `json:"problem,omitempty"`
		Hello   *pager.Hello       `json:"hello,omitempty"`
		Status  *pager.Status      `json:"status,omitempty"`
		Images  []pager.Status     `json:"images,omitempty"`
		Version int64              `json:"version,omitempty"`
		Totals  *pager.Totals      `json:"totals,omitempty"`
	}
)

func (p *Pager) converse(c *net.UnixConn) {
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.conns, c)
		_ = c.Close()
	}()
	for {
		var r request
		files, err := sidecar.Receive(c, &r)
		if err != nil {
			return
		}
		var out response
		var back []*os.File
		switch r.Op {
		case "hello":
			p.mu.Lock()
			// PID 0 is of no process: nobody can wait for its end, or kill this test.
			out.Hello = &pager.Hello{Instance: strconv.Itoa(p.instances), Version: pager.ProtocolVersion}
			p.mu.Unlock()
		case "put":
			out = p.put(r.Image, files)
		case "dir":
			back = []*os.File{p.empty}
		case "drop", "taken":
			p.mu.Lock()
			delete(p.images, r.ID)
			p.changed()
			p.mu.Unlock()
		case "watch":
			out = p.watch(r.Version)
		}
		sidecar.CloseAll(files)
		if sidecar.Send(c, out, back...) != nil {
			return
		}
	}
}

func (p *Pager) put(im *pager.Image, part []*os.File) response {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refusal != nil {
		return response{Problem: p.refusal}
	}
	var st syscall.Stat_t
	if im == nil || len(part) != 1 || syscall.Fstat(int(part[0].Fd()), &st) != nil {
		return response{Problem: runnerapi.ProblemOf(core.Errorf(core.Invalid, core.CodeInvalidField, "an image has one part"))}
	}
	is := pager.Status{ID: im.ID, Part: st.Ino, Pages: st.Size >> 12, Record: im.Record}
	p.images[im.ID] = is
	p.changed()
	return response{Status: &is}
}

// watch waits for another version than the one that is known.
func (p *Pager) watch(known int64) response {
	for {
		p.mu.Lock()
		news, out := p.news, response{Version: p.version, Totals: &pager.Totals{}}
		for _, st := range p.images {
			out.Images = append(out.Images, st)
		}
		p.mu.Unlock()
		if out.Version != known {
			slices.SortFunc(out.Images, func(a, b pager.Status) int { return strings.Compare(a.ID, b.ID) })
			return out
		}
		<-news
	}
}
