package httpapi

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi/imageapi"
	"github.com/coppice-dev/coppice/controller/httpapi/prepareapi"
	"github.com/coppice-dev/coppice/controller/httpapi/stepjson"
	"github.com/coppice-dev/coppice/controller/httpapi/strictjson"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/tracing"
	"github.com/coppice-dev/coppice/internal/version"
)

// server implements the strict interface and the streams beside it.
type server struct {
	imageapi.Routes
	prepareapi.Handlers

	control *controller.Controller
	flows   journal
	grants  grantKeeper
	log     *slog.Logger
	version string
	pace    pace
	rules   contract
	upload  int64 // bytes of one, at most
}

var _ api.StrictServerInterface = (*server)(nil)

// bodyTime is how long a client may take to send a JSON body. Streams may take as long as they like.
const bodyTime = 30 * time.Second

// New returns the handler of the public API. It starts nothing. Who serves it bounds the time for headers.
func New(control *controller.Controller, log *slog.Logger) http.Handler {
	return newHandler(control, log, bodyTime)
}

func newHandler(control *controller.Controller, log *slog.Logger, bodyTime time.Duration) http.Handler {
	return newServer(control, log).handler(bodyTime)
}

func newServer(control *controller.Controller, log *slog.Logger) *server {
	images := imageapi.Routes{Control: control, Project: projectOf, Wait: waitOf, Operation: operationOf, Labels: labelsIn, Env: envIn, Allow: allowIn, Resources: resourcesIn}
	return &server{Routes: images, Handlers: prepareapi.Handlers{Machines: control.Prepare, Project: projectOf}, control: control, flows: control.Flows(), grants: control.Grants(), log: log, version: version.String(), pace: defaultPace, upload: maxFile}
}

func (s *server) handler(bodyTime time.Duration) http.Handler {
	rules := loadContract()
	s.rules = rules
	e := echo.New()
	e.HideBanner, e.HidePort = true, true
	e.Binder = binder{}
	e.HTTPErrorHandler = fail(s.log)
	e.Use(s.observe, rules.authenticate(s.control, bodyTime), rules.audit(s.control), rules.check(bodyTime), rules.repeats, stepjson.TakesLines)
	api.RegisterHandlers(e, api.NewStrictHandler(s, []api.StrictMiddlewareFunc{boundCursors}))
	s.registerStreams(e)
	return e
}

// binder hands the strict server the body that the contract's middleware has checked.
type binder struct{}

// Bind decodes the checked body.
func (binder) Bind(into any, c echo.Context) error {
	body, ok := c.Get(keyBody).([]byte)
	if !ok {
		return fmt.Errorf("no checked body for %s", c.Path())
	}
	d := json.NewDecoder(strings.NewReader(string(body)))
	d.UseNumber() // annotations keep their numbers as they were written
	if err := d.Decode(into); err != nil {
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return invalid(strictjson.OrBody(wrong.Field), "it is out of range")
		}
		return strictjson.Malformed("it has the wrong form")
	}
	return nil
}

// routeOf is the contract's path; whatever else clients make up is one route.
func (s *server) routeOf(c echo.Context) string {
	if s.rules.of(c) == nil {
		return "none"
	}
	return c.Path()
}

const keyRequest = "coppice.request"

func requestIDOf(c echo.Context) string {
	id, _ := c.Get(keyRequest).(string)
	return id
}

func newRequestID() string {
	var b [10]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the program instead
	return "req_" + hex.EncodeToString(b[:])
}

// observe gives every request an id, turns a panic into a problem and writes one line to the access log. Query strings are
// not logged: a token may be in one.
func (s *server) observe(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		start, id := time.Now(), newRequestID()
		c.Set(keyRequest, id)
		c.Response().Header().Set(headerRequest, id)
		c.Response().Header().Set(headerNoSniff, "nosniff")
		traced, span := tracing.Serve(s.control.Traces(), c.Request(), c.Request().Method+" "+s.routeOf(c))
		defer span.End()
		c.SetRequest(c.Request().WithContext(controller.WithRequestID(traced, id)))
		defer func() {
			ctx := c.Request().Context()
			var again any
			if r := recover(); r != nil {
				if r == http.ErrAbortHandler { //nolint:errorlint,err113 // it is compared by identity, as net/http does
					again = r
				} else {
					s.log.ErrorContext(ctx, "request panicked", "request_id", id, "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
					func() {
						defer func() { again = recover() }()
						c.Error(core.Errorf(core.Internal, core.CodeInternal, "something went wrong inside Coppice; the log has the cause under this request id"))
					}()
				}
			}
			s.control.ObserveRequest(s.routeOf(c), c.Request().Method, c.Response().Status, time.Since(start))
			s.log.Log(ctx, accessLevel(c), "request", "request_id", id, "method", c.Request().Method, "path", c.Request().URL.Path, "status", c.Response().Status,
				"bytes", c.Response().Size, "duration_ms", core.Milliseconds(time.Since(start)), "project_id", projectOf(ctx))
			if again != nil {
				panic(again)
			}
		}()
		if err := next(c); err != nil {
			c.Error(err)
		}
		return nil
	}
}

// accessLevel keeps health checks that succeed out of the usual log: engines and balancers ask every few seconds.
func accessLevel(c echo.Context) slog.Level {
	if path := c.Request().URL.Path; c.Response().Status == http.StatusOK && (path == "/healthz" || path == "/readyz") {
		return slog.LevelDebug
	}
	return slog.LevelInfo
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	if w.Header().Get(headerContent) == "" {
		w.Header().Set(headerContent, contentJSON)
	}
	w.WriteHeader(status)
	_, err = w.Write(append(b, '\n'))
	return err
}
