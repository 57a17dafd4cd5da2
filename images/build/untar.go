package build

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// untarLimits bound the effect of an archive on the host's disk, and on the memory of the process that unpacks it.
type untarLimits struct {
	Bytes   int64 // of all regular files
	Entries int
	Stream  int64 // bytes of the decompressed archive, kept or dropped
	Names   int   // bytes of the paths of all directories
	// LookUps are directories that are looked up or read to find the places of entries. A path costs one for each of its parts.
	LookUps int
}

var defaultUntarLimits = untarLimits{Bytes: 64 << 30, Entries: 4 << 20, Stream: 80 << 30, Names: 64 << 20, LookUps: 64 << 20}

// The bounds of one entry.
const (
	maxDepth = 256 // directories
	maxAttrs = 64
	maxRest  = 64 << 20 // bytes of the archive behind its end mark
)

// unpack unpacks the root file system of a container into dir, which must be empty and closed to other users, with
// owners, modes, times, hard links, device nodes and extended attributes. The archive is hostile until proven
// otherwise: every path is resolved below dir by the kernel (os.Root), symbolic links that an earlier entry made are
// followed only inside dir, nothing is written through an existing last component, nothing is opened but directories
// and the files that it has just made, and sizes are bounded.
// Entries below dev, proc, sys and run are dropped: a guest mounts its own there.
//
// It runs in a confined helper: see untar.
func unpack(ctx context.Context, r io.Reader, dir string, limits untarLimits) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	plain, err := decompress(r)
	if err != nil {
		return err
	}
	plain = &boundedReader{plain, limits.Stream, limits.Stream}
	u := &untarrer{root: root, limits: limits}
	archive := tar.NewReader(contextReader{ctx, plain})
	for {
		hdr, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if refused, ok := errors.AsType[refusedError](err); ok {
			return core.Wrapf(err, core.Invalid, CodeInvalidTar, "the archive is refused after %d entries: %s", u.seen, refused)
		}
		if err != nil {
			return core.Wrapf(err, core.Invalid, CodeInvalidTar, "the archive cannot be read after %d entries (%v); it must be an uncompressed or gzipped tar, as `docker export` writes it", u.seen, err)
		}
		if err := u.entry(hdr, archive); err != nil {
			return u.explain(hdr, err)
		}
	}
	if err := u.finish(); err != nil {
		return err
	}
	// The bytes after the end mark (padding) belong to the archive too, but only up to a bound.
	if _, err := io.Copy(io.Discard, io.LimitReader(plain, maxRest)); err != nil {
		return core.Wrapf(err, core.Invalid, CodeInvalidTar, "the archive's end cannot be read (%v)", err)
	}
	return looksLikeRoot(root)
}

// decompress unwraps gzip, and names other compressions instead of failing on their bytes.
func decompress(r io.Reader) (io.Reader, error) {
	b := bufio.NewReaderSize(r, 1<<20)
	magic, err := b.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read archive: %w", err)
	}
	for prefix, with := range map[string]string{"\x28\xb5\x2f\xfd": "zstd", "\xfd7zXZ\x00": "xz", "BZh": "bzip2"} {
		if bytes.HasPrefix(magic, []byte(prefix)) {
			return nil, core.Errorf(core.Invalid, CodeInvalidTar, "the archive is compressed with %s; cure: %s -dc FILE | coppice image build --from-tar -", with, with)
		}
	}
	if !bytes.HasPrefix(magic, []byte{0x1f, 0x8b}) {
		return b, nil
	}
	z, err := gzip.NewReader(b)
	if err != nil {
		return nil, core.Wrapf(err, core.Invalid, CodeInvalidTar, "the archive begins like gzip but cannot be read (%v)", err)
	}
	return z, nil
}

