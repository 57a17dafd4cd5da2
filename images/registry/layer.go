package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// has reports whether a layer is in the store. Its bytes are compared with the digest when it is unpacked.
func (p *puller) has(l images.Layer) bool {
	info, err := os.Lstat(p.layers.Path(l.Digest))
	return err == nil && info.Mode().IsRegular() && info.Size() == l.SizeBytes
}

// layer fetches a layer, unless it is there.
func (p *puller) layer(ctx context.Context, l images.Layer) (err error) {
	if p.has(l) {
		p.report(func(g *Progress) { g.LayersDone++; g.LayersKept++ })
		return nil
	}
	f, err := p.layers.Partial(ctx, l.Digest)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if p.has(l) { // another process was faster
		p.report(func(g *Progress) { g.LayersDone++; g.LayersKept++; g.Bytes -= l.SizeBytes })
		return p.layers.Discard(f)
	}
	d := &download{p: p, l: l, f: f}
	if err := d.begin(); err != nil {
		return err
	}
	if err := p.fromAny(ctx, func(s *source) error { return d.from(ctx, s) }); err != nil {
		return err
	}
	if err := p.layers.Adopt(f, l.Digest); err != nil {
		return err
	}
	p.report(func(g *Progress) { g.LayersDone++ })
	return nil
}

// download is the file of a layer that is being fetched.
type download struct {
	p    *puller
	l    images.Layer
	f    *os.File
	have int64 // bytes in the file
	// old means that an earlier attempt has left a part. If the whole is wrong, the part may be the reason.
	old bool
}

// begin looks at what an earlier pull has left.
func (d *download) begin() error {
	info, err := d.f.Stat()
	if err != nil {
		return err
	}
	if info.Size() > d.l.SizeBytes {
		return d.restart()
	}
	d.have, d.old = info.Size(), info.Size() > 0
	d.p.report(func(g *Progress) { g.BytesDone += d.have })
	return nil
}

// restart drops what the file has.
func (d *download) restart() error {
	if err := d.f.Truncate(0); err != nil {
		return err
	}
	d.p.report(func(g *Progress) { g.BytesDone -= d.have })
	d.have, d.old = 0, false
	return nil
}

// from fetches the rest of the layer, and compares the whole with its digest.
func (d *download) from(ctx context.Context, s *source) error {
	if d.have < d.l.SizeBytes || d.l.SizeBytes == 0 {
		if err := d.rest(ctx, s); err != nil {
			return err
		}
	}
	if _, err := d.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	got, _, err := core.DigestReader(d.f)
	if err != nil {
		return fmt.Errorf("read layer %s: %w", d.l.Digest.Short(), err)
	}
	if got == d.l.Digest {
		return nil
	}
	old := d.old
	if err := d.restart(); err != nil {
		return err
	}
	if old {
		return d.from(ctx, s) // once, because nothing is old now
	}
	return refuse("%s sent a layer that is not what its digest %s says", s.repo.RegistryStr(), d.l.Digest.Short())
}

func (d *download) rest(ctx context.Context, s *source) error {
	if d.have > 0 {
		d.old = true
	}
	resp, err := s.get(context.WithValue(ctx, bodyLimit{}, d.l.SizeBytes+1), "blobs/"+string(d.l.Digest), nil, part{d.have, d.l.SizeBytes})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK && d.have > 0 || resp.StatusCode == http.StatusPartialContent && startOf(resp) != d.have {
		if resp.StatusCode == http.StatusPartialContent {
			return refuse("%s sent a part of the layer %s that it was not asked for", s.repo.RegistryStr(), d.l.Digest.Short())
		}
		if err := d.restart(); err != nil { // it knows no parts
			return err
		}
	}
	if resp.ContentLength > d.l.SizeBytes-d.have {
		return refuse("%s sends more of the layer %s than it has", s.repo.RegistryStr(), d.l.Digest.Short())
	}
	what := "get layer " + d.l.Digest.Short()
	if _, err := io.Copy(d, io.LimitReader(resp.Body, d.l.SizeBytes-d.have)); err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return core.Wrapf(err, core.Exhausted, core.CodeDiskFull, "no space is left for the layers of the image")
		}
		return s.explain(ctx, err, what)
	}
	if d.have < d.l.SizeBytes {
		return s.explain(ctx, io.ErrUnexpectedEOF, what)
	}
	if n, _ := resp.Body.Read(make([]byte, 1)); n > 0 {
		return errors.Join(d.restart(), refuse("%s sends more of the layer %s than it has", s.repo.RegistryStr(), d.l.Digest.Short()))
	}
	return nil
}

// Write appends to the file.
func (d *download) Write(b []byte) (int, error) {
	n, err := d.f.WriteAt(b, d.have)
	d.have += int64(n)
	d.p.report(func(g *Progress) { g.BytesDone += int64(n); d.p.fetched += int64(n) })
	return n, err
}

// startOf is the first byte of the part that an answer has, or -1.
func startOf(resp *http.Response) int64 {
	text, ok := strings.CutPrefix(resp.Header.Get("Content-Range"), "bytes ")
	first, _, dash := strings.Cut(text, "-")
	n, err := strconv.ParseInt(first, 10, 64)
	if !ok || !dash || err != nil || n < 0 {
		return -1
	}
	return n
}
