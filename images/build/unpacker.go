package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/confine"
)

const untarTask = "untar"

// unpackerLimits bound the helper that unpacks an archive. Its output on the disk has bounds of its own: see untarLimits. An
// archive may come from a slow stream; layers are files of the store, whose lock others wait for.
func (r unpackRequest) unpackerLimits() confine.Limits {
	l := confine.Limits{
		Memory: 512 << 20, CPU: 2 * time.Hour, Time: 6 * time.Hour, FileBytes: r.Limits.Bytes,
		Frame: 1 << 10, Answers: 1, Bytes: 1 << 10,
	}
	if len(r.Layers) > 0 {
		l.CPU, l.Time = 20*time.Minute, time.Hour
	}
	return l
}

// unpackerCaps are the capabilities needed to make files of other owners, with every mode, device nodes and file
// capabilities. The helper sees only the tree, and devices cannot be opened there.
var unpackerCaps = []uint8{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_MKNOD, unix.CAP_SETFCAP}

// ConfinedTask is the task for confine.Enter of a program that builds images.
func ConfinedTask() confine.Task {
	return confine.Task{Name: untarTask, Files: true, Run: func(c *confine.Child) error {
		var request unpackRequest
		if err := c.Request(&request); err != nil {
			return err
		}
		if len(c.Files) != 1 {
			return fmt.Errorf("it was given %d files, want 1", len(c.Files))
		}
		if len(request.Layers) > 0 {
			return unpackLayers(context.Background(), c.Files[0], confine.TreeDir, request.Layers, request.Limits)
		}
		return unpack(context.Background(), c.Files[0], confine.TreeDir, request.Limits)
	}}
}

// unpackRequest says what the helper reads: one archive, or layers one after the other.
type unpackRequest struct {
	Limits untarLimits
	Layers []images.Layer `json:",omitempty"`
}

// untarLayers unpacks the layers of an image into dir, in a confined helper. See unpackLayers. open opens a layer. If its bytes do not
// match the layer's digest, untarLayers fails, and nothing that was unpacked may be used.
func untarLayers(ctx context.Context, layers []images.Layer, open func(images.Layer) (io.ReadCloser, error), dir string, limits untarLimits) error {
	r := &layersReader{layers: layers, open: open}
	defer r.close()
	_, err := runUnpacker(ctx, r, dir, unpackRequest{limits, layers})
	return err
}

// layersReader reads layers one after the other, and compares each with its digest.
type layersReader struct {
	layers []images.Layer
	open   func(images.Layer) (io.ReadCloser, error)

	closed atomic.Bool

	mu   sync.Mutex // guards what follows: the reader may still be at work when the helper has ended
	f    io.ReadCloser
	sum  hash.Hash
	left int64
}

// damagedLayerError is a layer in the store that is not what its digest says.
type damagedLayerError struct{ layer core.Digest }

func (e damagedLayerError) Error() string {
	return fmt.Sprintf("the layer %s in the image store is damaged", e.layer.Short())
}

func (r *layersReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		if r.closed.Load() {
			return 0, errors.Join(fs.ErrClosed, r.closeFile())
		}
		if r.f == nil {
			if len(r.layers) == 0 {
				return 0, io.EOF
			}
			f, err := r.open(r.layers[0])
			if err != nil {
				return 0, err
			}
			r.f, r.sum, r.left = f, sha256.New(), r.layers[0].SizeBytes
		}
		if r.left > 0 {
			n, err := r.f.Read(p[:min(int64(len(p)), r.left)])
			r.left -= int64(n)
			r.sum.Write(p[:n])
			switch {
			case errors.Is(err, io.EOF) && r.left > 0:
				return n, damagedLayerError{r.layers[0].Digest}
			case errors.Is(err, io.EOF):
				err = nil
			}
			if n > 0 || err != nil {
				return n, err
			}
			continue
		}
		done := r.layers[0]
		if err := r.f.Close(); err != nil {
			return 0, err
		}
		r.f, r.layers = nil, r.layers[1:]
		if "sha256:"+hex.EncodeToString(r.sum.Sum(nil)) != string(done.Digest) {
			return 0, damagedLayerError{done.Digest}
		}
	}
}

// close ends reading. A read that is under way may wait, so it is not waited for; the one after it closes the file.
func (r *layersReader) close() {
	r.closed.Store(true)
	if r.mu.TryLock() {
		_ = r.closeFile() // it was only read
		r.mu.Unlock()
	}
}

func (r *layersReader) closeFile() error {
	if r.f == nil {
		return nil
	}
	f := r.f
	r.f = nil
	return f.Close()
}

