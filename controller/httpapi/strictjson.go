package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/core"
)

const (
	maxBody  = 1 << 20
	maxDepth = 32 // of nested objects and arrays
)

// parseStrict reads exactly one JSON value: valid UTF-8, no duplicate keys, no NUL in strings (which the database cannot
// store), bounded depth, nothing behind it. Numbers stay as they were written.
func parseStrict(body []byte) (any, error) {
	if !utf8.Valid(body) {
		return nil, malformed("it is not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	v, err := parseValue(d, "", 0)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, malformed("there is something behind the JSON value")
	}
	return v, nil
}

func malformed(why string) error {
	return core.Errorf(core.Invalid, core.CodeMalformedBody, "the body cannot be read: %s", why)
}

func parseValue(d *json.Decoder, path string, depth int) (any, error) {
	token, err := d.Token()
	if err != nil {
		return nil, unreadable(err)
	}
	switch t := token.(type) {
	case json.Delim:
		if depth++; depth > maxDepth {
			return nil, malformed(fmt.Sprintf("it is nested deeper than %d levels", maxDepth))
		}
		if t == '[' {
			return parseArray(d, path, depth)
		}
		return parseObject(d, path, depth)
	case string:
		return t, noNUL(path, t)
	default:
		return token, nil
	}
}

func noNUL(path, s string) error {
	if strings.ContainsRune(s, 0) {
		return invalid(core.Clip(orBody(path)), "it holds a NUL character")
	}
	return nil
}

func orBody(path string) string {
	if path == "" {
		return "body"
	}
	return path
}

func parseArray(d *json.Decoder, path string, depth int) (any, error) {
	list := []any{}
	for d.More() {
		v, err := parseValue(d, join(path, fmt.Sprint(len(list))), depth)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, closing(d)
}

func parseObject(d *json.Decoder, path string, depth int) (any, error) {
	object := map[string]any{}
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return nil, unreadable(err)
		}
		key, _ := token.(string) // the decoder gives nothing else here
		here := join(path, key)
		if err := noNUL(here, key); err != nil {
			return nil, err
		}
		if _, twice := object[key]; twice {
			return nil, malformed(fmt.Sprintf("field %q is there twice", core.Clip(here)))
		}
		if object[key], err = parseValue(d, here, depth); err != nil {
			return nil, err
		}
	}
	return object, closing(d)
}

func closing(d *json.Decoder) error {
	_, err := d.Token()
	if err != nil {
		return unreadable(err)
	}
	return nil
}

func unreadable(err error) error {
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &syntax):
		return malformed(fmt.Sprintf("it is not JSON at byte %d", syntax.Offset))
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return malformed("it ends too early")
	}
	return malformed("it is not JSON")
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
