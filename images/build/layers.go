package build

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// The names by which a layer removes what lower layers have.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."     // of aufs itself; not of the image
	opaqueMarker   = ".wh..wh..opq" // removes all that lower layers have in its directory
)

// The bounds of one layer.
const (
	maxWindow   = 128 << 20 // bytes that decompression by zstd keeps
	maxSymlinks = 40        // followed for one path, as the kernel does
)

// unpackLayers unpacks the layers of an image into dir, the lowest first, under the rules of unpack. r has the compressed
// layers one after the other; their sizes are known. Each is compared with the digest of its content. A layer replaces and
// removes what lower ones have: directories become files, files directories, and whiteouts remove. Unlike in an archive of
// docker export, absolute links of the image are followed for parents, inside dir.
//
// It runs in a confined helper: see untarLayers.
func unpackLayers(ctx context.Context, r io.Reader, dir string, layers []images.Layer, limits untarLimits) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	u := &layerer{untarrer: untarrer{root: root, limits: limits}, seed: maphash.MakeSeed(), stream: limits.Stream}
	for i, l := range layers {
		if err := u.layer(ctx, io.LimitReader(r, l.SizeBytes), l); err != nil {
			if refused, ok := errors.AsType[refusedError](err); ok && core.CodeOf(err) == core.CodeInternal {
				err = core.Wrapf(err, core.Invalid, CodeInvalidTar, "the layer is refused after %d entries: %s", u.seen, refused)
			}
			if ours, ok := errors.AsType[*core.Error](err); ok && ours.Code == CodeInvalidTar {
				return core.Wrapf(err, core.Invalid, CodeInvalidTar, "layer %d of %d: %s", i+1, len(layers), ours.Msg)
			}
			return err
		}
	}
	return u.finishLayers()
}

// layerer unpacks layers.
type layerer struct {
	untarrer
	stream int64 // bytes that the layers may still have without compression

	// made are hashes of the paths that the current layer has made: a whiteout removes only what lower layers have. The seed
	// is secret, so nobody can make two paths that have one hash.
	made map[uint64]struct{}
	seed maphash.Seed

	// parents are the last parent path of an entry, as the layer spells it and without links.
	lastParent, lastResolved string
}

func (u *layerer) layer(ctx context.Context, compressed io.Reader, l images.Layer) error {
	plain, err := decompressLayer(compressed)
	if err != nil {
		return err
	}
	defer plain.Close()
	sum := sha256.New()
	bounded := &boundedReader{plain, u.stream, u.limits.Stream}
	stream := io.TeeReader(contextReader{ctx, bounded}, sum)
	u.made, u.lastParent = map[uint64]struct{}{}, ""
	archive := tar.NewReader(stream)
	for {
		hdr, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if _, ok := errors.AsType[refusedError](err); ok {
			return err
		}
		if err != nil {
			return core.Wrapf(err, core.Invalid, CodeInvalidTar, "it cannot be read after %d entries (%s)", u.seen, core.Clip(err.Error()))
		}
		if err := u.layerEntry(hdr, archive); err != nil {
			return u.explain(hdr, err)
		}
	}
	if _, err := io.Copy(io.Discard, stream); err != nil { // the digest covers what is behind the end mark, too
		return core.Wrapf(err, core.Invalid, CodeInvalidTar, "its end cannot be read (%s)", core.Clip(err.Error()))
	}
	if _, err := io.Copy(io.Discard, compressed); err != nil {
		return core.Wrapf(err, core.Invalid, CodeInvalidTar, "its end cannot be read (%s)", core.Clip(err.Error()))
	}
	u.stream = bounded.left
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); got != string(l.Content) {
		return core.Errorf(core.Invalid, CodeInvalidTar, "its content has the digest %s, and the image says %s", core.Digest(got).Short(), l.Content.Short())
	}
	return nil
}

