package httpapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path"
	"strconv"
	"strings"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/httpapi/slow"
	"github.com/coppice-dev/coppice/core"
)

// checkpointFile serves GET /v1/checkpoints/{id}/files.
func (s *server) checkpointFile(c echo.Context) error {
	ctx := c.Request().Context()
	id, name := core.CheckpointID(c.Param("checkpoint_id")), c.QueryParam("path") // it is not cleaned: ".." after a symbolic link leads where the link does
	list, stat := isTrue(c.QueryParam("list")), isTrue(c.QueryParam("stat"))
	switch {
	case list && stat:
		return invalid("list", "only one of list and stat can be asked for")
	case list:
		part, err := s.control.Tree.File(ctx, projectOf(ctx), id, name, runnerapi.MaxFileEntries)
		if err != nil {
			return err
		}
		out := api.FileList{Path: path.Clean(name), Truncated: part.Truncated, Unreadable: part.Unreadable}
		out.Entries = convert(part.Entries, func(f runnerapi.File) api.FileInfo { return fileInfoOf(path.Join(name, string(f.Name)), f) })
		return writeJSON(c.Response(), http.StatusOK, out)
	case stat:
		part, err := s.control.Tree.File(ctx, projectOf(ctx), id, name, 0)
		if err != nil {
			return err
		}
		return writeJSON(c.Response(), http.StatusOK, fileInfoOf(name, part.File))
	}
	content, err := s.control.Tree.Open(ctx, projectOf(ctx), id, name)
	if err != nil {
		return err
	}
	info, err := json.Marshal(fileInfoOf(name, content.File))
	if err != nil {
		return err
	}
	h := c.Response().Header()
	h.Set(headerContent, contentRaw)
	h.Set("Content-Length", strconv.FormatInt(content.File.Size, 10))
	h.Set("Coppice-File", string(info))
	c.Response().WriteHeader(http.StatusOK)
	to, done := slow.Writer(c)
	defer done()
	return content.Write(ctx, to)
}

// fileInfoOf describes what is at a path of a checkpoint. Names are bytes of a guest's choice; what is not UTF-8 in them is replaced.
func fileInfoOf(name string, f runnerapi.File) api.FileInfo {
	name = strings.ToValidUTF8(path.Clean(name), "\uFFFD")
	return api.FileInfo{
		Path: name, Name: path.Base(name), Type: api.FileInfoType(f.Type), Size: f.Size, Mode: fmt.Sprintf("%04o", f.Mode),
		UID: int(f.UID), GID: int(f.GID), MTime: f.ModTime, Target: strings.ToValidUTF8(string(f.Target), "\uFFFD"),
	}
}
