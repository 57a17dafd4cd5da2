package httpapi

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/controller/httpapi/strictjson"
	"github.com/coppice-dev/coppice/core"
)

// fileTime is how long nothing may come of a checkpoint's file, or be taken of it. Others wait for the place.
const fileTime = 30 * time.Second

func (s *server) exportCheckpoint(c echo.Context) error {
	ctx := c.Request().Context()
	file, err := s.control.ExportCheckpoint(ctx, projectOf(ctx), core.CheckpointID(c.Param("checkpoint_id")))
	if err != nil {
		return err
	}
	defer file.Close()
	h := c.Response().Header()
	h.Set(headerContent, contentRaw)
	h.Set("Content-Length", strconv.FormatInt(file.Size, 10))
	h.Set("Content-Disposition", fmt.Sprintf(`attachment; filename="%s.ckpt"`, file.Checkpoint.ID))
	c.Response().WriteHeader(http.StatusOK)
	connection := http.NewResponseController(c.Response())
	defer func() { _ = connection.SetWriteDeadline(time.Time{}) }()
	return file.Write(ctx, paced(func(b []byte) (int, error) {
		_ = connection.SetWriteDeadline(time.Now().Add(fileTime)) // not every test's writer has a connection
		return c.Response().Write(b)
	}))
}

// paced writes in parts that the slowest client takes in time.
type paced func(b []byte) (int, error)

func (p paced) Write(b []byte) (int, error) {
	const part = 256 << 10
	done := 0
	for len(b) > 0 {
		n, err := p(b[:min(part, len(b))])
		done += n
		if err != nil {
			return done, err
		}
		b = b[n:]
	}
	return done, nil
}

func (s *server) importCheckpoint(c echo.Context) error {
	req := c.Request()
	if err := contentIs(c, contentRaw); err != nil {
		return err
	}
	connection := http.NewResponseController(c.Response())
	body := awaited(func(b []byte) (int, error) {
		_ = connection.SetReadDeadline(time.Now().Add(fileTime)) // not every test's writer has a connection
		return req.Body.Read(b)
	})
	cp, err := s.control.ImportCheckpoint(req.Context(), projectOf(req.Context()), c.QueryParam("name"), body)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return strictjson.Malformed("it did not come in time")
	}
	if err != nil {
		return err
	}
	_ = connection.SetReadDeadline(time.Time{})
	return writeJSON(c.Response(), http.StatusCreated, checkpointOf(cp))
}

// awaited is a reader that gives up a body which does not come.
type awaited func(b []byte) (int, error)

func (a awaited) Read(b []byte) (int, error) { return a(b) }

var _ io.Reader = awaited(nil)
