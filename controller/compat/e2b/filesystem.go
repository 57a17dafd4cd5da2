package e2b

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/coppice-dev/coppice/controller/compat/e2b/envd/filesystem"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// files serves filesystem.Filesystem.
type files struct {
	*watchers
}

var _ filesystem.FilesystemHandler = files{}

// The bounds of one list.
const (
	maxEntries = 20_000
	maxDepth   = 64
)

// place is a path of a visit, with what is needed to describe entries.
type place struct {
	visit
	user  account
	path  string
	links int // how many more links may be followed
}

const maxLinks = 1000

func (v visit) at(ctx context.Context, p string) (place, error) {
	out := place{visit: v, links: maxLinks}
	u, err := v.account(ctx)
	if err != nil {
		return out, rpcError(ctx, err)
	}
	if err := checkPath(p); err != nil {
		return out, err
	}
	out.user, out.path = u, u.resolve(p)
	return out, nil
}

func checkPath(p string) error {
	if len(p) > maxPath || strings.ContainsRune(p, 0) {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("the path is too long or has a NUL"))
	}
	return nil
}

// look describes a path without following a link. The agent in an old checkpoint knows no attributes.
func (p *place) look(ctx context.Context, name string) (coppice.FileInfo, error) {
	info, err := p.Stat(ctx, p.ws, name, coppice.StatOptions{XAttrs: true})
	if errors.Is(err, coppice.CodeUnsupported) {
		info, err = p.StatFile(ctx, p.ws, name)
	}
	if err != nil {
		return info, fileError(err, name)
	}
	info.Path, info.Name = name, path.Base(name)
	return info, nil
}

// led describes what is at a path, and for a link what it leads to. The agent in an old checkpoint describes the link.
func (v visit) led(ctx context.Context, name string) (coppice.FileInfo, error) {
	info, err := v.Stat(ctx, v.ws, name, coppice.StatOptions{Follow: true})
	if errors.Is(err, coppice.CodeUnsupported) {
		info, err = v.StatFile(ctx, v.ws, name)
	}
	return info, err
}

// entry describes the file, directory or link at a path.
func (p *place) entry(ctx context.Context, name string) (*filesystem.EntryInfo, error) {
	info, err := p.look(ctx, name)
	if err != nil {
		return nil, err
	}
	return p.describe(ctx, info), nil
}

// describe writes an entry in E2B's form. A link has the type and mode of its target.
func (p *place) describe(ctx context.Context, info coppice.FileInfo) *filesystem.EntryInfo {
	mode, err := strconv.ParseUint(info.Mode, 8, 32)
	if err != nil {
		mode = 0
	}
	e := &filesystem.EntryInfo{
		Name: info.Name, Path: info.Path, Size: info.Size, Mode: uint32(mode & 0o7777), Type: typeOf(info.Type), Permissions: permissions(info.Type, mode),
		Owner: nameOf(info.Owner, info.UID), Group: nameOf(info.Group, info.GID), ModifiedTime: timestamppb.New(info.MTime), Metadata: fileMetadata(info.XAttrs),
	}
	if info.Type != coppice.FileTypeSymlink {
		return e
	}
	target := info.Target
	if target != "" && target[0] != '/' {
		target = path.Join(path.Dir(info.Path), target)
	}
	e.SymlinkTarget, e.IsSymlink, e.Type = &target, true, filesystem.FileType_FILE_TYPE_UNSPECIFIED
	if p.links--; p.links < 0 {
		return e
	}
	if led, err := p.led(ctx, info.Path); err == nil {
		e.Type = typeOf(led.Type)
		if mode, err := strconv.ParseUint(led.Mode, 8, 32); err == nil {
			e.Mode = uint32(mode & 0o7777)
		}
	}
	return e
}

// nameOf is the name of a user or group: its number if the guest has none.
func nameOf(name string, id int) string {
	switch {
	case name != "":
		return name
	case id == 0:
		return rootUser
	}
	return strconv.Itoa(id)
}

func typeOf(t coppice.FileInfoType) filesystem.FileType {
	switch t {
	case coppice.FileTypeFile:
		return filesystem.FileType_FILE_TYPE_FILE
	case coppice.FileTypeDir:
		return filesystem.FileType_FILE_TYPE_DIRECTORY
	case coppice.FileTypeSymlink:
		return filesystem.FileType_FILE_TYPE_SYMLINK
	case coppice.FileTypeOther:
	}
	return filesystem.FileType_FILE_TYPE_UNSPECIFIED
}

func permissions(t coppice.FileInfoType, mode uint64) string {
	m := fs.FileMode(mode & 0o777)
	switch t {
	case coppice.FileTypeDir:
		m |= fs.ModeDir
	case coppice.FileTypeSymlink:
		m |= fs.ModeSymlink
	case coppice.FileTypeFile, coppice.FileTypeOther:
	}
	return m.String()
}

