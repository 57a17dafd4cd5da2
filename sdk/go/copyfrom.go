package coppice

import (
	"archive/tar"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// The default bounds of CopyFrom.
const (
	DefaultCopyBytes   = 10 << 30
	DefaultCopyEntries = 1_000_000
)

// CopyOptions bound what a workspace can write to this machine. Zero values take the defaults.
type CopyOptions struct {
	MaxBytes     int64 // of file content
	MaxEntries   int   // files, directories and links
	OutsideLinks bool  // keep symbolic links that lead out of the copied tree

	// Progress is called with the number of bytes so far while they are copied; nil for nobody. It must return at once.
	Progress func(bytes int64)
}

// read returns a reader that tells the progress of a copy.
func (o *CopyOptions) read(r io.Reader) io.Reader {
	if o.Progress == nil {
		return r
	}
	return &told{Reader: r, tell: o.Progress}
}

type told struct {
	io.Reader
	n    int64
	tell func(int64)
}

func (t *told) Read(p []byte) (int, error) {
	n, err := t.Reader.Read(p)
	t.n += int64(n)
	t.tell(t.n)
	return n, err
}

// Copied is the result of a copy.
type Copied struct {
	Bytes   int64
	LeftOut int // symbolic links that lead outside, hard links to missing files, devices, sockets and pipes

	// Pseudo are the mount points of pseudo file systems such as /proc, whose content was left out; MorePseudo says how many
	// more of them there are. They are the guest's words.
	Pseudo     []string
	MorePseudo int
}

// CopyFrom copies a file or tree out of a workspace, by the rules of cp -r and within the default bounds. It returns how many
// bytes of file content were received. See CopyFromWith.
func (c *Client) CopyFrom(ctx context.Context, id WorkspaceID, remote, local string) (int64, error) {
	got, err := c.CopyFromWith(ctx, id, remote, local, CopyOptions{})
	return got.Bytes, err
}

// CopyFromWith copies a file or tree out of a workspace. The guest controls everything in the archive, so nothing is
// written outside of local, even if an earlier copy came from the same guest:
//   - The path local itself is the caller's: links in it are followed. Below it a link that is in the way is replaced, never
//     followed. So is a link named local when a file is copied.
//   - A regular file that is there keeps its inode, its owner and its mode, and gets the new content. It is replaced where it
//     cannot be written, belongs to another user, has a set-user-id or set-group-id bit, or has another name (a hard
//     link), which an earlier copy may have planted.
//   - A symbolic link that leads outside is left out, unless OutsideLinks asks for it.
//   - Devices, sockets and pipes are left out. Files get the caller's owner and no set-user-id bit.
//   - The content of pseudo file systems (/proc, /sys) is left out.
//   - The bytes and the number of entries are bounded.
func (c *Client) CopyFromWith(ctx context.Context, id WorkspaceID, remote, local string, o CopyOptions) (Copied, error) {
	if o.MaxBytes <= 0 {
		o.MaxBytes = DefaultCopyBytes
	}
	if o.MaxEntries <= 0 {
		o.MaxEntries = DefaultCopyEntries
	}
	contents := strings.HasSuffix(remote, "/.")
	clean := path.Clean(remote)
	info, err := c.StatFile(ctx, id, clean)
	if err != nil {
		return Copied{}, err
	}
	there, err := os.Stat(local)
	exists := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Copied{}, err
	}
	isDir := info.Type == FileTypeDir
	into := exists && there.IsDir()
	switch {
	case !isDir && !into && strings.HasSuffix(local, "/"):
		return Copied{}, fmt.Errorf("copy to %s: there is no such directory", local)
	case isDir && exists && !into:
		return Copied{}, fmt.Errorf("copy to %s: it is not a directory, and %s is", local, remote)
	}
	if !isDir {
		dir, name := filepath.Split(local)
		if into {
			dir, name = local, path.Base(clean)
		}
		return c.copyFileFrom(ctx, id, clean, dir, name, info, o)
	}
	if err := os.MkdirAll(local, 0o755); err != nil { //nolint:gosec // G301: like cp -r; the umask applies
		return Copied{}, err
	}
	root, err := os.OpenRoot(local)
	if err != nil {
		return Copied{}, err
	}
	defer func() { _ = root.Close() }() // it was only needed to reach the files
	if into && !contents && clean != "/" {
		below, err := openBelow(root, path.Base(clean))
		if err != nil {
			return Copied{}, err
		}
		_ = root.Close() // the same
		root = below
	}
	body, err := c.downloadTar(ctx, id, clean, archiveBound(o))
	if err != nil {
		return Copied{}, err
	}
	defer body.Close()
	x := extraction{root: root, base: strings.TrimPrefix(path.Base(clean), "/"), options: o}
	err = x.all(o.read(body))
	x.got.LeftOut += max(body.leftOut.Special, 0)
	x.got.Pseudo, x.got.MorePseudo = body.leftOut.Pseudo, body.leftOut.More
	return x.got, err
}

