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
	"strings"

	"golang.org/x/sys/unix"
)

const (
	maxPayload = 51200
	apiRoot    = "/api/v1/"
)

// request is a call of a client.
type request struct {
	method, name string
	body         []byte // nil without a body
	files        []int  // the descriptors that came with it
}

// response is the answer.
type response struct {
	status int
	body   []byte
	fault  string // how the answer goes wrong
}

// serve answers one request at a time, in the order of the connections, until the process ends. A client that has hung
// up before its request was read has not made it.
func (v *vmm) serve(l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			v.exit <- wrap("fakech: the server broke", err)
			return
		}
		v.converse(conn)
		_ = conn.Close()
	}
}

// converse answers the requests of one client.
func (v *vmm) converse(conn *net.UnixConn) {
	in := &input{conn: conn}
	for lines := bufio.NewReader(in); ; {
		req, err := readRequest(lines)
		req.files, in.files = in.files, nil
		if err != nil || hungUp(conn) {
			closeAll(req.files)
			return
		}
		v.turn.Lock()
		err = v.handle(req).write(conn)
		v.turn.Unlock()
		closeAll(req.files) // the VM has its own copies
		if err != nil {
			return
		}
	}
}

// input is a connection that keeps the descriptors that come with the bytes.
type input struct {
	conn  *net.UnixConn
	files []int
}

func (in *input) Read(b []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(253*4))
	n, oobn, _, _, err := in.conn.ReadMsgUnix(b, oob)
	if err != nil {
		return max(n, 0), err // after a reset of the connection, n is negative
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range messages {
		var fds []int
		if fds, err = unix.ParseUnixRights(&messages[i]); err != nil {
			break
		}
		in.files = append(in.files, fds...)
	}
	return n, err
}

func readRequest(from *bufio.Reader) (request, error) {
	r, err := http.ReadRequest(from)
	if err != nil {
		return request{}, err
	}
	req := request{method: r.Method, name: strings.TrimPrefix(r.URL.Path, apiRoot)}
	if r.ContentLength < 0 || r.ContentLength > maxPayload { // cloud-hypervisor takes chunks for requests
		return req, fmt.Errorf("a payload of %d bytes", r.ContentLength)
	}
	if r.ContentLength > 0 {
		req.body, err = io.ReadAll(r.Body)
	}
	return req, err
}

// hungUp reports whether the client has closed its end.
func hungUp(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		list := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		_, err := unix.Poll(list, 0)
		gone = err == nil && list[0].Revents != 0
	})
	return gone || err != nil
}

func closeAll(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd) // they were only passed on
	}
}

// errDropped ends a connection in the middle of an answer.
var errDropped = errors.New("dropped")

// bytes is the response as it goes over the wire: without a reason after the status.
func (r response) bytes() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\n", r.status)
	if r.status != http.StatusNoContent {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(r.body))
	}
	b.WriteString("\r\n")
	b.Write(r.body)
	return b.Bytes()
}

func (r response) write(to io.Writer) error {
	if r.fault != "" && len(r.body) < 2 { // there must be something to spoil
		r.status, r.body = http.StatusOK, []byte(`{"an answer": "to spoil"}`)
	}
	switch r.fault {
	case "cut":
		r.body = r.body[:len(r.body)/2]
	case "drop":
		b := r.bytes()
		_, _ = to.Write(b[:len(b)-len(r.body)/2])
		return errDropped
	case "garbage":
		_, _ = to.Write([]byte("\x00\xff SSH-2.0-nothing of the kind\r\n\r\n"))
		return errDropped
	case "endless":
		_, err := to.Write([]byte("HTTP/1.1 200 \r\nServer: Cloud Hypervisor API\r\nContent-Type: application/json\r\nContent-Length: 9000000000000\r\n\r\n[\""))
		for more := bytes.Repeat([]byte("and so on "), 1000); err == nil; {
			_, err = to.Write(more)
		}
		return err
	}
	_, err := to.Write(r.bytes())
	return err
}

// jsonError is an error of the API: an array of its words.
func jsonError(code int, c chain) response {
	return response{status: code, body: encode([]string(c))}
}

// encode writes JSON as cloud-hypervisor does: without escapes for HTML.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // of our own types
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// decode reads JSON. A field that the fake does not know is an error, because it could change something.
func decode(b []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return chain{err.Error()}
	}
	if rest := bytes.TrimSpace(b[dec.InputOffset():]); len(rest) > 0 {
		return chain{"trailing characters"}
	}
	return nil
}