// untar unpacks an archive into dir, in a confined helper, and returns the digest of the whole archive. See unpack.
func untar(ctx context.Context, r io.Reader, dir string, limits untarLimits) (core.Digest, error) {
	return runUnpacker(ctx, r, dir, unpackRequest{Limits: limits})
}

// runUnpacker runs the helper on what r has, and returns the digest of that.
func runUnpacker(ctx context.Context, r io.Reader, dir string, request unpackRequest) (core.Digest, error) {
	from, to, err := os.Pipe()
	if err != nil {
		return "", err
	}
	feeding, sum := make(chan error, 1), sha256.New()
	go func() {
		_, err := io.Copy(to, io.TeeReader(contextReader{ctx, r}, sum))
		_ = to.Close() // the helper reads to here
		if errors.Is(err, unix.EPIPE) {
			err = drain(io.TeeReader(contextReader{ctx, r}, sum)) // the part that the helper did not read
		}
		feeding <- err
	}()
	failed := confine.Run(ctx, confine.Spec{
		Task: untarTask, Limits: request.unpackerLimits(), Request: request, Files: []*os.File{from}, Dir: dir, Caps: unpackerCaps,
	}, func(json.RawMessage) error {
		return errors.New("the confined helper sent an answer, and this task has no answers")
	})
	_ = from.Close() // the goroutine that feeds the helper ends
	if failed != nil {
		select {
		case err := <-feeding: // why the archive ended early
			if err != nil && ctx.Err() == nil && !errors.Is(err, errTooLong) {
				return "", core.Wrapf(err, core.Invalid, CodeInvalidTar, "the archive cannot be read to its end (%v)", err)
			}
		default: // it may wait for an input that never comes
		}
		return "", unpackError(failed)
	}
	select {
	case err = <-feeding:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	switch {
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case err != nil:
		return "", core.Wrapf(err, core.Invalid, CodeInvalidTar, "the archive cannot be read to its end (%v)", err)
	}
	return core.ParseDigest("sha256:" + hex.EncodeToString(sum.Sum(nil)))
}

var errTooLong = fmt.Errorf("it has more than %d MiB of data after its end", maxRest>>20)

// drain reads the rest of an archive, up to a bound.
func drain(r io.Reader) error {
	n, err := io.CopyN(io.Discard, r, maxRest+1)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err == nil && n > maxRest {
		return errTooLong
	}
	return err
}

// unpackError converts an error of the helper into an error of the build.
func unpackError(err error) error {
	if failed, ok := errors.AsType[*confine.TaskError](err); ok {
		switch failed.Code {
		case CodeInvalidTar:
			return core.Wrapf(err, core.Invalid, CodeInvalidTar, "%s", failed.Message)
		case core.CodeDiskFull:
			return core.Wrapf(err, core.Exhausted, core.CodeDiskFull, "%s", failed.Message)
		default: // the code of a fault of ours, or a forged one
		}
		return fmt.Errorf("unpack the archive: %w", err)
	}
	if hit, ok := errors.AsType[*confine.LimitError](err); ok {
		return core.Wrapf(err, core.Invalid, CodeInvalidTar, "unpacking the archive hit its limit of %s (%s), which no ordinary archive reaches", hit.Limit, hit.Bound)
	}
	if _, ok := errors.AsType[*confine.CrashError](err); ok {
		return core.Wrapf(err, core.Invalid, CodeInvalidTar, "the contents of the archive made the helper fail")
	}
	return err
}

// openArchive opens only a regular file: a FIFO would wait for a writer, and opening a device node can have any effect.
// It follows a link that the user names.
func openArchive(name string) (*os.File, error) {
	fd, err := unix.Open(name, unix.O_PATH|unix.O_CLOEXEC, 0) // this opens no device and waits for nobody
	if err != nil {
		return nil, core.Wrapf(err, core.Invalid, CodeInvalidTar, "the archive %s cannot be opened", name)
	}
	path := os.NewFile(uintptr(fd), name)
	defer path.Close()
	info, err := path.Stat()
	if err != nil {
		return nil, err
	}
	switch mode := info.Mode(); {
	case mode.IsRegular():
	case mode.IsDir():
		return nil, core.Errorf(core.Invalid, CodeInvalidTar, "%s is a directory; name an archive in the format of `docker export`", name)
	default:
		return nil, core.Errorf(core.Invalid, CodeInvalidTar, "%s is not a regular file; for a pipe, give the archive on standard input: --from-tar -", name)
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, core.Wrapf(err, core.Invalid, CodeInvalidTar, "the archive %s cannot be opened", name)
	}
	return f, nil
}
