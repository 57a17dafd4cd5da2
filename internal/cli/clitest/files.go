package clitest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
)

func file(path string) api.FileInfo {
	return api.FileInfo{Path: path, Name: "f\x1b", Type: api.FileTypeFile, Size: 3, Mode: "0644", UID: 1000, GID: 1000, MTime: Dawn, Owner: "ann\x1b", XAttrs: map[string]string{"user.a": "1"}}
}

// MakeDirectory notes what is asked for.
func (f *Server) MakeDirectory(_ context.Context, r api.MakeDirectoryRequestObject) (api.MakeDirectoryResponseObject, error) {
	f.note(*r.Body)
	return api.MakeDirectory200JSONResponse{File: file(r.Body.Path), Created: true}, nil
}

// RenameFile notes what is asked for.
func (f *Server) RenameFile(_ context.Context, r api.RenameFileRequestObject) (api.RenameFileResponseObject, error) {
	f.note(*r.Body)
	return api.RenameFile200JSONResponse(file(r.Body.To)), nil
}

// CreateWatch notes what is asked for.
func (f *Server) CreateWatch(_ context.Context, r api.CreateWatchRequestObject) (api.CreateWatchResponseObject, error) {
	f.note(*r.Body)
	return api.CreateWatch201JSONResponse{ID: ID("watch", 1), Path: r.Body.Path, CreatedAt: Dawn}, nil
}

// ListWatches has none: the watch has ended with its events.
func (f *Server) ListWatches(context.Context, api.ListWatchesRequestObject) (api.ListWatchesResponseObject, error) {
	return api.ListWatches200JSONResponse{Items: []api.Watch{}}, nil
}

// DeleteWatch notes what is asked for.
func (f *Server) DeleteWatch(_ context.Context, r api.DeleteWatchRequestObject) (api.DeleteWatchResponseObject, error) {
	f.note(r.WatchID)
	return api.DeleteWatch204Response{}, nil
}

// content serves a file, an archive of it, a list of it alone, or what it is. Nothing is at /g.
func content(c echo.Context) error {
	path := c.QueryParam("path")
	info := file(path)
	switch {
	case path == "/g":
		b, err := json.Marshal(refusal(404, "FILE_NOT_FOUND"))
		return errors.Join(err, c.Blob(404, "application/problem+json", b))
	case c.QueryParam("list") == "true":
		return c.JSON(200, api.FileList{Path: path, Entries: []api.FileInfo{info}})
	case c.QueryParam("stat") == "true":
		if path == "/d" {
			info.Type = api.FileTypeDir
		}
		return c.JSON(200, info)
	}
	text := "content of " + path
	if c.QueryParam("tar") == "true" {
		text = "archive of " + path
	}
	info.Size, info.Name, info.Owner = int64(len(text)), "f", ""
	b, err := json.Marshal(info)
	if err != nil {
		return err
	}
	c.Response().Header().Set("Coppice-File", string(b))
	return c.String(200, text)
}

func (f *Server) addFiles(e *echo.Echo) {
	e.GET("/v1/workspaces/:workspace_id/files", func(c echo.Context) error {
		f.note(c.QueryParam("user"))
		return content(c)
	})
	e.GET("/v1/checkpoints/:checkpoint_id/files", content)
	e.PUT("/v1/workspaces/:workspace_id/files", func(c echo.Context) error {
		_, err := io.Copy(io.Discard, c.Request().Body)
		return errors.Join(err, c.JSON(200, file(c.QueryParam("path"))))
	})
	e.GET("/v1/workspaces/:workspace_id/watches/:watch_id/events", func(c echo.Context) error {
		line := `{"seq":%d,"type":"%s","path":"/d/\u001bx","name":"x","dir":false}` + "\n"
		return c.String(200, fmt.Sprintf(line, 1, "create")+fmt.Sprintf(line, 2, "write"))
	})
}
