package coppice

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
)

// CopyAcross copies a file or tree from one workspace to another, or within one, by the rules of cp -r and within the bounds of the options.
// The bytes pass through this client. Owners become root, and modes are kept; in a tree, times and symbolic links are kept too. Nothing goes
// outside of the destination: a name that leads out of the copied tree is taken as a name in it, and a link that leads out is left out,
// unless OutsideLinks asks for it.
func (c *Client) CopyAcross(ctx context.Context, from WorkspaceID, source string, to WorkspaceID, destination string, o CopyOptions) (Copied, error) {
	if o.MaxBytes <= 0 {
		o.MaxBytes = DefaultCopyBytes
	}
	if o.MaxEntries <= 0 {
		o.MaxEntries = DefaultCopyEntries
	}
	contents := strings.HasSuffix(source, "/.")
	clean := path.Clean(source)
	info, err := c.StatFile(ctx, from, clean)
	if err != nil {
		return Copied{}, err
	}
	there, err := c.StatFile(ctx, to, destination)
	exists := err == nil
	if err != nil && !errors.Is(err, CodeFileNotFound) {
		return Copied{}, err
	}
	isDir, into := info.Type == FileTypeDir, exists && there.Type == FileTypeDir
	switch {
	case !isDir && !into && strings.HasSuffix(destination, "/"):
		return Copied{}, fmt.Errorf("copy to %s: there is no such directory", destination)
	case isDir && exists && !into:
		return Copied{}, fmt.Errorf("copy to %s: it is not a directory, and %s is", destination, source)
	case into && !contents && clean != "/":
		destination = path.Join(destination, path.Base(clean))
	}
	if isDir {
		return c.copyTreeAcross(ctx, from, clean, to, destination, o)
	}
	body, info, err := c.openFile(ctx, from, clean, "", o.MaxBytes)
	if err != nil {
		return Copied{}, err
	}
	defer body.Close()
	counted := &countedReader{r: o.read(body)}
	_, err = c.WriteFile(ctx, to, destination, counted, WriteOptions{Mode: fmt.Sprintf("%04o", parseMode(info.Mode))})
	return Copied{Bytes: counted.n}, err
}

type countedReader struct {
	r io.Reader
	n int64
}

func (c *countedReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

func (c *Client) copyTreeAcross(ctx context.Context, from WorkspaceID, source string, to WorkspaceID, destination string, o CopyOptions) (Copied, error) {
	body, err := c.downloadTar(ctx, from, source, archiveBound(o))
	if err != nil {
		return Copied{}, err
	}
	defer body.Close()
	x := &crossing{base: strings.TrimPrefix(path.Base(source), "/"), options: o, sent: map[string]bool{}}
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.CloseWithError(x.all(o.read(body), w))
	}()
	_, err = c.UploadTar(ctx, to, destination, r)
	_ = r.CloseWithError(errUploadEnded)
	<-done
	x.got.LeftOut += max(body.leftOut.Special, 0)
	x.got.Pseudo, x.got.MorePseudo = body.leftOut.Pseudo, body.leftOut.More
	if x.err != nil {
		err = x.err // the upload only says that its body broke off
	}
	return x.got, err
}

// crossing rewrites the archive of one workspace for another one.
type crossing struct {
	base    string // the first element of the archive's names, which is dropped; empty for the whole file system
	options CopyOptions
	entries int
	sent    map[string]bool // regular files, which may get another name
	got     Copied
	err     error // of the source
}

var errUploadEnded = errors.New("the upload has ended")

func (x *crossing) all(r io.Reader, w io.Writer) error {
	tr, tw := tar.NewReader(r), tar.NewWriter(w)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = x.entry(tr, tw, h)
		}
		if err != nil {
			return x.failed(err)
		}
	}
	if _, err := io.Copy(io.Discard, r); err != nil { // the padding, and the trailer that says whether the archive is complete
		return x.failed(err)
	}
	return tw.Close()
}

// failed keeps an error unless it only says that the upload has ended.
func (x *crossing) failed(err error) error {
	if !errors.Is(err, errUploadEnded) {
		x.err = err
	}
	return err
}

func (x *crossing) entry(tr *tar.Reader, tw *tar.Writer, h *tar.Header) error {
	if x.entries++; x.entries > x.options.MaxEntries {
		return tooManyEntries(x.options.MaxEntries)
	}
	name := below(x.base, h.Name)
	out := tar.Header{Typeflag: h.Typeflag, Name: name, Mode: int64(h.FileInfo().Mode().Perm()), ModTime: h.ModTime, Format: tar.FormatPAX}
	switch h.Typeflag {
	case tar.TypeDir:
		if out.Name += "/"; name == "" {
			out.Name = "./"
		}
	case tar.TypeReg:
		if out.Size = h.Size; x.got.Bytes+h.Size > x.options.MaxBytes {
			return errTooMuch
		}
		x.sent[name] = true
	case tar.TypeSymlink:
		if out.Linkname = h.Linkname; !x.options.OutsideLinks && leadsOutside(name, h.Linkname) {
			x.got.LeftOut++
			return nil
		}
	case tar.TypeLink:
		if out.Linkname = below(x.base, h.Linkname); !x.sent[out.Linkname] {
			x.got.LeftOut++
			return nil
		}
	default:
		x.got.LeftOut++
		return nil
	}
	if name == "" && h.Typeflag != tar.TypeDir {
		return nil
	}
	if err := tw.WriteHeader(&out); err != nil {
		return err
	}
	n, err := io.Copy(tw, tr)
	x.got.Bytes += n
	return err
}