// Stat describes a path.
func (files) Stat(ctx context.Context, req *connect.Request[filesystem.StatRequest]) (*connect.Response[filesystem.StatResponse], error) {
	p, err := visitOf(ctx).at(ctx, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := p.entry(ctx, p.path)
	return connect.NewResponse(&filesystem.StatResponse{Entry: e}), rpcError(ctx, err)
}

// directory refuses a path that does not lead to a directory.
func (p *place) directory(ctx context.Context) error {
	info, err := p.led(ctx, p.path)
	if err != nil {
		return rpcError(ctx, fileError(err, p.path))
	}
	if info.Type != coppice.FileTypeDir {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path is not a directory: %s", p.path))
	}
	return nil
}

// ListDir lists a directory, and its subdirectories down to a depth.
func (files) ListDir(ctx context.Context, req *connect.Request[filesystem.ListDirRequest]) (*connect.Response[filesystem.ListDirResponse], error) {
	p, err := visitOf(ctx).at(ctx, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	depth := max(req.Msg.GetDepth(), 1)
	if depth > maxDepth {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("depth: %d is more than %d", depth, maxDepth))
	}
	if err := p.directory(ctx); err != nil {
		return nil, err
	}
	entries, err := p.list(ctx, p.path, int(depth), nil)
	if err != nil {
		return nil, rpcError(ctx, err)
	}
	return connect.NewResponse(&filesystem.ListDirResponse{Entries: entries}), nil
}

// list appends the entries of a directory in lexical order, and after each subdirectory its entries.
func (p *place) list(ctx context.Context, dir string, depth int, entries []*filesystem.EntryInfo) ([]*filesystem.EntryInfo, error) {
	l, err := p.ListTree(ctx, p.ws, dir, coppice.ListOptions{XAttrs: true})
	if errors.Is(err, coppice.CodeUnsupported) {
		l, err = p.ListFiles(ctx, p.ws, dir)
	}
	if err != nil {
		return nil, fileError(err, dir)
	}
	if l.Truncated || len(entries)+len(l.Entries) > maxEntries {
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%s has more entries than one answer can list", dir))
	}
	slices.SortFunc(l.Entries, func(a, b coppice.FileInfo) int { return strings.Compare(a.Name, b.Name) })
	for _, info := range l.Entries {
		info.Path = path.Join(dir, info.Name)
		entries = append(entries, p.describe(ctx, info))
		if info.Type == coppice.FileTypeDir && depth > 1 {
			if entries, err = p.list(ctx, info.Path, depth-1, entries); err != nil {
				return nil, err
			}
		}
	}
	return entries, nil
}

// MakeDir makes a directory and its parents.
func (files) MakeDir(ctx context.Context, req *connect.Request[filesystem.MakeDirRequest]) (*connect.Response[filesystem.MakeDirResponse], error) {
	p, err := visitOf(ctx).at(ctx, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	made, err := p.MakeDirectory(ctx, p.ws, coppice.MakeDirectoryRequest{Path: p.path, Parents: true, User: p.user.asUser()})
	switch {
	case errors.Is(err, coppice.Code("FILE_CONFLICT")):
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path already exists but it is not a directory: %s", p.path))
	case err != nil:
		return nil, rpcError(ctx, err)
	case !made.Created:
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", p.path))
	}
	e, err := p.entry(ctx, p.path)
	return connect.NewResponse(&filesystem.MakeDirResponse{Entry: e}), rpcError(ctx, err)
}

// Move renames a file or directory.
func (files) Move(ctx context.Context, req *connect.Request[filesystem.MoveRequest]) (*connect.Response[filesystem.MoveResponse], error) {
	p, err := visitOf(ctx).at(ctx, req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	if err := checkPath(req.Msg.GetDestination()); err != nil {
		return nil, err
	}
	to := p.user.resolve(req.Msg.GetDestination())
	if _, err := p.RenameFile(ctx, p.ws, coppice.RenameFileRequest{From: p.path, To: to, Mkdirs: true, User: p.user.asUser()}); err != nil {
		return nil, rpcError(ctx, fileError(err, p.path))
	}
	e, err := p.entry(ctx, to)
	return connect.NewResponse(&filesystem.MoveResponse{Entry: e}), rpcError(ctx, err)
}

// Remove removes a file, or a directory with everything in it. If there is nothing, this is no error.
func (files) Remove(ctx context.Context, req *connect.Request[filesystem.RemoveRequest]) (*connect.Response[filesystem.RemoveResponse], error) {
	p, err := visitOf(ctx).at(ctx, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	err = p.RemoveFileAs(ctx, p.ws, p.path, p.user.asUser(), true)
	if errors.Is(err, coppice.CodeFileNotFound) {
		err = nil
	}
	return connect.NewResponse(&filesystem.RemoveResponse{}), rpcError(ctx, err)
}