// decompressLayer unwraps what the first bytes say, whatever the image says about its type.
func decompressLayer(r io.Reader) (io.ReadCloser, error) {
	b := bufio.NewReaderSize(r, 256<<10)
	magic, err := b.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read layer: %w", err)
	}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, core.Wrapf(err, core.Invalid, CodeInvalidTar, "it begins like gzip but cannot be read (%s)", core.Clip(err.Error()))
		}
		return z, nil
	case bytes.HasPrefix(magic, []byte("\x28\xb5\x2f\xfd")) || len(magic) == 4 && magic[0]&0xf0 == 0x50 && bytes.Equal(magic[1:], []byte("\x2a\x4d\x18")):
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, core.Wrapf(err, core.Invalid, CodeInvalidTar, "it begins like zstd but cannot be read (%s)", core.Clip(err.Error()))
		}
		return z.IOReadCloser(), nil
	}
	return io.NopCloser(b), nil
}

func (u *layerer) layerEntry(hdr *tar.Header, content io.Reader) error {
	spelled, err := u.next(hdr)
	if err != nil || spelled == "" {
		return err
	}
	if err := checkOwner(hdr); err != nil {
		return err
	}
	if spelled == "." {
		return u.rootDirectory(hdr)
	}
	dir, err := u.resolve(path.Dir(spelled))
	if err != nil {
		return err
	}
	base := path.Base(spelled)
	name := path.Join(dir, base)
	if dropped(name) || dropped(spelled) {
		return nil
	}
	if strings.HasPrefix(base, whiteoutPrefix) {
		return u.whiteout(dir, base)
	}
	if err := u.mark(name); err != nil {
		return err
	}
	parent, err := u.openParent(name)
	if err != nil {
		return err
	}
	defer parent.Close()
	at := int(parent.Fd())
	var st unix.Stat_t
	switch err := unix.Fstatat(at, base, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case errors.Is(err, unix.ENOENT):
	case err != nil:
		return fmt.Errorf("stat: %w", err)
	case hdr.Typeflag != tar.TypeDir || st.Mode&unix.S_IFMT != unix.S_IFDIR:
		if err := u.remove(name); err != nil {
			return err
		}
	}
	switch hdr.Typeflag {
	case tar.TypeDir:
		return u.makeDirectory(at, base, name, hdr)
	case tar.TypeSymlink:
		u.lastParent = "" // the link may be part of it
	}
	return u.create(at, base, hdr, content, u.hardLinkInImage)
}

// hardLinkInImage makes a link to a file of this layer or of a lower one.
func (u *layerer) hardLinkInImage(at int, base string, hdr *tar.Header) error {
	target, err := archivePath(hdr.Linkname)
	if err != nil {
		return err
	}
	dir, err := u.resolve(path.Dir(target))
	if err != nil {
		return err
	}
	resolved := *hdr
	resolved.Linkname = path.Join(dir, path.Base(target))
	return u.hardLink(at, base, &resolved)
}

// whiteout removes what lower layers have.
func (u *layerer) whiteout(dir, base string) error {
	if base == opaqueMarker {
		if _, again := u.made[u.hash("opaque:"+dir)]; again {
			return nil
		}
		if err := u.markOne("opaque:" + dir); err != nil {
			return err
		}
		return u.clearLower(dir, 0)
	}
	if strings.HasPrefix(base, whiteoutMeta) {
		return nil
	}
	gone := strings.TrimPrefix(base, whiteoutPrefix)
	if gone == "" || gone == "." || gone == ".." {
		return refusedError("it removes a path that is not a name")
	}
	name := path.Join(dir, gone)
	if dropped(name) {
		return nil
	}
	if _, ours := u.made[u.hash(name)]; !ours {
		return u.remove(name)
	}
	// What lower layers have is gone after the first time, and the second would cost as much.
	if _, again := u.made[u.hash("gone:"+name)]; again {
		return nil
	}
	if err := u.markOne("gone:" + name); err != nil {
		return err
	}
	info, err := u.root.Lstat(name)
	if err != nil || !info.IsDir() {
		return nil //nolint:nilerr // this layer has it: nothing of lower ones is left
	}
	return u.clearLower(name, 0)
}

