package cloudhypervisor

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// api is a client of cloud-hypervisor's REST interface, on a unix socket that can carry descriptors. Each call has its
// own connection, so the answer to an abandoned call is never taken for the answer to another one. cloud-hypervisor
// answers one call at a time, in order. It is trusted only with its own guest: whatever it answers costs bounded
// memory.
type api struct{ socket string }

// maxAnswer bounds an answer. The largest is vm.info, with about 10 KiB.
const maxAnswer = 1 << 20

// refusal is an answer with an error.
type refusal struct {
	status int
	chain  []string // from the general to the particular
}

func (e *refusal) Error() string {
	said := strings.Join(e.chain, ": ")
	if said == "" {
		said = "nothing more"
	}
	return "it says " + printable(said)
}

// printable makes a VMM's message fit for a log and a terminal. It keeps the end, which says most.
func printable(s string) string {
	const limit = 1024
	t := vmm.NewTail(limit)
	_, _ = t.Write([]byte(strings.ReplaceAll(s, "\n", " "))) // never fails
	return t.String()
}

// refusedWith returns the status of a refusal; 0 if err is not a refusal.
func refusedWith(err error) int {
	if r, ok := errors.AsType[*refusal](err); ok {
		return r.status
	}
	return 0
}

func (a api) get(ctx context.Context, call string) ([]byte, error) {
	return a.call(ctx, http.MethodGet, call, nil)
}

// put makes a call; body is nil for calls without a body. files are sent with it.
func (a api) put(ctx context.Context, call string, body any, files ...*os.File) error {
	_, err := a.call(ctx, http.MethodPut, call, body, files...)
	return err
}

func (a api) call(ctx context.Context, method, call string, body any, files ...*os.File) ([]byte, error) {
	out, err := a.exchange(ctx, method, call, body, files)
	if err == nil {
		return out, nil
	}
	if r, refused := errors.AsType[*refusal](err); refused {
		return nil, core.Wrapf(r, core.Internal, core.CodeVMMFailed, "cloud-hypervisor refused %s with status %d", call, r.status)
	}
	if ctx.Err() != nil {
		err = errors.Join(context.Cause(ctx), err)
	}
	return nil, core.Wrapf(err, core.Unavailable, core.CodeVMMFailed, "cloud-hypervisor did not answer %s", call)
}

func (a api) exchange(ctx context.Context, method, call string, body any, files []*os.File) ([]byte, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", a.socket)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) }) // fails only after a close
	defer stop()
	request, err := encode(method, call, body)
	if err != nil {
		return nil, err
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	conn := c.(*net.UnixConn) //nolint:forcetypeassert // dialled as such
	n, _, err := conn.WriteMsgUnix(request, rights, nil)
	runtime.KeepAlive(files)
	if err == nil && n < len(request) {
		_, err = conn.Write(request[n:])
	}
	if err != nil {
		return nil, err
	}
	return decode(conn)
}

// encode writes a request. A call without a body must not even have the header of one: otherwise it is refused.
func encode(method, call string, body any) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s /api/v1/%s HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n", method, call)
	if body == nil {
		b.WriteString("\r\n")
		return b.Bytes(), nil
	}
	content, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(content))
	b.Write(content)
	return b.Bytes(), nil
}

func decode(from io.Reader) ([]byte, error) {
	res, err := http.ReadResponse(bufio.NewReader(io.LimitReader(from, maxAnswer)), nil)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	content, err := io.ReadAll(res.Body)
	if err != nil {
		return nil, err
	}
	if res.StatusCode == http.StatusOK || res.StatusCode == http.StatusNoContent {
		return content, nil
	}
	e := &refusal{status: res.StatusCode}
	if json.Unmarshal(content, &e.chain) != nil && len(content) > 0 { // a text in another form is also a reason
		e.chain = []string{string(content)}
	}
	return nil, e
}
