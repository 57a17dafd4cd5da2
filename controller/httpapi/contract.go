package httpapi

import (
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/httpapi/strictjson"
	"github.com/coppice-dev/coppice/core"
)

// contract is openapi.yaml, arranged for checking requests: operations by method and echo path.
type contract map[string]*operation

type operation struct {
	id      string
	secured bool
	access  access
	listed  bool // in the table of access
	stream  bool // the handler reads the body itself
	keyed   bool // it takes an idempotency key
	params  []*openapi3.Parameter
	body    *openapi3.Schema // of application/json
}

var pathParam = regexp.MustCompile(`\{([a-z_]+)\}`)

// loadContract reads the specification that is compiled in, once; its faults are programmer errors. Nobody changes the contract.
var loadContract = sync.OnceValue(func() contract {
	loader := openapi3.NewLoader()
	doc, err := loader.LoadFromData(api.Requests())
	if err != nil {
		panic(fmt.Sprintf("api/requests.gen.json: %v", err))
	}
	c := contract{}
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			o := &operation{id: op.OperationID, secured: op.Security == nil || len(*op.Security) > 0, stream: slices.Contains(op.Tags, "stream")}
			o.access, o.listed = routes[op.OperationID]
			for _, p := range slices.Concat(item.Parameters, op.Parameters) {
				o.params = append(o.params, p.Value)
				o.keyed = o.keyed || p.Value.In == openapi3.ParameterInHeader && p.Value.Name == headerKey
			}
			if op.RequestBody != nil {
				if media := op.RequestBody.Value.Content.Get(contentJSON); media != nil && !o.stream {
					o.body = media.Schema.Value
					flatten(o.body)
				}
			}
			c[method+" "+pathParam.ReplaceAllString(path, ":$1")] = o
		}
	}
	return c
})

// flatten replaces references that only add a description (allOf of one): the validator names their fields twice.
func flatten(schema *openapi3.Schema) {
	for _, p := range schema.Properties {
		if v := p.Value; len(v.AllOf) == 1 && v.Type == nil && len(v.Properties) == 0 {
			p.Value = v.AllOf[0].Value
		}
		flatten(p.Value)
	}
}

const (
	maxBody     = 1 << 20 // of JSON
	contentJSON = "application/json"
	contentRaw  = "application/octet-stream"
	contentTar  = "application/x-tar"
	keyBody     = "coppice.body"
	keyOp       = "coppice.operation"
)

// of returns the operation that a request was routed to; nil for unknown routes.
func (k contract) of(c echo.Context) *operation { return k[c.Request().Method+" "+c.Path()] }

// check is the middleware that lets only requests of the contract through. A JSON body must be there within bodyTime.
func (k contract) check(bodyTime time.Duration) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc { return k.checked(bodyTime, next) }
}

func (k contract) checked(bodyTime time.Duration, next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		op := k.of(c)
		if op == nil {
			return next(c)
		}
		if err := op.checkParams(c); err != nil {
			return err
		}
		if !op.stream {
			if err := op.readBody(c, bodyTime); err != nil {
				return err
			}
		}
		return next(c)
	}
}

func (op *operation) checkParams(c echo.Context) error {
	query, err := url.ParseQuery(c.Request().URL.RawQuery)
	if err != nil {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the query string cannot be read")
	}
	known := map[string]bool{}
	for _, p := range op.params {
		var values []string
		switch p.In {
		case openapi3.ParameterInPath:
			values = []string{c.Param(p.Name)}
		case openapi3.ParameterInHeader:
			values = c.Request().Header.Values(p.Name)
		default:
			known[p.Name] = true
			values = query[p.Name]
		}
		if err := checkParam(p, values); err != nil {
			return err
		}
	}
	for name := range query {
		if !known[name] {
			return invalid(core.Clip(name), "this route has no such query parameter")
		}
	}
	if !op.keyed && len(c.Request().Header.Values(headerKey)) > 0 {
		return invalid(headerKey, "this route takes none: it makes nothing that a repeat could make twice")
	}
	return nil
}

func checkParam(p *openapi3.Parameter, values []string) error {
	schema := p.Schema.Value
	if len(values) == 0 {
		if p.Required {
			return invalid(p.Name, "the parameter is missing")
		}
		return nil
	}
	if err := strictjson.NoNUL(p.Name, strings.Join(values, ""), invalid); err != nil {
		return err
	}
	if schema.Type.Is("array") {
		list := make([]any, len(values))
		for i, v := range values {
			list[i] = v
		}
		return schemaProblem(p.Name, schema.VisitJSON(list, openapi3.MultiErrors()))
	}
	if len(values) > 1 {
		return invalid(p.Name, "it may be given once")
	}
	var value any = values[0]
	var err error
	switch {
	case schema.Type.Is("integer"):
		var n int64
		n, err = strconv.ParseInt(values[0], 10, 64)
		value = float64(n)
	case schema.Type.Is("boolean"):
		if values[0] != "true" && values[0] != "false" && values[0] != "1" && values[0] != "0" {
			err = strconv.ErrSyntax
		}
		value = values[0] == "true" || values[0] == "1"
	}
	if err != nil {
		return invalid(p.Name, "it must be a "+schema.Type.Slice()[0])
	}
	return schemaProblem(p.Name, schema.VisitJSON(value, openapi3.MultiErrors()))
}

