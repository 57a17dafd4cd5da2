package httpapi

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"reflect"
	"strconv"
	"strings"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
)

const defaultLimit = 100

// A cursor names the last item of a page, in a form that nobody should read: a version, and the item's key.
const cursorVersion = "1:"

func encodeCursor(key string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(cursorVersion + key))
}

func decodeCursor(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	key, ok := strings.CutPrefix(string(b), cursorVersion)
	if err != nil || !ok || key == "" || strings.Trim(key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:/.-") != "" {
		return "", badCursor()
	}
	return key, nil
}

func badCursor() error {
	return invalid("cursor", "it is not a next_cursor of this list with these filters")
}

// boundCursors gives every cursor that leaves a check of the list that it is of, and refuses one that comes back without it:
// a place in one list means nothing in another. It is no secret: what a list shows is decided by the key and the filters.
func boundCursors(next api.StrictHandlerFunc, operationID string) api.StrictHandlerFunc {
	return func(c echo.Context, request any) (any, error) {
		list := listOf(c, operationID)
		in := reflect.New(reflect.TypeOf(request)).Elem()
		in.Set(reflect.ValueOf(request))
		if params := in.FieldByName("Params"); params.IsValid() {
			if cursor := params.FieldByName("Cursor"); cursor.IsValid() && cursor.String() != "" {
				inner, err := unbindCursor(cursor.String(), list)
				if err != nil {
					return nil, err
				}
				cursor.SetString(inner)
			}
		}
		response, err := next(c, in.Interface())
		if err != nil || response == nil || reflect.TypeOf(response).Kind() != reflect.Struct {
			return response, err
		}
		out := reflect.New(reflect.TypeOf(response)).Elem()
		out.Set(reflect.ValueOf(response))
		if cursor := out.FieldByName("NextCursor"); cursor.IsValid() && cursor.String() != "" {
			cursor.SetString(bindCursor(cursor.String(), list))
		}
		return out.Interface(), nil
	}
}

// listOf names a list: the project, the route, its objects and its filters.
func listOf(c echo.Context, operationID string) string {
	query := c.Request().URL.Query()
	query.Del("cursor")
	query.Del("limit")
	return string(projectOf(c.Request().Context())) + " " + operationID + " " + c.Request().URL.EscapedPath() + "?" + query.Encode()
}

func bindCursor(inner, list string) string {
	sum := sha256.Sum256([]byte(list + "\x00" + inner))
	return inner + "." + base64.RawURLEncoding.EncodeToString(sum[:9])
}

func unbindCursor(cursor, list string) (string, error) {
	inner, _, _ := strings.Cut(cursor, ".")
	if subtle.ConstantTimeCompare([]byte(bindCursor(inner, list)), []byte(cursor)) != 1 {
		return "", badCursor()
	}
	return inner, nil
}

// page asks for one item more than the caller wants: whether it comes says whether there is another page.
func page(limit *api.Limit, cursor api.Cursor) (controller.Page, error) {
	after, err := decodeCursor(cursor)
	p := controller.Page{After: after, Limit: defaultLimit + 1}
	if limit != nil {
		p.Limit = *limit + 1
	}
	return p, err
}

// cut takes the extra item away again and names the last one that stays.
func cut[T any](list []T, p controller.Page, key func(T) string) ([]T, string) {
	if len(list) < p.Limit {
		return list, ""
	}
	list = list[:p.Limit-1]
	return list, encodeCursor(key(list[len(list)-1]))
}

func treeKey(n controller.TreeNode) string {
	return strconv.Itoa(n.Depth) + ":" + string(n.Checkpoint.ID)
}

func parseTreeKey(key string) (depth int, id string, err error) {
	if key == "" {
		return 0, "", nil
	}
	d, id, ok := strings.Cut(key, ":")
	depth, err = strconv.Atoi(d)
	if err != nil || !ok || depth < 0 {
		return 0, "", badCursor()
	}
	return depth, id, nil
}

// convert maps a list; the result is never null.
func convert[In, Out any](list []In, fn func(In) Out) []Out {
	out := make([]Out, len(list))
	for i, v := range list {
		out[i] = fn(v)
	}
	return out
}
