//go:build linux

// Command guestprobe is what the end-to-end tests run inside a sandbox: processes whose state a fork must carry over, and
// observers of what a fork must not share. It is static, so that it runs in any image, and prints JSON.
//
//	spin NONCE ROOM WANT OUT   draw random numbers into memory without end; see spin
//	draw N                     draw N random numbers from the first instruction on
//	witness PORT FILE          keep a counter in memory, in a deleted file and in FILE past the page cache; see witness
//	cling PORT OUT             hold a connection to a witness
//	ask PORT LINE...           ask a witness
//	identity                   print what makes a machine another one
//	pour BYTES                 print so many bytes of a stream that looks random and is always the same
//	generators PORT            answer each connection with numbers of Go's own generators
//	await PATH                 wait for a file and print it
//	uptime SECONDS             wait until the kernel has run for so long
//	reach TARGET...            try to reach addresses; see reach
//	flood SECONDS              send frames of every kind, with forged and own addresses
//	say VECTOR...              say what may be no protocol's, to a proxy or a name server; see vector
//	listen PORT OUT            note everything that arrives
//	storm HOW COUNT SECONDS ADDR   load a server with connections; see storm
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "guestprobe:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("see the command's documentation for its arguments")

func run(args []string, out io.Writer) error {
	if len(args) == 0 {
		return errUsage
	}
	commands := map[string]struct {
		least int
		do    func(args []string, out io.Writer) error
	}{
		"spin": {4, spin}, "draw": {1, draw}, "witness": {2, witness}, "cling": {2, cling}, "ask": {2, ask},
		"identity": {0, identity}, "pour": {1, pour}, "generators": {1, generators}, "await": {1, await}, "uptime": {1, uptime}, "reach": {1, reach}, "flood": {1, flood}, "say": {1, say}, "storm": {4, storm}, "listen": {2, listen},
	}
	c, ok := commands[args[0]]
	if args = args[1:]; !ok || len(args) < c.least {
		return errUsage
	}
	return c.do(args, out)
}

func numbers(args ...string) ([]int, error) {
	out := make([]int, len(args))
	for i, a := range args {
		n, err := strconv.Atoi(a)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("%q: %w", a, errUsage)
		}
		out[i] = n
	}
	return out, nil
}

// publish writes a file whole, for await.
func publish(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// await prints a file as soon as it is there.
func await(args []string, out io.Writer) error {
	path := args[0]
	w, err := watch(filepath.Dir(path), unix.IN_MOVED_TO, 0)
	if err != nil {
		return err
	}
	for {
		b, err := os.ReadFile(path)
		if err == nil {
			_, err = out.Write(b)
			return err
		}
		if !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if _, err := w.names(); err != nil {
			return err
		}
	}
}

// watcher is an inotify descriptor on one directory.
type watcher struct {
	fd  int
	buf [4096]byte
}

func watch(dir string, mask uint32, flags int) (*watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | flags)
	if err != nil {
		return nil, err
	}
	if _, err := unix.InotifyAddWatch(fd, dir, mask); err != nil {
		return nil, fmt.Errorf("watch %s: %w", dir, err)
	}
	return &watcher{fd: fd}, nil
}

// names reads the next events: the names of what they happened to. A non-blocking watcher gives none when there are none.
func (w *watcher) names() ([]string, error) {
	n, err := unix.Read(w.fd, w.buf[:])
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []string
	for b := w.buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
		size := unix.SizeofInotifyEvent + int(order.Uint32(b[12:16]))
		if size > len(b) {
			break
		}
		out = append(out, strings.TrimRight(string(b[unix.SizeofInotifyEvent:size]), "\x00"))
		b = b[size:]
	}
	return out, nil
}

func monotonic() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err) // the kernel has this clock
	}
	return time.Duration(ts.Nano())
}

// uptime waits until the kernel has run for so many seconds, and prints for how many it has.
func uptime(args []string, out io.Writer) error {
	n, err := numbers(args[0])
	if err != nil {
		return err
	}
	for {
		left := time.Duration(n[0])*time.Second - monotonic()
		if left <= 0 {
			_, err := fmt.Fprintf(out, "%.3f\n", monotonic().Seconds())
			return err
		}
		<-time.After(left)
	}
}