// readBody reads, parses and checks a JSON body and keeps it for the binder.
func (op *operation) readBody(c echo.Context, within time.Duration) error {
	req := c.Request()
	connection := http.NewResponseController(c.Response())
	_ = connection.SetReadDeadline(time.Now().Add(within)) // not every test's writer has a connection
	limited := http.MaxBytesReader(c.Response(), req.Body, maxBody)
	if op.body != nil {
		if media, _, err := mime.ParseMediaType(req.Header.Get(headerContent)); err != nil || media != contentJSON {
			return core.Errorf(core.Invalid, core.CodeUnsupportedMedia, "the body must be %s; say so in Content-Type", contentJSON)
		}
	}
	body, err := io.ReadAll(limited)
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return tooLarge(maxBody)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return strictjson.Malformed("it did not come in time")
	case err != nil:
		return strictjson.Malformed("it ended too early")
	}
	// From here on the connection is only watched for the client's end. After a failure the deadline stays: the server would
	// wait for the rest of the body otherwise.
	_ = connection.SetReadDeadline(time.Time{})
	if op.body == nil {
		if s := strings.TrimSpace(string(body)); s != "" && s != "{}" {
			return strictjson.Malformed("this route takes none")
		}
		return nil
	}
	value, err := strictjson.Parse(body, invalid)
	if err != nil {
		return err
	}
	if err := schemaProblem("", op.body.VisitJSON(value, openapi3.MultiErrors())); err != nil {
		return err
	}
	c.Set(keyBody, body)
	return nil
}

var unknownForm = regexp.MustCompile(`^property (".*") is unsupported$`)

// schemaProblem turns what the validator found into a problem that names the fields.
func schemaProblem(prefix string, err error) error {
	if err == nil {
		return nil
	}
	list := openapi3.MultiError{err}
	if multi, ok := errors.AsType[openapi3.MultiError](err); ok {
		list = multi
	}
	out := &fieldsError{err: &core.Error{Category: core.Invalid}}
	for _, item := range list {
		var s *openapi3.SchemaError
		if !errors.As(item, &s) {
			s = &openapi3.SchemaError{Reason: "it has the wrong form"}
		}
		code, f := describe(prefix, s)
		out.fields = append(out.fields, f)
		if out.err.Code == "" || code == core.CodeUnknownField {
			out.err.Code, out.err.Msg = code, f.Field+": "+f.Detail
		}
	}
	slices.SortFunc(out.fields, func(a, b api.FieldProblem) int { return strings.Compare(a.Field, b.Field) })
	return out
}

// describe names the field of a schema error, its code and what is wrong, never its value: that may be a secret.
func describe(prefix string, s *openapi3.SchemaError) (core.Code, api.FieldProblem) {
	path := strings.Join(s.JSONPointer(), ".")
	// A field that adds a description to a named type is an allOf of one; the reason stands inside.
	for inner := (*openapi3.SchemaError)(nil); s.SchemaField == "allOf" && errors.As(s.Origin, &inner); s = inner {
		path = strings.Trim(path+"."+strings.Join(inner.JSONPointer(), "."), ".")
	}
	if prefix != "" {
		path = strings.TrimSuffix(prefix+"."+path, ".")
	}
	if m := unknownForm.FindStringSubmatch(s.Reason); m != nil {
		name, err := strconv.Unquote(m[1])
		if err != nil {
			name = m[1]
		}
		return core.CodeUnknownField, api.FieldProblem{Field: core.Clip(strictjson.Join(path, name)), Detail: "there is no such field"}
	}
	code := core.CodeInvalidField
	detail := s.Reason
	if s.SchemaField == "pattern" && s.Schema != nil {
		switch pattern := s.Schema.Pattern; {
		case strings.Contains(pattern, "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"):
			code, detail = core.CodeInvalidName, "it must be 1 to 63 lower-case letters, digits or hyphens and begin and end with a letter or digit"
		case strings.HasSuffix(pattern, "[0-9a-hjkmnp-tv-z]{26}$"):
			code, detail = core.CodeInvalidID, "it is not an id of the form "+strings.TrimPrefix(strings.SplitN(pattern, "[", 2)[0], "^")+"<26 characters>"
		case strings.HasPrefix(pattern, "^sha256:"):
			code, detail = core.CodeInvalidDigest, "it is not a digest of the form sha256:<64 hex digits>"
		default:
			detail = "it must match " + pattern
		}
	}
	if detail == "" {
		detail = "it has the wrong form (" + s.SchemaField + ")"
	}
	return code, api.FieldProblem{Field: core.Clip(strictjson.OrBody(path)), Detail: detail}
}
