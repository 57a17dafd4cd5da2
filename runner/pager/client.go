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

// Client is a way to a pager. It is safe for concurrent use.
type Client struct {
	socket string
	pulse  sidecar.Pulse
}

// NewClient returns a client of the pager that listens at a path. Nothing is dialled yet.
func NewClient(socket string) *Client { return &Client{socket, sidecar.Pulse{}.WithDefaults()} }

// ErrGone is returned, wrapped, when no pager answers.
var ErrGone = core.Errorf(core.Unavailable, core.CodePagerGone, "the pager of this runner does not answer")

// callTime bounds a call. One to put reads manifests from the store.
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
	case sidecar.IsFault(err): // of one message: the pager is there
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

// within is a call that has a limit of its own, and ErrSilent as its error when that has passed.
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

// Hello asks who the pager is.
func (c *Client) Hello(ctx context.Context) (Hello, error) {
	out, _, err := c.call(ctx, request{Op: opHello}, nil)
	if err != nil {
		return Hello{}, err
	}
	return *out.Hello, nil
}

// Keys gives the pager keys of objects in the store, which it keeps in memory.
func (c *Client) Keys(ctx context.Context, keys runnerapi.Keys) error {
	const most = 512 // what a message takes
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

// Put has an image served whose bytes are written to part, which has the image's size and, where there is a seed, its bytes. The pager
// keeps part open for itself. An image that is there already is left as it is.
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

// Open opens an image's file, for reading; writing fails. NOT_FOUND when it is not served. It is this process that opens it: a pager that did
// could not be killed while it waited for its own answer.
func (c *Client) Open(ctx context.Context, id string) (*os.File, error) {
	_, dir, err := c.call(ctx, request{Op: opDir, ID: id}, nil)
	if err != nil {
		return nil, err
	}
	if dir == nil {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the pager has given no directory")
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
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EIO): // as the kernel calls it at one moment or another
		return nil, errors.Join(ErrGone, err)
	case err != nil:
		return nil, err
	}
	return os.NewFile(uintptr(fd), id), nil
}

// Taken says that the part of an image that is whole is where it was for: the image ends when nobody has it open. One that is not served is no
// error.
func (c *Client) Taken(ctx context.Context, id string) error {
	_, _, err := c.call(ctx, request{Op: opTaken, ID: id}, nil)
	return err
}

// Drop has an image served no more, whoever has it open. One that is not served is no error.
func (c *Client) Drop(ctx context.Context, id string) error {
	_, _, err := c.call(ctx, request{Op: opDrop, ID: id}, nil)
	return err
}

// Touched are the pages of an image that were asked for before they were here, or, of one that is recorded, at all.
func (c *Client) Touched(ctx context.Context, id string) ([]Range, error) {
	out, _, err := c.call(ctx, request{Op: opTouched, ID: id}, nil)
	return out.Touched, err
}

// Stop ends the pager, which is killed if it does not answer, and waits until its process is gone, and with it everything that it has open.
// No machine may have its files open.
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

// Alive reports whether the pager of an instance still runs, when a call to it has failed with ErrGone: a connection that broke says nothing of the
// process. It waits until that is known, or ctx ends. A pager that listens and does not answer (see sidecar.Pulse) is killed.
func (c *Client) Alive(ctx context.Context, instance string) bool {
	const first, last = 10 * time.Millisecond, time.Second
	for wait := first; ; wait = min(2*wait, last) {
		h, err := c.greet(ctx)
		if err == nil {
			return h.Instance == instance
		}
		// As a process ends its connections may be closed before its socket is.
		if sidecar.IsNobody(err) {
			return false
		}
		if errors.Is(err, sidecar.ErrSilent) && ctx.Err() == nil {
			return c.kill(ctx) != nil // it is asked again when it could not be killed
		}
		again := time.NewTimer(wait)
		select {
		case <-again.C:
		case <-ctx.Done():
			again.Stop()
			return true // nobody knows better
		}
	}
}

// List returns all images as they are now, and the sums.
func (c *Client) List(ctx context.Context) ([]Status, Totals, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, Totals{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	out, err := list(ctx, conn, 0) // of no version yet: it is answered at once
	if err != nil || out.Totals == nil {
		return out.Images, Totals{}, err
	}
	return out.Images, *out.Totals, nil
}

// maxListed bounds the images that a pager is heard of: a host has far fewer.
const maxListed = 1 << 17

// list waits for another version and asks for the images until all have come.
func list(ctx context.Context, conn *net.UnixConn, version int64) (all response, err error) {
	all, _, err = exchange(ctx, conn, request{Op: opWatch, Version: version}, nil)
	if err != nil {
		return all, err
	}
	for part, after := all, ""; part.More; {
		n := len(part.Images)
		if n == 0 || part.Images[n-1].ID <= after || len(all.Images) > maxListed {
			return all, core.Errorf(core.Internal, core.CodeInternal, "the pager does not come to the end of its images: %d are listed, and more follow", len(all.Images))
		}
		after = part.Images[n-1].ID
		if part, _, err = exchange(ctx, conn, request{Op: opWatch, Version: version, After: after}, nil); err != nil {
			return all, err
		}
		all.Images = append(all.Images, part.Images...)
	}
	return all, nil
}

// Watch calls each with all images at once and whenever something about one has changed, until ctx ends or the connection to the pager does, which
// is ErrGone: see Alive. A change while the images are told is told the next time.
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
