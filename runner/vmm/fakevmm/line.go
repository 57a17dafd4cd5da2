package fakevmm

import (
	"bufio"
	"context"
	"net"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/runner/vmm/vmmtest/line"
)

// Line is the guest that the conformance suite speaks to: package line.
func Line(ctx context.Context, c *Computer) {
	g := &lineGuest{c: c}
	g.prog = line.Program{Console: c.Print, Channel: g.offer, Off: g.off}
	for _, d := range c.Disks() {
		g.prog.Disks = append(g.prog.Disks, blocks{d})
	}
	if g.do(g.prog.Start) != nil {
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { g.every(ctx, g.prog.Tick) })
	wg.Go(func() { g.background(ctx) })
	for {
		conn, err := c.Accept(ctx)
		if err != nil {
			return
		}
		g.serve(conn)
	}
}

type lineGuest struct {
	c    *Computer
	prog line.Program

	mu  sync.Mutex // guards out
	out chan []byte
}

// do calls the program with the RAM that the machine has now.
func (g *lineGuest) do(fn func()) error {
	return g.c.Do(func(ram []byte) {
		g.prog.Memory = ram
		fn()
	})
}

func (g *lineGuest) every(ctx context.Context, fn func()) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if g.do(fn) != nil {
			return
		}
	}
}

func (g *lineGuest) background(ctx context.Context) {
	g.every(ctx, func() {
		for range 64 { // a piece; the machine must be able to pause in between
			if g.full() || !g.prog.Background() {
				return
			}
		}
	})
}

// full reports whether the connection takes no more for now.
func (g *lineGuest) full() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.out != nil && len(g.out) == cap(g.out)
}

// offer sends on the connection that is there, if it takes it: it is called with the CPU held, and does not wait.
func (g *lineGuest) offer(b []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case g.out <- b: // never, where there is no connection
	default:
	}
}

func (g *lineGuest) off(crash bool) {
	if crash {
		g.c.Print([]byte("Kernel panic - not syncing: the guest was asked to\n"))
	}
	g.c.PowerOff()
}

// serve answers one connection until it ends.
func (g *lineGuest) serve(conn net.Conn) {
	out := make(chan []byte, 16)
	g.mu.Lock()
	g.out = out
	g.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() {
		for b := range out {
			if _, err := conn.Write(b); err != nil {
				_ = conn.Close() // the reader sees it
				for range out {
				}
			}
		}
	})
	for lines := bufio.NewScanner(conn); lines.Scan(); {
		var answer string
		var ok bool
		if g.do(func() { answer, ok = g.prog.Do(lines.Text()) }) != nil {
			break
		}
		if ok {
			out <- []byte(answer + "\n")
		}
	}
	_ = conn.Close()
	g.mu.Lock()
	g.out = nil
	g.mu.Unlock()
	close(out)
	writer.Wait()
}

// blocks is a disk, block by block.
type blocks struct{ *Disk }

func (d blocks) ReadBlock(b *[line.BlockSize]byte, number int64) error {
	_, err := d.ReadAt(b[:], number*line.BlockSize)
	return err
}

func (d blocks) WriteBlock(b *[line.BlockSize]byte, number int64) error {
	_, err := d.WriteAt(b[:], number*line.BlockSize)
	return err
}
