package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	maxConnections = 10
	maxPayload     = 51200
	maxLine        = 1024 // of a request line or a header
	apiRoot        = "/api/v1/"
)

// request is what a client asks for.
type request struct {
	method, path string
	body         []byte // nil where there is none: an empty one is none
	files        []int
}

// response is what it gets.
type response struct {
	status int
	body   []byte // nil where there is none
	server string
	fault  string // how the answer goes wrong
}

// server is the HTTP server: one thread, which reads requests in the order of their arrival, and carries out one at a time. A client that
// has hung up before its request was read has not made it.
type server struct {
	vmm      *vmm
	listener int

	epoll   int
	conns   map[int]*connection
	answers sync.WaitGroup // that are being written
}

// connection is a client.
type connection struct {
	fd    int
	buf   []byte
	files []int // that came with the request that is being read
}

// run serves until the process ends.
func (s *server) run() {
	s.conns = make(map[int]*connection)
	var err error
	if s.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err == nil {
		err = s.watch(s.listener)
	}
	for list := make([]unix.EpollEvent, maxConnections+2); err == nil; {
		var n int
		if n, err = unix.EpollWait(s.epoll, list, -1); errors.Is(err, unix.EINTR) {
			err = nil
			continue
		}
		err = errors.Join(err, s.dispatch(list[:max(n, 0)]))
	}
	s.vmm.turn.Lock()
	defer s.vmm.turn.Unlock()
	s.vmm.end(wrap("fakech: the server broke", err))
}

func (s *server) watch(fd int) error {
	return unix.EpollCtl(s.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: int32(fd)})
}

func (s *server) dispatch(list []unix.EpollEvent) error {
	type asked struct {
		*connection
		req request
	}
	var requests []asked
	for _, e := range list {
		if int(e.Fd) == s.listener {
			if err := s.accept(); err != nil {
				return err
			}
			continue
		}
		c := s.conns[int(e.Fd)]
		if e.Events&(unix.EPOLLERR|unix.EPOLLHUP|unix.EPOLLRDHUP) != 0 || c.fill() != nil {
			s.drop(c)
			continue
		}
		for {
			req, err := c.next()
			if refused, ok := errors.AsType[parseError](err); ok {
				c.buf = nil
				c.write(response{status: 400, server: "Firecracker API", body: fmt.Appendf(nil,
					"{ \"error\": \"%s\nAll previous unanswered requests will be dropped.\" }", string(refused))}.bytes())
			}
			if err != nil {
				break
			}
			requests = append(requests, asked{c, req})
		}
	}
	for _, r := range requests {
		if s.answer(r.connection, r.req) != nil {
			s.drop(r.connection)
		}
	}
	return nil
}

func (s *server) accept() error {
	fd, _, err := unix.Accept4(s.listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return nil //nolint:nilerr // the client is gone
	}
	if len(s.conns) >= maxConnections {
		(&connection{fd: fd}).write([]byte("HTTP/1.1 503\r\nServer: Firecracker API\r\nConnection: close\r\nContent-Length: 40\r\n\r\n{ \"error\": \"Too many open connections\" }"))
		return unix.Close(fd)
	}
	s.conns[fd] = &connection{fd: fd}
	return s.watch(fd)
}

func (s *server) drop(c *connection) {
	if s.conns[c.fd] != c {
		return
	}
	delete(s.conns, c.fd)
	_ = unix.Close(c.fd) // whatever was written is written
}

// drain lets the answer out that is being written.
func (s *server) drain() { s.answers.Wait() }

// answer carries out a request when it is its turn.
func (s *server) answer(c *connection, req request) error {
	defer func() {
		for _, fd := range req.files {
			_ = unix.Close(fd) // the VM has its own copies
		}
	}()
	s.vmm.turn.Lock()
	if s.vmm.over {
		s.vmm.turn.Unlock()
		return os.ErrClosed
	}
	s.answers.Add(1)
	defer s.answers.Done()
	r := s.vmm.handle(req)
	s.vmm.turn.Unlock()
	return r.write(c)
}

// write writes all of it, unless the client hangs up. It reports whether it could.
func (c *connection) write(b []byte) bool {
	for len(b) > 0 {
		n, err := unix.SendmsgN(c.fd, b, nil, nil, unix.MSG_NOSIGNAL)
		if err != nil {
			return false
		}
		b = b[n:]
	}
	return true
}

// bytes is the response as it goes over the wire: without a reason after the status.
func (r response) bytes() []byte {
	var b bytes.Buffer
	name := r.server
	if name == "" {
		name = "Cloud Hypervisor API"
	}
	fmt.Fprintf(&b, "HTTP/1.1 %d \r\nServer: %s\r\nConnection: keep-alive\r\n", r.status, name)
	if r.status != 204 {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(r.body))
	}
	b.WriteString("\r\n")
	b.Write(r.body)
	return b.Bytes()
}

