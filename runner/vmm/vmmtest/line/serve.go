package line

import (
	"bufio"
	"context"
	"io"
	"sync"
	"time"
)

// Machine is what a machine that executes no instructions offers to Serve.
type Machine interface {
	// Do calls fn with the RAM while the machine runs, and fails once it has ended.
	Do(fn func(ram []byte)) error
	// Accept waits for the next connection from the host.
	Accept(ctx context.Context) (io.ReadWriteCloser, error)
	Print(b []byte)
	// Uptime returns how long the machine has run. It is called within Do.
	Uptime() time.Duration
	// Off ends the machine soon: it is called within Do.
	Off(crash bool)
}

// Serve runs the program on a machine until ctx or the machine ends. It keeps no state outside the machine's RAM. It
// serves connections one after the other, as on a serial port, or all at once.
func Serve(ctx context.Context, m Machine, disks []Disk, atOnce bool) {
	s := &server{m: m}
	s.prog = Program{Disks: disks, Console: m.Print, Channel: s.offer, Off: s.off, Uptime: m.Uptime}
	if s.do(s.prog.Start) != nil {
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.every(ctx, s.prog.Tick) })
	wg.Go(func() { s.background(ctx) })
	for {
		conn, err := m.Accept(ctx)
		if err != nil {
			return
		}
		if atOnce {
			wg.Go(func() { s.serve(conn) })
		} else {
			s.serve(conn)
		}
	}
}

type server struct {
	m    Machine
	prog Program

	mu  sync.Mutex  // guards out
	out chan []byte // output of the last connection; nil if there is none
}

// do calls the program with the machine's present RAM.
func (s *server) do(fn func()) error {
	return s.m.Do(func(ram []byte) {
		s.prog.Memory = ram
		fn()
	})
}

func (s *server) every(ctx context.Context, fn func()) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if s.do(fn) != nil {
			return
		}
	}
}

func (s *server) background(ctx context.Context) {
	s.every(ctx, func() {
		for range 64 { // only a piece, so that the machine can pause in between
			if s.full() || !s.prog.Background() {
				return
			}
		}
	})
}

// full reports whether the connection accepts no more for now.
func (s *server) full() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out != nil && len(s.out) == cap(s.out)
}

// offer sends on the present connection, if that accepts it: it is called while the CPU is held, and does not wait.
func (s *server) offer(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case s.out <- b: // never, if there is no connection
	default:
	}
}

func (s *server) off(crash bool) {
	if crash {
		s.m.Print([]byte("Kernel panic - not syncing: the guest was asked to\n"))
	}
	s.m.Off(crash)
}

// serve answers one connection until it ends.
func (s *server) serve(conn io.ReadWriteCloser) {
	out := make(chan []byte, 16)
	s.mu.Lock()
	s.out = out
	s.mu.Unlock()
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
		if s.do(func() { answer, ok = s.prog.Do(lines.Text()) }) != nil {
			break
		}
		if ok {
			out <- []byte(answer + "\n")
		}
	}
	_ = conn.Close()
	s.mu.Lock()
	if s.out == out {
		s.out = nil
	}
	s.mu.Unlock()
	close(out)
	writer.Wait()
}

// Device is a disk that is addressed by bytes.
type Device interface {
	io.ReaderAt
	io.WriterAt
	Size() (int64, error)
}

// Blocks is a Disk on a device.
type Blocks struct{ Device }

// ReadBlock implements Disk.
func (d Blocks) ReadBlock(b *[BlockSize]byte, number int64) error {
	_, err := d.ReadAt(b[:], number*BlockSize)
	return err
}

// WriteBlock implements Disk.
func (d Blocks) WriteBlock(b *[BlockSize]byte, number int64) error {
	_, err := d.WriteAt(b[:], number*BlockSize)
	return err
}
