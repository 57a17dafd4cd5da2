package httpapi

import (
	"errors"
	"io"
	"log"
	"mime"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/relay"
)

// maxFile bounds an upload.
const maxFile = 10 << 30

// registerStreams adds the operations of the contract that carry raw bytes or a WebSocket.
func (s *server) registerStreams(e *echo.Echo) {
	e.GET("/v1/workspaces/:workspace_id/console", s.getConsole)
	e.GET("/v1/sessions/:session_id/output", s.getOutput)
	e.POST("/v1/sessions/:session_id/stdin", s.writeStdin)
	e.GET("/v1/attach/:session_id", s.attach)
	e.GET("/v1/workspaces/:workspace_id/files", s.files)
	e.HEAD("/v1/workspaces/:workspace_id/files", s.files)
	e.PUT("/v1/workspaces/:workspace_id/files", s.putFile)
	e.DELETE("/v1/workspaces/:workspace_id/files", s.files)
	e.GET("/v1/workspaces/:workspace_id/watches/:watch_id/events", s.watchEvents)
	e.GET("/v1/checkpoints/:checkpoint_id/files", s.checkpointFile)
	e.GET("/v1/checkpoints/:checkpoint_id/export", s.exportCheckpoint)
	e.POST("/v1/checkpoints", s.importCheckpoint)
	e.PUT("/v1/uploads/:upload_id", s.PutUpload)
	e.GET("/v1/operations/:operation_id/log", s.GetLog)
	e.GET("/v1/events", s.events)
	e.GET("/openapi.yaml", func(c echo.Context) error { return c.Blob(http.StatusOK, "application/yaml", api.Specification()) })
}

func (s *server) getConsole(c echo.Context) error {
	ctx := c.Request().Context()
	body, err := s.control.Console(ctx, projectOf(ctx), core.WorkspaceID(c.Param("workspace_id")))
	if err != nil {
		return err
	}
	defer body.Close()
	c.Response().Header().Set(headerContent, "text/plain; charset=utf-8")
	c.Response().WriteHeader(http.StatusOK)
	_, err = io.Copy(c.Response(), body)
	return err
}

func (s *server) getOutput(c echo.Context) error {
	ctx := c.Request().Context()
	guest, id, err := s.control.SessionGuest(ctx, projectOf(ctx), core.SessionID(c.Param("session_id")))
	if err != nil {
		return err
	}
	return s.forward(c, guest, "/v1/sessions/"+string(id)+"/output", guestQuery(c, "stream", "offset", "follow", "from"))
}

func (s *server) writeStdin(c echo.Context) error {
	ctx := c.Request().Context()
	if err := contentIs(c, contentRaw); err != nil {
		return err
	}
	guest, id, err := s.control.SessionGuest(ctx, projectOf(ctx), core.SessionID(c.Param("session_id")))
	if err != nil {
		return err
	}
	return s.forward(c, guest, "/v1/sessions/"+string(id)+"/stdin", guestQuery(c, "close"))
}

// attach needs no key: its token is the credential.
func (s *server) attach(c echo.Context) error {
	if !strings.EqualFold(c.Request().Header.Get("Upgrade"), "websocket") {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "Upgrade: this route speaks WebSocket only")
	}
	id := core.SessionID(c.Param("session_id"))
	guest, guestID, key, err := s.control.UseAttachToken(c.Request().Context(), id, c.QueryParam("token"))
	if err != nil {
		return err
	}
	ctx, release := s.control.Tenancy.WithKey(c.Request().Context(), key)
	defer release()
	c.SetRequest(c.Request().WithContext(ctx))
	return s.forward(c, guest, "/v1/sessions/"+string(guestID)+"/attach", guestQuery(c, "stdout_offset", "stderr_offset", "from"))
}

func (s *server) files(c echo.Context) error {
	ctx := c.Request().Context()
	chosen := 0
	for _, flag := range []string{"list", "tar", "stat"} {
		if isTrue(c.QueryParam(flag)) {
			chosen++
		}
	}
	if chosen > 1 {
		return invalid("list", "only one of list, tar and stat can be asked for")
	}
	path, err := filesPath(c)
	if err != nil {
		return err
	}
	guest, err := s.control.Guest(ctx, projectOf(ctx), core.WorkspaceID(c.Param("workspace_id")))
	if err != nil {
		return err
	}
	return s.forward(c, guest, path, guestQuery(c, "path", "user", "list", "tar", "stat", "max_bytes", "recursive", "depth", "follow", "xattrs"))
}

