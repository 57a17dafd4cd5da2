package httpapi

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/controller/httpapi/slow"
	"github.com/coppice-dev/coppice/controller/httpapi/strictjson"
	"github.com/coppice-dev/coppice/core"
)

func (s *server) exportCheckpoint(c echo.Context) error {
	ctx := c.Request().Context()
	file, err := s.control.ExportCheckpoint(ctx, projectOf(ctx), core.CheckpointID(c.Param("checkpoint_id")))
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // only read
	h := c.Response().Header()
	h.Set(headerContent, contentRaw)
	h.Set("Content-Length", strconv.FormatInt(file.Size, 10))
	h.Set("Content-Disposition", fmt.Sprintf(`attachment; filename="%s.ckpt"`, file.Checkpoint.ID))
	c.Response().WriteHeader(http.StatusOK)
	to, done := slow.Writer(c)
	defer done()
	return file.Write(ctx, to)
}

func (s *server) importCheckpoint(c echo.Context) error {
	req := c.Request()
	if err := contentIs(c, contentRaw); err != nil {
		return err
	}
	body, done := slow.Reader(c)
	cp, err := s.control.ImportCheckpoint(req.Context(), projectOf(req.Context()), c.QueryParam("name"), body)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return strictjson.Malformed("it did not come in time")
	}
	if err != nil {
		return err
	}
	done()
	return writeJSON(c.Response(), http.StatusCreated, checkpointOf(cp))
}
