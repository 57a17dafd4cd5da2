package pager

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sidecar"
)

// Client calls a pager. It is safe for concurrent use.
type Client struct {
	socket string
	pulse  sidecar.Pulse
}

// NewClient returns a client of the pager that listens at a path. Nothing is dialled yet.
func NewClient(socket string) *Client { return &Client{socket, sidecar.Pulse{}.WithDefaults()} }

// ErrGone is returned, wrapped, when no pager answers.
var ErrGone = core.Errorf(core.Unavailable, core.CodePagerGone, "the pager of this runner does not answer")

// callTime bounds a call. A put reads manifests from the store.
const callTime = time.Minute

func (c *Client) call(ctx context.Context, r request, f *os.File) (_ response, _ *os.File, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	conn, err := c.dial(ctx)
	if err != nil {
		return response{}, nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	return exchange(ctx, conn, r, f)
}

func (c *Client) dial(ctx context.Context) (*net.UnixConn, error) {
	conn, err := sidecar.Dial(ctx, c.socket)
	if err != nil {
		return nil, errors.Join(ErrGone, err)
	}
	return conn, nil
}

func exchange(ctx context.Context, conn *net.UnixConn, r request, f *os.File) (response, *os.File, error) {
	var out response
	err := sidecar.Send(conn, r, listOf(f)...)
	var back *os.File
	if err == nil {
		back, err = receive(conn, &out)
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return out, nil, context.Cause(ctx)
	case sidecar.IsFault(err): // a fault of one message: the pager still works
		return out, nil, fmt.Errorf("ask the pager for %s: %w", r.Op, sidecar.Fault(err))
	case err != nil:
		return out, nil, errors.Join(ErrGone, err)
	case out.Problem != nil:
		if back != nil {
			_ = back.Close()
		}
		return out, nil, out.Problem.Err()
	}
	return out, back, nil
}

// receive reads one message with at most one descriptor.
func receive(conn *net.UnixConn, m any) (*os.File, error) {
	files, err := sidecar.Receive(conn, m)
	if len(files) > 1 {
		sidecar.CloseAll(files)
		return nil, unix.EBADMSG
	}
	if err != nil || files == nil {
		return nil, err
	}
	return files[0], nil
}

func listOf(f *os.File) []*os.File {
	if f == nil {
		return nil
	}
	return []*os.File{f}
}

// within makes a call with its own time limit. When the limit has passed, the error is ErrSilent.
func (c *Client) within(ctx context.Context, limit time.Duration, r request) error {
	_, err := c.ask(ctx, limit, r)
	return err
}

func (c *Client) ask(ctx context.Context, limit time.Duration, r request) (response, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.Join(ErrGone, sidecar.ErrSilent))
	defer cancel()
	out, f, err := c.call(ctx, r, nil)
	sidecar.CloseAll(listOf(f))
	return out, err
}

// Hello asks the pager who it is.
func (c *Client) Hello(ctx context.Context) (Hello, error) {
	out, _, err := c.call(ctx, request{Op: opHello}, nil)
	if err != nil {
		return Hello{}, err
	}
	return *out.Hello, nil
}

// Keys gives the pager keys for objects in the store. The pager keeps them only in memory.
func (c *Client) Keys(ctx context.Context, keys runnerapi.Keys) error {
	const most = 512 // as many as fit into a message
	for list := range slices.Chunk(slices.Collect(maps.Keys(keys)), most) {
		some := make(runnerapi.Keys, len(list))
		for _, prefix := range list {
			some[prefix] = keys[prefix]
		}
		if _, _, err := c.call(ctx, request{Op: opKeys, Keys: some}, nil); err != nil {
			return err
		}
	}
	return nil
}

// Put makes the pager serve an image. The pager writes the image's bytes to part, which must have the image's size and,
// if there is a seed, the seed's bytes. It keeps its own descriptor of part. An image that is already served stays
// unchanged.
func (c *Client) Put(ctx context.Context, im Image, part *os.File) (Status, error) {
	const most = 4096 // ranges
	im.Want = im.Want[:min(len(im.Want), most)]
	for {
		out, _, err := c.call(ctx, request{Op: opPut, Image: &im}, part)
		switch {
		case err == nil:
			return *out.Status, nil
		case !errors.Is(err, sidecar.ErrTooLong) || len(im.Want)+len(im.Peers) == 0:
			return Status{}, err
		case len(im.Want) > 0: // hints, both
			im.Want = im.Want[:len(im.Want)/2]
		default:
			im.Peers = im.Peers[:len(im.Peers)/2]
		}
	}
}

// Open opens an image's file for reading; writing fails. NOT_FOUND if the image is not served. This process opens the
// file and not the pager: a pager that opened it could not be killed while it waited for its own answer.
func (c *Client) Open(ctx context.Context, id string) (*os.File, error) {
	_, dir, err := c.call(ctx, request{Op: opDir, ID: id}, nil)
	if err != nil {
		return nil, err
	}
	if dir == nil {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the pager sent no directory")
	}
	type opened struct {
		f   *os.File
		err error
	}
	done := make(chan opened, 1)
	go func() { // the kernel waits for the pager, however long that takes
		defer dir.Close()
		f, err := openIn(dir, id)
		done <- opened{f, err}
	}()
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	select {
	case o := <-done:
		return o.f, o.err
	case <-ctx.Done():
		go func() {
			if o := <-done; o.f != nil {
				_ = o.f.Close()
			}
		}()
		return nil, errors.Join(ErrGone, context.Cause(ctx))
	}
}