func (s *server) putFile(c echo.Context) error {
	req := c.Request()
	if err := contentIs(c, contentRaw, contentTar); err != nil {
		return err
	}
	if req.ContentLength > s.upload {
		return tooLarge(s.upload)
	}
	path, err := filesPath(c)
	if err != nil {
		return err
	}
	guest, err := s.control.Guest(req.Context(), projectOf(req.Context()), core.WorkspaceID(c.Param("workspace_id")))
	if err != nil {
		return err
	}
	req.Body = http.MaxBytesReader(c.Response(), req.Body, s.upload)
	return s.forward(c, guest, path, guestQuery(c, "path", "user", "mode", "uid", "gid", "mkdirs", "untar", "in_place", "offset", "append"))
}

// contentIs refuses a body of another kind than those of the contract. One that does not say is taken as raw bytes.
func contentIs(c echo.Context, kinds ...string) error {
	header := c.Request().Header.Get(headerContent)
	if header == "" {
		return nil
	}
	media, _, err := mime.ParseMediaType(header)
	for _, k := range kinds {
		if err == nil && media == k {
			return nil
		}
	}
	return core.Errorf(core.Invalid, core.CodeUnsupportedMedia, "the body must be %s; say so in Content-Type", strings.Join(kinds, " or "))
}

func isTrue(v string) bool { return v == "true" || v == "1" }

// guestQuery takes the named parameters over, in the agent's form.
func guestQuery(c echo.Context, names ...string) url.Values {
	return runnerapi.GuestQuery(c.QueryParam, names...)
}

// answers are the headers that a guest may set. Its content type is one of four: no answer of a guest is a page.
var answers = relay.Allowed{
	Headers: map[string]bool{
		"Content-Length": true, "Trailer": true, "Connection": true, "Upgrade": true, "Sec-Websocket-Accept": true, "Sec-Websocket-Protocol": true,
		"Coppice-Offset": true, "Coppice-End-Offset": true, "Coppice-Truncated": true, "Coppice-Eof": true, "Coppice-File": true, "Coppice-Status": true, "Coppice-Left-Out": true,
	},
	Types: map[string]bool{contentJSON: true, contentRaw: true, contentTar: true, contentLines: true},
	Type:  contentRaw,
}

// forward passes a request on to a guest's agent and its answer back, as they come.
func (s *server) forward(c echo.Context, guest http.RoundTripper, path string, query url.Values) error {
	var failed error
	proxy := &httputil.ReverseProxy{
		Transport:     relay.Final(guest),
		FlushInterval: -1, // a follower sees output when it is written
		ErrorLog:      log.New(io.Discard, "", 0),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL = &url.URL{Scheme: "http", Host: "guest", Path: path, RawQuery: query.Encode()}
			r.Out.Header.Del("Authorization")
		},
		ModifyResponse: func(res *http.Response) error {
			if res.StatusCode >= http.StatusMultipleChoices {
				return headProblem(res)
			}
			return answers.Reduce(res)
		},
		ErrorHandler: func(_ http.ResponseWriter, _ *http.Request, err error) { failed = err },
	}
	proxy.ServeHTTP(c.Response(), c.Request())
	if large, ok := errors.AsType[*http.MaxBytesError](failed); ok {
		return tooLarge(large.Limit)
	}
	return failed
}

// headProblem reads the reason out of an answer; one to a HEAD request has none.
func headProblem(res *http.Response) error {
	if res.Request != nil && res.Request.Method == http.MethodHead {
		category, code := core.Unavailable, core.CodeGuestProtocol
		switch res.StatusCode {
		case http.StatusNotFound:
			category, code = core.NotFound, core.CodeFileNotFound
		case http.StatusBadRequest, http.StatusConflict, http.StatusForbidden:
			category, code = core.FailedPrecondition, core.CodeFileNotFound
		}
		return core.Errorf(category, code, "the guest's agent answered with status %s", strconv.Itoa(res.StatusCode))
	}
	return controller.GuestProblem(res)
}