// errDropped ends a connection in the middle of an answer.
var errDropped = errors.New("dropped")

func (r response) write(c *connection) error {
	if r.fault != "" && len(r.body) < 2 { // there must be something to spoil
		r.status, r.body = 200, []byte(`{"an answer": "to spoil"}`)
	}
	var ok bool
	switch r.fault {
	case "cut":
		r.body = r.body[:len(r.body)/2]
		ok = c.write(r.bytes())
	case "drop":
		b := r.bytes()
		c.write(b[:len(b)-len(r.body)/2])
		return errDropped
	case "garbage":
		c.write([]byte("\x00\xff SSH-2.0-nothing of the kind\r\n\r\n"))
		return errDropped
	case "endless":
		ok = c.write([]byte("HTTP/1.1 200 \r\nServer: Cloud Hypervisor API\r\nContent-Type: application/json\r\nContent-Length: 9000000000000\r\n\r\n[\""))
		for more := bytes.Repeat([]byte("and so on "), 1000); ok; {
			ok = c.write(more)
		}
	default:
		ok = c.write(r.bytes())
	}
	if !ok {
		return errDropped
	}
	return nil
}

// jsonError is an error of the API: an array of its words.
func jsonError(code int, c chain) response {
	return response{status: code, body: encode([]string(c))}
}

// encode is JSON as serde writes it.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // of our own types
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// parseError is why a request is not understood.
type parseError string

func (e parseError) Error() string { return string(e) }

// errMore is that a request is not there whole.
var errMore = errors.New("more")

// fill reads what is there.
func (c *connection) fill() error {
	b, oob := make([]byte, 1024), make([]byte, unix.CmsgSpace(253*4))
	n, oobn, _, _, err := unix.Recvmsg(c.fd, b, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return err
		}
		c.files = append(c.files, fds...)
	}
	if n == 0 {
		return os.ErrClosed
	}
	c.buf = append(c.buf, b[:n]...)
	return nil
}

// nextLine cuts off a line, up to a CRLF.
func nextLine(buf []byte, tooLong func(string) parseError) (string, []byte, error) {
	if i := bytes.Index(buf, []byte("\r\n")); i >= 0 && i <= maxLine-2 {
		return string(buf[:i]), buf[i+2:], nil
	}
	if len(buf) >= maxLine {
		return "", nil, tooLong(string(buf[:maxLine]))
	}
	return "", nil, errMore
}

// next takes a request from what was read.
func (c *connection) next() (request, error) {
	var req request
	l, buf, err := nextLine(c.buf, func(string) parseError { return "Invalid request." })
	if err != nil {
		return req, err
	}
	words := strings.SplitN(l, " ", 3)
	if len(words) != 3 {
		return req, parseError("Invalid request.")
	}
	req.method = words[0]
	switch req.method {
	case "GET", "PUT", "PATCH":
	default:
		return req, parseError("Invalid HTTP Method: Unsupported HTTP method.")
	}
	if words[1] == "" {
		return req, parseError("Invalid URI: Empty URI not allowed.")
	}
	if words[2] != "HTTP/1.1" && words[2] != "HTTP/1.0" {
		return req, parseError("Invalid HTTP Version: Unsupported HTTP version.")
	}
	req.path = words[1]
	if rest, ok := strings.CutPrefix(req.path, "http://"); ok {
		_, path, _ := strings.Cut(rest, "/")
		req.path = "/" + path
	}
	length := 0
	for {
		if l, buf, err = nextLine(buf, func(s string) parseError {
			return parseError("Invalid header. Reason: Invalid content length. Header: " + s)
		}); err != nil {
			return req, err
		}
		if l == "" {
			break
		}
		if length, err = header(l, length); err != nil {
			return req, err
		}
	}
	if length > maxPayload {
		return req, parseError(fmt.Sprintf("Request payload with size %d is larger than the limit of %d allowed by server.", length, maxPayload))
	}
	if len(buf) < length {
		return req, errMore
	}
	if length > 0 {
		req.body = bytes.Clone(buf[:length])
	}
	c.buf = bytes.Clone(buf[length:])
	req.files, c.files = c.files, nil
	return req, nil
}

// header reads a header, and returns the length of the body as it is known then.
func header(l string, length int) (int, error) {
	name, value, ok := strings.Cut(l, ":")
	if !ok {
		return 0, parseError("Invalid header. Reason: Header is incorrectly formatted. Key: " + l)
	}
	switch strings.ToLower(strings.TrimSpace(name)) {
	case "transfer-encoding":
		if strings.TrimSpace(value) == "chunked" { // chunks are taken for requests
			return 0, parseError("Invalid request.")
		}
	case "content-length":
		n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 31)
		if err != nil {
			return 0, parseError(fmt.Sprintf("Invalid header. Reason: Invalid value. Key:%s; Value:%s", name, value))
		}
		return int(n), nil
	}
	return length, nil
}
