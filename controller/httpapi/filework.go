package httpapi

import (
	"context"
	"fmt"
	"strings"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

func fileOf(f controller.GuestFile) api.FileInfo {
	return api.FileInfo{
		Path: f.Path, Name: f.Name, Type: api.FileInfoType(f.Type), Size: f.Size, Mode: f.Mode, UID: f.UID, GID: f.GID, MTime: f.MTime, Target: f.Target,
		Owner: f.Owner, Group: f.Group, XAttrs: f.XAttrs, XAttrsTruncated: f.XAttrsTruncated,
	}
}

// needUser refuses the home of nobody.
func needUser(user string, paths map[string]string) error {
	for field, path := range paths {
		if user == "" && strings.HasPrefix(path, "~") {
			return invalid(field, "~ is the home of a user: name one in user")
		}
	}
	return nil
}

// fileParams are the parameters of files that early agents would ignore: requests with them have a path of their own there.
var fileParams = []string{"user", "in_place", "offset", "append", "depth", "follow", "xattrs"}

// filesPath is the agent's path for a request for files.
func filesPath(c echo.Context) (string, error) {
	if err := needUser(c.QueryParam("user"), map[string]string{"path": c.QueryParam("path")}); err != nil {
		return "", err
	}
	for _, name := range fileParams {
		if guestQuery(c, name).Has(name) {
			return "/v1/files/content", nil
		}
	}
	return "/v1/files", nil
}

// audited does a change in a guest that no row shows, and records it before and, if it fails, after. The middleware does so
// for requests whose paths are in their query.
func (s *server) audited(ctx context.Context, object string, what map[string]string, do func() error) error {
	record := controller.AuditRecord{ProjectID: projectOf(ctx), Object: object, Outcome: controller.AuditAccepted, Detail: detail(what)}
	if err := s.control.Tenancy.Audit(ctx, record); err != nil {
		return err
	}
	err := do()
	if err == nil {
		return nil
	}
	record.Outcome, record.Detail = controller.AuditFailed, detail(map[string]string{"code": string(core.CodeOf(err))})
	if auditErr := s.control.Tenancy.Audit(context.WithoutCancel(ctx), record); auditErr != nil {
		return fmt.Errorf("%w; and it was not recorded: %w", err, auditErr)
	}
	return err
}

// MakeDirectory serves POST /v1/workspaces/{id}/files/mkdir.
func (s *server) MakeDirectory(ctx context.Context, r api.MakeDirectoryRequestObject) (api.MakeDirectoryResponseObject, error) {
	b := r.Body
	if err := needUser(b.User, map[string]string{"path": b.Path}); err != nil {
		return nil, err
	}
	var out controller.MadeDirectory
	err := s.audited(ctx, r.WorkspaceID, map[string]string{"path": b.Path}, func() (err error) {
		req := controller.MakeDirectory{Path: b.Path, User: b.User, Mode: b.Mode, Parents: b.Parents}
		out, err = s.control.MakeDirectory(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return api.MakeDirectory200JSONResponse{File: fileOf(out.File), Created: out.Created}, nil
}

// RenameFile serves POST /v1/workspaces/{id}/files/rename.
func (s *server) RenameFile(ctx context.Context, r api.RenameFileRequestObject) (api.RenameFileResponseObject, error) {
	b := r.Body
	if err := needUser(b.User, map[string]string{"from": b.From, "to": b.To}); err != nil {
		return nil, err
	}
	var out controller.GuestFile
	err := s.audited(ctx, r.WorkspaceID, map[string]string{"path": b.From, "to": b.To}, func() (err error) {
		req := controller.RenameFile{From: b.From, To: b.To, User: b.User, Mkdirs: b.Mkdirs, NoReplace: b.NoReplace}
		out, err = s.control.RenameFile(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return api.RenameFile200JSONResponse(fileOf(out)), nil
}

// SetFileAttributes serves POST /v1/workspaces/{id}/files/xattrs.
func (s *server) SetFileAttributes(ctx context.Context, r api.SetFileAttributesRequestObject) (api.SetFileAttributesResponseObject, error) {
	b := r.Body
	if err := needUser(b.User, map[string]string{"path": b.Path}); err != nil {
		return nil, err
	}
	var out controller.GuestFile
	err := s.audited(ctx, r.WorkspaceID, map[string]string{"path": b.Path}, func() (err error) {
		req := controller.SetFileAttributes{Path: b.Path, User: b.User, Set: b.Set, Remove: b.Remove}
		out, err = s.control.SetFileAttributes(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return api.SetFileAttributes200JSONResponse(fileOf(out)), nil
}