// clearLower removes from a directory what this layer has not made.
func (u *layerer) clearLower(dir string, depth int) error {
	if depth > maxDepth {
		return refusedError("what it removes is too deep")
	}
	f, err := openDir(u.root, dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open a directory: %w", err)
	}
	entries, err := f.ReadDir(-1)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("list a directory: %w", err)
	}
	if err := u.lookMany(1 + len(entries)); err != nil {
		return err
	}
	for _, e := range entries {
		name := path.Join(dir, e.Name())
		_, ours := u.made[u.hash(name)]
		switch {
		case !ours:
			err = u.remove(name)
		case e.IsDir():
			err = u.clearLower(name, depth+1)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// remove removes whatever has a name. It follows no link.
func (u *layerer) remove(name string) error {
	u.lastParent = ""
	if err := u.root.RemoveAll(name); err != nil {
		return fmt.Errorf("remove what a lower layer has: %w", err)
	}
	return nil
}

// mark notes that this layer has a path, and with it the directories above.
func (u *layerer) mark(name string) error {
	for ; name != "."; name = path.Dir(name) {
		if _, known := u.made[u.hash(name)]; known {
			return nil
		}
		if err := u.markOne(name); err != nil {
			return err
		}
	}
	return nil
}

func (u *layerer) markOne(text string) error {
	if len(u.made) > 2*u.limits.Entries {
		return refusedError(fmt.Sprintf("a layer has more than %d paths", 2*u.limits.Entries))
	}
	u.made[u.hash(text)] = struct{}{}
	return nil
}

func (u *layerer) hash(text string) uint64 { return maphash.String(u.seed, text) }

// resolve returns a directory's path without links. A link that is absolute, or that leads above the root, stays inside the
// tree, as it would in the guest. What does not exist is kept as it is spelled: it will be made.
func (u *layerer) resolve(dir string) (string, error) {
	if u.lastParent != "" && dir == u.lastParent {
		return u.lastResolved, nil
	}
	at, rest, links := ".", dir, 0
	for rest != "" && rest != "." {
		var part string
		part, rest, _ = strings.Cut(rest, "/")
		if err := u.look(at); err != nil {
			return "", err
		}
		switch part {
		case "", ".":
			continue
		case "..":
			at = path.Dir(at)
			continue
		}
		next := path.Join(at, part)
		if strings.Count(next, "/") > maxDepth {
			return "", refusedError(fmt.Sprintf("its path leads more than %d directories deep", maxDepth))
		}
		info, err := u.root.Lstat(next)
		if errors.Is(err, fs.ErrNotExist) {
			at = next
			continue
		}
		if err != nil {
			return "", fmt.Errorf("look at its parent: %w", err)
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			if !info.IsDir() {
				return "", refusedError("its parent is not a directory")
			}
			at = next
			continue
		}
		if links++; links > maxSymlinks {
			return "", refusedError("its path has too many links")
		}
		target, err := u.root.Readlink(next)
		if err != nil {
			return "", fmt.Errorf("read a link: %w", err)
		}
		if strings.HasPrefix(target, "/") {
			at = "."
		}
		rest = strings.Trim(target, "/") + "/" + rest
		if len(rest) > 2*unix.PathMax {
			return "", refusedError("its path leads too far")
		}
	}
	u.lastParent, u.lastResolved = dir, at
	return at, nil
}

// finishLayers sets each directory's time to the last one that a layer gave. Directories that a later layer removed or replaced
// are skipped.
func (u *layerer) finishLayers() error {
	for _, d := range u.dirTimes {
		at, err := u.resolve(d.name)
		if u.looked > u.limits.LookUps {
			return core.Wrapf(err, core.Invalid, CodeInvalidTar, "the layers are refused: %s", err)
		}
		if err != nil || at != d.name {
			continue
		}
		if _, err := u.root.Lstat(d.name); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := u.root.Chtimes(d.name, d.at, d.at); err != nil {
			return fmt.Errorf("set directory times: %w", err)
		}
	}
	return nil
}
