package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
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

// server is the HTTP server: of its few connections, one request at a time is carried out.
type server struct {
	vmm      *vmm
	listener *net.UnixListener

	mu      sync.Mutex // guards conns
	conns   map[*net.UnixConn]bool
	answers sync.WaitGroup // that are being written
}

func (s *server) accept() {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.conns == nil {
			s.conns = make(map[*net.UnixConn]bool)
		}
		full := len(s.conns) >= maxConnections
		if !full {
			s.conns[conn] = true
		}
		s.mu.Unlock()
		if full {
			_, _ = conn.Write([]byte("HTTP/1.1 503\r\nServer: Firecracker API\r\nConnection: close\r\nContent-Length: 40\r\n\r\n{ \"error\": \"Too many open connections\" }"))
			_ = conn.Close()
			continue
		}
		go s.serve(conn)
	}
}

// drain lets the answers out that are being written.
func (s *server) drain() { s.answers.Wait() }

func (s *server) serve(conn *net.UnixConn) {
	defer func() {
		s.mu.Lock()
		delete(s.conns, conn)
		s.mu.Unlock()
		_ = conn.Close()
	}()
	in := &reader{conn: conn}
	for {
		req, err := in.next()
		var refused parseError
		if errors.As(err, &refused) {
			in.buf = nil
			r := response{status: 400, server: "Firecracker API", body: fmt.Appendf(nil,
				"{ \"error\": \"%s\nAll previous unanswered requests will be dropped.\" }", string(refused))}
			if _, err := conn.Write(r.bytes()); err != nil {
				return
			}
			continue
		}
		if err != nil {
			return
		}
		err = s.answer(conn, req)
		for _, fd := range req.files {
			_ = unix.Close(fd) // the VM has its own copies
		}
		if err != nil {
			return
		}
	}
}

// answer carries out a request when it is its turn.
func (s *server) answer(conn *net.UnixConn, req request) error {
	s.vmm.turn.Lock()
	if s.vmm.over {
		s.vmm.turn.Unlock()
		return os.ErrClosed
	}
	s.answers.Add(1)
	defer s.answers.Done()
	r := s.vmm.handle(req)
	s.vmm.turn.Unlock()
	return r.write(conn)
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

func (r response) write(conn *net.UnixConn) error {
	if r.fault != "" && len(r.body) < 2 { // there must be something to spoil
		r.status, r.body = 200, []byte(`{"an answer": "to spoil"}`)
	}
	var err error
	switch r.fault {
	case "cut":
		r.body = r.body[:len(r.body)/2]
		_, err = conn.Write(r.bytes())
	case "drop":
		b := r.bytes()
		_, _ = conn.Write(b[:len(b)-len(r.body)/2]) // nobody may be there
		return errDropped
	case "garbage":
		_, err = conn.Write([]byte("\x00\xff SSH-2.0-nothing of the kind\r\n\r\n"))
	case "endless":
		_, err = conn.Write([]byte("HTTP/1.1 200 \r\nServer: Cloud Hypervisor API\r\nContent-Type: application/json\r\nContent-Length: 9000000000000\r\n\r\n[\""))
		for more := bytes.Repeat([]byte("and so on "), 1000); err == nil; {
			_, err = conn.Write(more)
		}
	default:
		_, err = conn.Write(r.bytes())
	}
	return err
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

// reader reads requests and the descriptors that come with them.
type reader struct {
	conn  *net.UnixConn
	buf   []byte
	files []int
}

// fill reads what is there.
func (r *reader) fill() error {
	b, oob := make([]byte, 1024), make([]byte, unix.CmsgSpace(253*4))
	n, oobn, _, _, err := r.conn.ReadMsgUnix(b, oob)
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
		r.files = append(r.files, fds...)
	}
	if n == 0 {
		return os.ErrClosed
	}
	r.buf = append(r.buf, b[:n]...)
	return nil
}

// line reads up to a CRLF.
func (r *reader) line(tooLong func(string) parseError) (string, error) {
	for {
		if i := bytes.Index(r.buf, []byte("\r\n")); i >= 0 && i <= maxLine-2 {
			l := string(r.buf[:i])
			r.buf = r.buf[i+2:]
			return l, nil
		}
		if len(r.buf) >= maxLine {
			return "", tooLong(string(r.buf[:maxLine]))
		}
		if err := r.fill(); err != nil {
			return "", err
		}
	}
}

func (r *reader) next() (request, error) {
	var req request
	l, err := r.line(func(string) parseError { return "Invalid request." })
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
		l, err := r.line(func(s string) parseError {
			return parseError("Invalid header. Reason: Invalid content length. Header: " + s)
		})
		if err != nil {
			return req, err
		}
		if l == "" {
			break
		}
		name, value, ok := strings.Cut(l, ":")
		if !ok {
			return req, parseError("Invalid header. Reason: Header is incorrectly formatted. Key: " + l)
		}
		switch name = strings.ToLower(strings.TrimSpace(name)); {
		case name == "transfer-encoding" && strings.TrimSpace(value) == "chunked": // chunks are taken for requests
			return req, parseError("Invalid request.")
		case name == "content-length":
			if length, err = strconv.Atoi(strings.TrimSpace(value)); err != nil || length < 0 {
				return req, parseError(fmt.Sprintf("Invalid header. Reason: Invalid value. Key:%s; Value:%s", name, value))
			}
		}
	}
	if length > maxPayload {
		return req, parseError(fmt.Sprintf("Request payload with size %d is larger than the limit of %d allowed by server.", length, maxPayload))
	}
	for len(r.buf) < length {
		if err := r.fill(); err != nil {
			return req, err
		}
	}
	if length > 0 {
		req.body = bytes.Clone(r.buf[:length])
		r.buf = r.buf[length:]
	}
	req.files, r.files = r.files, nil
	return req, nil
}
