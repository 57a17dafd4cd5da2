package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	apiRoot    = "/api/v1/"
	maxPayload = 51200
	maxFiles   = 8 // with a request
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
	body   []byte
	fault  string // how the answer goes wrong
}

// serveAPI serves every client until the process ends. One request is carried out at a time.
func (v *vmm) serveAPI(l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			v.turn.Lock()
			v.end(wrap("fakech: the server broke", err))
			v.turn.Unlock()
			return
		}
		go v.serveClient(conn)
	}
}

// client is a connection, and the files that came with what was read from it.
type client struct {
	*net.UnixConn
	files []int
}

// Read implements io.Reader.
func (c *client) Read(b []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(maxFiles*4))
	n, size, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return n, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:size])
	if err != nil {
		return n, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return n, err
		}
		c.files = append(c.files, fds...)
	}
	return n, nil
}

func (v *vmm) serveClient(conn *net.UnixConn) {
	defer conn.Close()
	c := &client{UnixConn: conn}
	for lines := bufio.NewReader(c); ; {
		req, refused, err := c.next(lines)
		if err != nil {
			return
		}
		v.turn.Lock()
		if v.over || c.gone() {
			v.turn.Unlock()
			return
		}
		if refused == nil {
			r := v.handle(req)
			refused = &r
		}
		err = refused.write(conn)
		v.turn.Unlock()
		if err != nil {
			return
		}
	}
}

// next reads a request, or says how it is refused.
func (c *client) next(from *bufio.Reader) (req request, refused *response, err error) {
	r, err := http.ReadRequest(from)
	if err != nil {
		return req, nil, err
	}
	if r.ContentLength > maxPayload || r.TransferEncoding != nil {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return req, nil, err
		}
		words := fmt.Sprintf("Request payload with size %d is larger than the limit of %d allowed by server.", r.ContentLength, maxPayload)
		return req, &response{status: 400, body: fmt.Appendf(nil, "{ \"error\": \"%s\nAll previous unanswered requests will be dropped.\" }", words)}, nil
	}
	req.method, req.path = r.Method, r.URL.Path
	if r.ContentLength > 0 {
		if req.body, err = io.ReadAll(r.Body); err != nil {
			return req, nil, err
		}
	}
	req.files, c.files = c.files, nil
	return req, nil, nil
}

// gone reports whether the client has hung up: then it has not made its request, because nothing has read it before.
func (c *client) gone() bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	var n int
	var peeked error
	if err := raw.Control(func(fd uintptr) {
		n, _, peeked = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}); err != nil {
		return true
	}
	return n == 0 || peeked != nil && !errors.Is(peeked, unix.EAGAIN)
}

// bytes is the response as it goes over the wire: without a reason after the status.
func (r response) bytes() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\n", r.status)
	if r.status != 204 {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(r.body))
	}
	b.WriteString("\r\n")
	b.Write(r.body)
	return b.Bytes()
}

// errDropped ends a connection in the middle of an answer.
var errDropped = errors.New("dropped")

func (r response) write(c net.Conn) error {
	if r.fault != "" && len(r.body) < 2 { // there must be something to spoil
		r.status, r.body = 200, []byte(`{"an answer": "to spoil"}`)
	}
	b, after := r.bytes(), error(nil)
	switch r.fault {
	case "cut":
		r.body = r.body[:len(r.body)/2]
		b = r.bytes()
	case "drop":
		b, after = b[:len(b)-len(r.body)/2], errDropped
	case "garbage":
		b, after = []byte("\x00\xff SSH-2.0-nothing of the kind\r\n\r\n"), errDropped
	case "endless":
		b = []byte("HTTP/1.1 200 \r\nServer: Cloud Hypervisor API\r\nContent-Type: application/json\r\nContent-Length: 9000000000000\r\n\r\n[\"")
	}
	_, err := c.Write(b)
	for more := bytes.Repeat([]byte("and so on "), 1000); err == nil && r.fault == "endless"; {
		_, err = c.Write(more)
	}
	return errors.Join(err, after)
}

// jsonError is an error of the API: an array of its words.
func jsonError(code int, c chain) response { return response{status: code, body: encode([]string(c))} }

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

// decode reads the JSON of a request or a configuration. cloud-hypervisor passes over fields that it does not know; here they are
// an error, because the driver has misspelt them, or the fake must learn them.
func decode(b []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return chain{strings.Replace(err.Error(), "json: unknown field", "fakech: it does not know the field", 1)}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return chain{"trailing characters"}
	}
	return nil
}

// listenerOf is the listening socket that was inherited.
func listenerOf(fd int) (*net.UnixListener, error) {
	f := os.NewFile(uintptr(fd), "api")
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, wrap("Error creation API server's socket", err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, chain{"Error creation API server's socket", "fakech: it is no unix socket"}
	}
	return u, nil
}