// archiveBound bounds an archive whose content is bounded: the guest counts all of it, also headers. A header with a long name and its
// padding have room here.
func archiveBound(o CopyOptions) int64 {
	const header = 16 << 10
	return min(o.MaxBytes, 1<<60) + header*int64(min(o.MaxEntries, 1<<40))
}

func tooManyEntries(most int) error {
	return fmt.Errorf("the archive has more than %d entries; to copy them all, raise the bound (MaxEntries, --max-entries)", most)
}

// openBelow makes a directory below a root and opens it. A link or file of that name is replaced.
func openBelow(root *os.Root, name string) (*os.Root, error) {
	if err := realDir(root, name, 0o755); err != nil {
		return nil, err
	}
	return root.OpenRoot(name)
}

// realDir makes sure that a name is a directory and not a link to a directory.
func realDir(root *os.Root, name string, mode fs.FileMode) error {
	info, err := root.Lstat(name)
	switch {
	case err == nil && info.IsDir():
		return nil
	case err == nil:
		err = root.Remove(name)
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	}
	if err != nil {
		return err
	}
	return root.Mkdir(name, mode)
}

// realDirs does the same for every element of a path.
func realDirs(root *os.Root, name string, mode fs.FileMode) error {
	if name == "." {
		return nil
	}
	for i := range len(name) {
		if name[i] != '/' {
			continue
		}
		if err := realDir(root, name[:i], 0o755); err != nil {
			return err
		}
	}
	return realDir(root, name, mode)
}

// copyFileFrom writes a file under a temporary name first. When it is complete, it is moved to its place, or copied
// into the file that exists there. If the disk becomes full during that copy, the existing file is cut short.
func (c *Client) copyFileFrom(ctx context.Context, id WorkspaceID, remote, dir, name string, info FileInfo, o CopyOptions) (Copied, error) {
	opened, _, err := c.openFile(ctx, id, remote, "", o.MaxBytes)
	if err != nil {
		return Copied{}, err
	}
	defer opened.Close()
	body := o.read(opened)
	if whole, err := filepath.Abs(filepath.Join(dir, name)); err == nil && strings.HasPrefix(whole, "/dev/") {
		f, err := os.OpenFile(whole, os.O_WRONLY, 0) // may be the caller's terminal or a pipe
		if err != nil {
			return Copied{}, err
		}
		n, err := copyBound(f, body, o.MaxBytes)
		return Copied{Bytes: n}, errors.Join(err, f.Close())
	}
	if dir == "" {
		dir = "."
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Copied{}, err
	}
	defer root.Close()
	if was, err := root.Lstat(name); err == nil && was.IsDir() {
		return Copied{}, fmt.Errorf("copy to %s: it is a directory", filepath.Join(dir, name))
	}
	temporary := ".coppice-" + rand.Text()
	f, err := root.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, parseMode(info.Mode))
	if err != nil {
		return Copied{}, err
	}
	n, err := copyBound(f, body, o.MaxBytes)
	if err = errors.Join(err, f.Close()); err == nil {
		err = moveInto(root, temporary, name)
	}
	if err != nil {
		err = errors.Join(err, root.Remove(temporary))
	}
	return Copied{Bytes: n}, err
}

// copyBound copies at most the given number of bytes and fails when there are more.
func copyBound(w io.Writer, r io.Reader, most int64) (int64, error) {
	n, err := io.Copy(w, io.LimitReader(r, most))
	if err != nil || n < most {
		return n, err
	}
	var more [1]byte
	if k, _ := io.ReadFull(r, more[:]); k > 0 {
		return n, errTooMuch
	}
	return n, nil
}

var errTooMuch = errors.New("the data exceeds the bound on copied bytes; to copy it all, raise the bound (MaxBytes, --max-bytes)")

func parseMode(octal string) fs.FileMode {
	var m uint32
	if _, err := fmt.Sscanf(octal, "%o", &m); err != nil {
		return 0o644
	}
	return fs.FileMode(m) & fs.ModePerm
}

// extraction unpacks one archive below a directory.
type extraction struct {
	root    *os.Root
	base    string // the first element of the archive's names, which is dropped; empty if the guest's root was requested
	options CopyOptions
	entries int
	got     Copied
}