type contextReader struct {
	ctx context.Context //nolint:containedctx // lives as long as one read loop
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// boundedReader fails when more is read than an archive may have.
type boundedReader struct {
	r           io.Reader
	left, bound int64
}

func (b *boundedReader) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, refusedError(fmt.Sprintf("it has more than %d MiB without its compression", b.bound>>20))
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

type untarrer struct {
	root   *os.Root
	limits untarLimits
	seen   int
	looked int
	bytes  int64
	// dirTimes are applied at the end: making an entry changes its directory's time.
	dirTimes []dirTime
	names    int // bytes of the names in dirTimes
}

type dirTime struct {
	name string
	at   time.Time
}

// errRefused is the cause of an entry that is refused for what it is, not because a system call failed.
type refusedError string

func (e refusedError) Error() string { return string(e) }

// explain turns the error of one entry into an error that helps the user.
func (u *untarrer) explain(hdr *tar.Header, err error) error {
	var refused refusedError
	switch {
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT):
		return core.Wrapf(err, core.Exhausted, core.CodeDiskFull, "no space is left for the archive's files; free some and try again")
	case errors.As(err, &refused):
		return core.Errorf(core.Invalid, CodeInvalidTar, "entry %d of the archive, %q, is refused: %s", u.seen, core.Clip(hdr.Name), refused)
	case core.CategoryOf(err) == core.Canceled || core.CategoryOf(err) == core.TimedOut:
		return err
	default:
		return core.Wrapf(err, core.Invalid, CodeInvalidTar, "entry %d of the archive, %q, cannot be unpacked (%s)", u.seen, core.Clip(hdr.Name), core.Clip(lastCause(err)))
	}
}

// lastCause returns the text of the innermost error: it contains no path of the host.
func lastCause(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}

// next counts an entry and returns its path; "" if it has none.
func (u *untarrer) next(hdr *tar.Header) (string, error) {
	u.seen++
	if u.seen > u.limits.Entries {
		return "", refusedError(fmt.Sprintf("there are more than %d entries", u.limits.Entries))
	}
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return "", nil
	}
	return archivePath(hdr.Name)
}

func checkOwner(hdr *tar.Header) error {
	if hdr.Uid < 0 || hdr.Gid < 0 || int64(hdr.Uid) >= 1<<32-1 || int64(hdr.Gid) >= 1<<32-1 {
		return refusedError("its owner is not a valid id")
	}
	return nil
}

func (u *untarrer) rootDirectory(hdr *tar.Header) error {
	if hdr.Typeflag != tar.TypeDir {
		return refusedError("it would replace the root directory")
	}
	return u.directory(".", hdr)
}

func (u *untarrer) entry(hdr *tar.Header, content io.Reader) error {
	name, err := u.next(hdr)
	if err != nil || name == "" || dropped(name) {
		return err
	}
	if err := checkOwner(hdr); err != nil {
		return err
	}
	if name == "." {
		return u.rootDirectory(hdr)
	}
	parent, err := u.openParent(name)
	if err != nil {
		return err
	}
	defer parent.Close()
	at := int(parent.Fd())
	base := path.Base(name)
	if hdr.Typeflag == tar.TypeDir {
		return u.makeDirectory(at, base, name, hdr)
	}
	// The last of several entries for a path counts, but a directory is never replaced: its content would be lost.
	if err := unix.Unlinkat(at, base, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		if errors.Is(err, unix.EISDIR) {
			return refusedError("a directory of that name was there before")
		}
		return fmt.Errorf("replace: %w", err)
	}
	return u.create(at, base, hdr, content, u.hardLink)
}

// create makes what an entry describes, unless it is a directory.
func (u *untarrer) create(at int, base string, hdr *tar.Header, content io.Reader, hardLink func(at int, base string, hdr *tar.Header) error) error {
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return u.file(at, base, hdr, content)
	case tar.TypeSymlink:
		if err := unix.Symlinkat(hdr.Linkname, at, base); err != nil {
			return fmt.Errorf("symlink: %w", err)
		}
		return setMetadata(at, base, hdr)
	case tar.TypeLink:
		return hardLink(at, base, hdr)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return makeNode(at, base, hdr)
	default:
		return refusedError(fmt.Sprintf("its type %q is unknown", hdr.Typeflag))
	}
}

// archivePath makes an entry's name relative to the root, as "a/b" or ".".
func archivePath(name string) (string, error) {
	if name == "" || len(name) > unix.PathMax {
		return "", refusedError("its name is empty or too long")
	}
	if slices.Contains(strings.Split(name, "/"), "..") {
		return "", refusedError("its path contains ..")
	}
	if strings.ContainsRune(name, 0) {
		return "", refusedError("its path contains a NUL byte")
	}
	if strings.Count(name, "/") > maxDepth {
		return "", refusedError(fmt.Sprintf("its path is more than %d directories deep", maxDepth))
	}
	return path.Clean(strings.TrimPrefix(path.Clean("/"+name), "/")), nil
}

