//go:build linux

package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sight is what a witness says of itself.
type sight struct {
	Nonce   string   `json:"nonce"` // made when the process began
	PID     int      `json:"pid"`
	Counter uint64   `json:"counter"` // in memory
	Path    []string `json:"path"`    // the label of each step, in memory
	Deleted string   `json:"deleted"` // the labels in a file that has no name any more
	Direct  uint64   `json:"direct"`  // the counter as it stands on the disk
	Held    []string `json:"held"`    // peers of connections that are held open
	Broken  []string `json:"broken"`  // peers of those that broke
}

const blockSize = 4096

// witness is a process whose state must be the same in every fork: a counter in memory, an open file without a name, a block of
// a file that is written and read past the page cache, and a listening socket that it is asked over, one line a connection:
// "look", "step LABEL", or "hold", after whose answer the connection is held open.
func witness(args []string, _ io.Writer) error {
	deleted, err := os.CreateTemp("/var/tmp", "witness-")
	if err != nil {
		return err
	}
	if err := os.Remove(deleted.Name()); err != nil {
		return err
	}
	direct, err := os.OpenFile(args[1], os.O_RDWR|os.O_CREATE|unix.O_DIRECT, 0o600)
	if err != nil {
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp4", ":"+args[0])
	if err != nil {
		return err
	}
	w := &witnessed{sight: sight{Nonce: rand.Text(), PID: os.Getpid(), Path: []string{}, Held: []string{}, Broken: []string{}}, deleted: deleted, direct: direct, block: aligned()}
	if err := w.write(); err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		if err := w.answer(c); err != nil {
			return err
		}
	}
}

type witnessed struct {
	sight
	mu              sync.Mutex // guards Held and Broken
	deleted, direct *os.File
	block           []byte
}

// aligned returns a block that O_DIRECT takes.
func aligned() []byte {
	b := make([]byte, 2*blockSize)
	off := blockSize - int(uintptr(unsafe.Pointer(&b[0]))%blockSize) // only its remainder is used
	return b[off : off+blockSize]
}

func (w *witnessed) answer(c net.Conn) error {
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return c.Close() // whoever asked has gone
	}
	word, label, _ := strings.Cut(strings.TrimSpace(line), " ")
	switch word {
	case "hold":
		go w.hold(c)
		return nil
	case "step":
		w.Counter++
		w.Path = append(w.Path, label)
		if _, err := w.deleted.WriteString(label + "\n"); err != nil {
			return err
		}
		if err := w.write(); err != nil {
			return err
		}
	}
	defer func() { _ = c.Close() }()
	if err := w.look(); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = json.NewEncoder(c).Encode(w.sight) // whoever asked may have gone
	return nil
}

// hold keeps a connection until it breaks, echoing what comes.
func (w *witnessed) hold(c net.Conn) {
	peer := c.RemoteAddr().String()
	w.mu.Lock()
	w.Held = append(w.Held, peer)
	w.mu.Unlock()
	_, err := io.WriteString(c, "held\n")
	if err == nil {
		_, err = io.Copy(c, c)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Held = slices.DeleteFunc(w.Held, func(p string) bool { return p == peer })
	w.Broken = append(w.Broken, fmt.Sprintf("%s: %v", peer, err))
	_ = c.Close()
}

func (w *witnessed) write() error {
	order.PutUint64(w.block, w.Counter)
	if _, err := w.direct.WriteAt(w.block, 0); err != nil {
		return fmt.Errorf("write past the page cache: %w", err)
	}
	return nil
}

func (w *witnessed) look() error {
	if _, err := w.direct.ReadAt(w.block, 0); err != nil {
		return fmt.Errorf("read past the page cache: %w", err)
	}
	w.Direct = order.Uint64(w.block)
	info, err := w.deleted.Stat()
	if err != nil {
		return err
	}
	b := make([]byte, info.Size())
	if _, err := w.deleted.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	w.Deleted = string(b)
	return nil
}

// ask prints the answer of a witness. The witness may have just been started: as long as nobody listens it is asked again.
func ask(args []string, out io.Writer) error {
	const patience = 10 * time.Second
	var c net.Conn
	for begun := time.Now(); ; {
		var err error
		if c, err = (&net.Dialer{}).DialContext(context.Background(), "tcp4", "127.0.0.1:"+args[0]); err == nil {
			break
		}
		if !errors.Is(err, unix.ECONNREFUSED) || time.Since(begun) > patience {
			return err
		}
		<-time.After(5 * time.Millisecond)
	}
	defer func() { _ = c.Close() }()
	if _, err := fmt.Fprintln(c, strings.Join(args[1:], " ")); err != nil {
		return err
	}
	_, err := io.Copy(out, c)
	return err
}

// cling holds a connection to a witness of its own machine. OUT.held appears as soon as it stands, OUT when it breaks.
func cling(args []string, _ io.Writer) error {
	c, err := (&net.Dialer{}).DialContext(context.Background(), "tcp4", "127.0.0.1:"+args[0])
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(c, "hold"); err != nil {
		return err
	}
	r := bufio.NewReader(c)
	if _, err := r.ReadString('\n'); err != nil {
		return err
	}
	if err := publish(args[1]+".held", c.LocalAddr().String()); err != nil {
		return err
	}
	_, err = r.ReadByte()
	return publish(args[1], fmt.Sprint(err))
}