func (x *extraction) all(r io.Reader) error {
	modes := map[string]fs.FileMode{} // of directories: set last, because a read-only directory could not be filled
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if x.entries++; x.entries > x.options.MaxEntries {
			return tooManyEntries(x.options.MaxEntries)
		}
		name := below(x.base, h.Name)
		if name == "" {
			continue
		}
		if err := x.entry(tr, h, name); err != nil {
			return fmt.Errorf("unpack %q: %w", name, err)
		}
		if h.Typeflag == tar.TypeDir {
			modes[name] = h.FileInfo().Mode().Perm()
		}
	}
	if _, err := io.Copy(io.Discard, r); err != nil { // the padding, and the trailer that says whether the archive is complete
		return err
	}
	return x.setModes(modes)
}

// setModes sets the modes of directories. The content of a directory comes before the directory, which may be closed
// afterwards.
func (x *extraction) setModes(modes map[string]fs.FileMode) error {
	deepest := slices.Sorted(maps.Keys(modes))
	slices.Reverse(deepest) // a path sorts after the paths that it begins with
	for _, name := range deepest {
		info, err := x.root.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
			continue // a later entry took its place
		}
		if err == nil {
			err = x.root.Chmod(name, modes[name])
		}
		if err != nil {
			return fmt.Errorf("set the mode of %q: %w", name, err)
		}
	}
	return nil
}

// below returns a name of the archive relative to base; empty for base itself.
func below(base, name string) string {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	if base == "" || name == base {
		return strings.TrimPrefix(name, base)
	}
	return strings.TrimPrefix(name, base+"/")
}

func (x *extraction) entry(tr *tar.Reader, h *tar.Header, name string) error {
	switch h.Typeflag {
	case tar.TypeDir:
		return realDirs(x.root, name, 0o700)
	case tar.TypeReg, tar.TypeLink, tar.TypeSymlink:
	default: // devices, sockets and pipes have no meaning outside of the guest
		x.got.LeftOut++
		return nil
	}
	if h.Typeflag == tar.TypeSymlink && !x.options.OutsideLinks && leadsOutside(name, h.Linkname) {
		x.got.LeftOut++
		return nil
	}
	if err := realDirs(x.root, path.Dir(name), 0o755); err != nil {
		return err
	}
	target := below(x.base, h.Linkname)
	if h.Typeflag == tar.TypeLink {
		// Only a regular file in this tree may get another name: an existing link may have been planted by an earlier
		// copy.
		if target == name || !x.realFile(target) {
			x.got.LeftOut++
			return nil
		}
	}
	if h.Typeflag == tar.TypeReg {
		return x.file(tr, h, name)
	}
	if err := x.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if h.Typeflag == tar.TypeSymlink {
		return x.root.Symlink(h.Linkname, name)
	}
	return x.root.Link(target, name)
}

// file writes a regular file under a temporary name first, so that an end in the middle leaves what was there. When it is complete, it is
// moved to its place, or copied into the file that exists there.
func (x *extraction) file(tr *tar.Reader, h *tar.Header, name string) error {
	if was, err := x.root.Lstat(name); err == nil && was.IsDir() {
		if err := x.root.Remove(name); err != nil {
			return err
		}
	}
	temporary := path.Join(path.Dir(name), ".coppice-"+rand.Text())
	f, err := x.root.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, h.FileInfo().Mode().Perm())
	if err != nil {
		return err
	}
	n, err := copyBound(f, tr, x.options.MaxBytes-x.got.Bytes)
	x.got.Bytes += n
	if err = errors.Join(err, f.Close()); err == nil {
		err = moveInto(x.root, temporary, name)
	}
	if err != nil {
		return errors.Join(err, x.root.Remove(temporary))
	}
	return x.root.Chtimes(name, h.ModTime, h.ModTime)
}

// realFile reports whether a name is a file and no element above it is a link.
func (x *extraction) realFile(name string) bool {
	if info, err := x.root.Lstat(name); err != nil || !info.Mode().IsRegular() {
		return false
	}
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if info, err := x.root.Lstat(dir); err != nil || !info.IsDir() {
			return false
		}
	}
	return true
}

// leadsOutside reports whether a symbolic link may lead out of its tree. The link's own directory is real, so leading
// ".." elements are reliable. Any later ".." may follow another link, so the link counts as leading outside.
func leadsOutside(name, target string) bool {
	if path.IsAbs(target) || filepath.IsAbs(target) || strings.ContainsRune(target, '\\') {
		return true
	}
	up, down := 0, false
	for element := range strings.SplitSeq(target, "/") {
		switch {
		case element == "" || element == ".":
		case element != "..":
			down = true
		case down:
			return true
		default:
			up++
		}
	}
	return up > strings.Count(name, "/")
}