// dropped reports whether a guest would never see the entry.
func dropped(name string) bool {
	dir, rest, below := strings.Cut(name, "/")
	if !below || rest == "" {
		return false
	}
	return dir == "dev" || dir == "proc" || dir == "sys" || dir == "run"
}

// openDir opens a directory and nothing else: no device node, no FIFO, which would wait for a writer.
func openDir(root *os.Root, name string) (*os.File, error) {
	return root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
}

// openParent opens the directory that holds name, making the ones that the archive left out.
func (u *untarrer) openParent(name string) (*os.File, error) {
	dir := path.Dir(name)
	f, err := openDir(u.root, dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err := u.makeMissing(dir); err != nil {
			return nil, fmt.Errorf("make parent: %w", err)
		}
		f, err = openDir(u.root, dir)
	}
	if errors.Is(err, unix.ENOTDIR) {
		return nil, refusedError("its parent is not a directory")
	}
	if err != nil {
		return nil, fmt.Errorf("open parent: %w", err)
	}
	return f, nil
}

// makeMissing makes the missing directories of a path, the last one first if its parent is there. They belong to root.
func (u *untarrer) makeMissing(dir string) error {
	if dir == "." {
		return nil
	}
	if err := u.look(dir); err != nil {
		return err
	}
	err := u.root.Mkdir(dir, 0o755)
	if errors.Is(err, fs.ErrNotExist) {
		if err := u.makeMissing(path.Dir(dir)); err != nil {
			return err
		}
		err = u.root.Mkdir(dir, 0o755)
	}
	if err == nil {
		err = u.root.Lchown(dir, 0, 0)
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// look counts the look-up of a path against the bound: a few bytes of an archive may name long ways.
func (u *untarrer) look(name string) error { return u.lookMany(1 + strings.Count(name, "/")) }

func (u *untarrer) lookMany(n int) error {
	if u.looked += n; u.looked > u.limits.LookUps {
		return refusedError(fmt.Sprintf("it needs more than %d look-ups of directories", u.limits.LookUps))
	}
	return nil
}

func (u *untarrer) makeDirectory(at int, base, name string, hdr *tar.Header) error {
	if err := unix.Mkdirat(at, base, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("mkdir: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstatat(at, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("stat: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		// A merged /usr has /bin as a link: a directory entry for it changes nothing, as long as the link leads to a
		// directory.
		info, err := u.root.Stat(name)
		if st.Mode&unix.S_IFMT == unix.S_IFLNK && err == nil && info.IsDir() {
			return nil
		}
		return refusedError("something that is not a directory was there before")
	}
	return u.directory(name, hdr)
}

func (u *untarrer) directory(name string, hdr *tar.Header) error {
	if u.names += len(name); u.names > u.limits.Names {
		return refusedError(fmt.Sprintf("the paths of directories have more than %d bytes", u.limits.Names))
	}
	u.dirTimes = append(u.dirTimes, dirTime{strings.Clone(name), clampTime(hdr.ModTime)})
	f, err := openDir(u.root, name)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	defer f.Close()
	return setOpenMetadata(int(f.Fd()), hdr)
}

func (u *untarrer) file(at int, base string, hdr *tar.Header, content io.Reader) error {
	if hdr.Size < 0 || hdr.Size > u.limits.Bytes-u.bytes {
		return refusedError(fmt.Sprintf("the files would take more than %d MiB", u.limits.Bytes>>20))
	}
	u.bytes += hdr.Size
	fd, err := unix.Openat(at, base, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	f := os.NewFile(uintptr(fd), base)
	_, err = io.Copy(f, content)
	if err == nil {
		err = setOpenMetadata(fd, hdr)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return setTimes(at, base, hdr)
}

func (u *untarrer) hardLink(at int, base string, hdr *tar.Header) error {
	target, err := archivePath(hdr.Linkname)
	if err != nil {
		return err
	}
	if dropped(target) {
		return refusedError("it links to a file that a guest never sees")
	}
	dir, err := openDir(u.root, path.Dir(target))
	if err != nil {
		return fmt.Errorf("link target: %w", err)
	}
	defer dir.Close()
	if err := unix.Linkat(int(dir.Fd()), path.Base(target), at, base, 0); err != nil {
		return fmt.Errorf("link: %w", err)
	}
	return nil
}

func makeNode(at int, base string, hdr *tar.Header) error {
	kind := map[byte]uint32{tar.TypeChar: unix.S_IFCHR, tar.TypeBlock: unix.S_IFBLK, tar.TypeFifo: unix.S_IFIFO}[hdr.Typeflag]
	if hdr.Devmajor < 0 || hdr.Devminor < 0 || hdr.Devmajor > 1<<12 || hdr.Devminor > 1<<20 {
		return refusedError("its device number is not valid")
	}
	dev := unix.Mkdev(uint32(hdr.Devmajor), uint32(hdr.Devminor))
	if err := unix.Mknodat(at, base, kind|0o600, int(dev)); err != nil { //nolint:gosec // G115: bounded above
		return fmt.Errorf("mknod: %w", err)
	}
	return setMetadata(at, base, hdr)
}

// setMetadata sets owner, attributes, mode and time of an entry that is not opened: links and nodes.
func setMetadata(at int, base string, hdr *tar.Header) error {
	if err := unix.Fchownat(at, base, hdr.Uid, hdr.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("chown: %w", err)
	}
	if hdr.Typeflag != tar.TypeSymlink {
		if err := unix.Fchmodat(at, base, uint32(hdr.Mode)&0o7777, 0); err != nil { //nolint:gosec // G115: masked
			return fmt.Errorf("chmod: %w", err)
		}
	}
	return setTimes(at, base, hdr)
}

// setOpenMetadata sets owner, mode and extended attributes, in an order in which none of them undoes another: a change
// of owner clears set-uid bits and capabilities.
func setOpenMetadata(fd int, hdr *tar.Header) error {
	if err := unix.Fchown(fd, hdr.Uid, hdr.Gid); err != nil {
		return fmt.Errorf("chown: %w", err)
	}
	if err := unix.Fchmod(fd, uint32(hdr.Mode)&0o7777); err != nil { //nolint:gosec // G115: masked
		return fmt.Errorf("chmod: %w", err)
	}
	kept := 0
	for key, value := range hdr.PAXRecords {
		attr, ok := strings.CutPrefix(key, "SCHILY.xattr.")
		if !ok || !keptAttribute(attr) {
			continue
		}
		if kept++; kept > maxAttrs {
			return refusedError(fmt.Sprintf("it has more than %d extended attributes", maxAttrs))
		}
		if err := unix.Fsetxattr(fd, attr, []byte(value), 0); err != nil {
			return fmt.Errorf("set attribute %s: %w", core.Clip(attr), err)
		}
	}
	return nil
}

// keptAttribute selects the attributes that have a meaning in a guest. Those of overlayfs (trusted.overlay.*) would
// change what the guest's own overlay shows; security labels are the host's.
func keptAttribute(name string) bool {
	return name == "security.capability" || name == "system.posix_acl_access" || name == "system.posix_acl_default" ||
		strings.HasPrefix(name, "user.")
}

func setTimes(at int, base string, hdr *tar.Header) error {
	ts := unix.NsecToTimespec(clampTime(hdr.ModTime).UnixNano())
	if err := unix.UtimesNanoAt(at, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set time: %w", err)
	}
	return nil
}

// clampTime limits a time to the range of every file system here.
func clampTime(t time.Time) time.Time {
	if t.Unix() < 0 || t.Unix() > 1<<32 {
		return time.Unix(0, 0)
	}
	return t
}

func (u *untarrer) finish() error {
	for _, d := range slices.Backward(u.dirTimes) {
		if err := u.root.Chtimes(d.name, d.at, d.at); err != nil {
			return fmt.Errorf("set directory times: %w", err)
		}
	}
	return nil
}

// looksLikeRoot refuses archives that are something else, naming the two usual mistakes.
func looksLikeRoot(root *os.Root) error {
	exists := func(name string) bool { _, err := root.Lstat(name); return err == nil }
	if slices.ContainsFunc([]string{"bin", "usr", "sbin", "etc", ".dockerenv"}, exists) {
		return nil
	}
	if exists("manifest.json") || exists("oci-layout") {
		return core.Errorf(core.Invalid, CodeInvalidTar, "the archive holds layers (the output of `docker save`), not one root file system; cure: docker create IMAGE, then docker export CONTAINER")
	}
	return core.Errorf(core.Invalid, CodeInvalidTar, "the archive holds neither bin, usr, sbin nor etc at its top, so it is not a root file system; cure: docker create IMAGE, then docker export CONTAINER")
}