func openIn(dir *os.File, id string) (*os.File, error) {
	if strings.ContainsRune(id, '/') {
		return nil, core.Errorf(core.NotFound, core.CodeFileNotFound, "image %s is not served", core.Clip(id))
	}
	fd, err := unix.Openat(int(dir.Fd()), id, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, core.Errorf(core.NotFound, core.CodeFileNotFound, "image %s is not served", core.Clip(id))
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EIO): // the kernel returns different errors at different moments
		return nil, errors.Join(ErrGone, err)
	case err != nil:
		return nil, err
	}
	return os.NewFile(uintptr(fd), id), nil
}

// Taken says that the complete file of an image has been moved to its final place. Then the image ends as soon as
// nobody has it open. It is no error if the image is not served.
func (c *Client) Taken(ctx context.Context, id string) error {
	_, _, err := c.call(ctx, request{Op: opTaken, ID: id}, nil)
	return err
}

// Drop ends an image, even if somebody has it open. It is no error if the image is not served.
func (c *Client) Drop(ctx context.Context, id string) error {
	_, _, err := c.call(ctx, request{Op: opDrop, ID: id}, nil)
	return err
}

// Touched returns the pages of an image that were read before they had arrived or, for a recorded image, all pages that
// were read.
func (c *Client) Touched(ctx context.Context, id string) ([]Range, error) {
	out, _, err := c.call(ctx, request{Op: opTouched, ID: id}, nil)
	return out.Touched, err
}

// Stop ends the pager and waits until its process is gone, with everything that it has open. It kills a pager that does
// not answer. No machine may have the pager's files open.
func (c *Client) Stop(ctx context.Context) error {
	h, err := c.greet(ctx)
	if err == nil {
		err = sidecar.End(name, h.PID, func() error {
			return c.within(ctx, callTime, request{Op: opStop})
		})
	}
	if errors.Is(err, sidecar.ErrSilent) && ctx.Err() == nil {
		return c.kill(ctx)
	}
	return err
}

// Alive reports whether the pager with an instance id still runs, after a call failed with ErrGone: a broken connection
// says nothing about the process. It waits until it knows, or ctx ends. It kills a pager that listens and does not
// answer (see sidecar.Pulse).
func (c *Client) Alive(ctx context.Context, instance string) bool {
	const first, last = 10 * time.Millisecond, time.Second
	for wait := first; ; wait = min(2*wait, last) {
		h, err := c.greet(ctx)
		if err == nil {
			return h.Instance == instance
		}
		// When a process ends, its connections may be closed before its socket.
		if sidecar.IsNobody(err) {
			return false
		}
		if errors.Is(err, sidecar.ErrSilent) && ctx.Err() == nil {
			return c.kill(ctx) != nil // it is asked again if it could not be killed
		}
		again := time.NewTimer(wait)
		select {
		case <-again.C:
		case <-ctx.Done():
			again.Stop()
			return true // assume so
		}
	}
}

// List returns the present state of all images, and the totals.
func (c *Client) List(ctx context.Context) ([]Status, Totals, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, Totals{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	out, err := list(ctx, conn, 0) // version 0 is answered at once
	if err != nil || out.Totals == nil {
		return out.Images, Totals{}, err
	}
	return out.Images, *out.Totals, nil
}

// maxListed bounds how many images of a pager are accepted: a host has far fewer.
const maxListed = 1 << 17

// list waits for a version other than the given one and asks for images until it has all.
func list(ctx context.Context, conn *net.UnixConn, version int64) (all response, err error) {
	all, _, err = exchange(ctx, conn, request{Op: opWatch, Version: version}, nil)
	if err != nil {
		return all, err
	}
	for part, after := all, ""; part.More; {
		n := len(part.Images)
		if n == 0 || part.Images[n-1].ID <= after || len(all.Images) > maxListed {
			return all, core.Errorf(core.Internal, core.CodeInternal, "the pager's list of images does not end: %d were listed, and there are more", len(all.Images))
		}
		after = part.Images[n-1].ID
		if part, _, err = exchange(ctx, conn, request{Op: opWatch, Version: version, After: after}, nil); err != nil {
			return all, err
		}
		all.Images = append(all.Images, part.Images...)
	}
	return all, nil
}

// Watch calls each with all images, at once and after each change of the state of one. It ends with ctx, or with the
// connection to the pager (ErrGone): see Alive. A change during the listing is reported the next time.
func (c *Client) Watch(ctx context.Context, each func([]Status)) error {
	conn, err := c.dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	var version int64
	for {
		out, err := list(ctx, conn, version)
		if err != nil {
			return err
		}
		version = out.Version
		each(out.Images)
	}
}
