// Package strictjson reads JSON of requests more strictly than package encoding/json does. It owns no
// route and no schema.
package strictjson

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

const maxDepth = 32 // of nested objects and arrays

// parser makes errors of fields by way of invalid.
type parser struct {
	*json.Decoder
	invalid func(field, detail string) error
}

// Parse reads exactly one JSON value: valid UTF-8, no duplicate keys, no NUL in strings (which the database cannot
// store), bounded depth, nothing behind it. Numbers stay as they were written. invalid makes the error of a field.
func Parse(body []byte, invalid func(field, detail string) error) (any, error) {
	if !utf8.Valid(body) {
		return nil, Malformed("it is not UTF-8")
	}
	d := parser{json.NewDecoder(bytes.NewReader(body)), invalid}
	d.UseNumber()
	v, err := parseValue(d, "", 0)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, Malformed("there is something behind the JSON value")
	}
	return v, nil
}

// Malformed is the error of a body that cannot be read.
func Malformed(why string) error {
	return core.Errorf(core.Invalid, core.CodeMalformedBody, "the body cannot be read: %s", why)
}

func parseValue(d parser, path string, depth int) (any, error) {
	token, err := d.Token()
	if err != nil {
		return nil, unreadable(err)
	}
	switch t := token.(type) {
	case json.Delim:
		if depth++; depth > maxDepth {
			return nil, Malformed(fmt.Sprintf("it is nested deeper than %d levels", maxDepth))
		}
		if t == '[' {
			return parseArray(d, path, depth)
		}
		return parseObject(d, path, depth)
	case string:
		return t, d.noNUL(path, t)
	default:
		return token, nil
	}
}

func (d parser) noNUL(path, s string) error { return NoNUL(path, s, d.invalid) }

// NoNUL refuses a text with a NUL character.
func NoNUL(path, s string, invalid func(field, detail string) error) error {
	if strings.ContainsRune(s, 0) {
		return invalid(core.Clip(OrBody(path)), "it holds a NUL character")
	}
	return nil
}

// OrBody is the name of a field, or of the whole.
func OrBody(path string) string {
	if path == "" {
		return "body"
	}
	return path
}

func parseArray(d parser, path string, depth int) (any, error) {
	list := []any{}
	for d.More() {
		v, err := parseValue(d, Join(path, fmt.Sprint(len(list))), depth)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, closing(d)
}

func parseObject(d parser, path string, depth int) (any, error) {
	object := map[string]any{}
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return nil, unreadable(err)
		}
		key, _ := token.(string) // the decoder gives nothing else here
		here := Join(path, key)
		if err := d.noNUL(here, key); err != nil {
			return nil, err
		}
		if _, twice := object[key]; twice {
			return nil, Malformed(fmt.Sprintf("field %q is there twice", core.Clip(here)))
		}
		if object[key], err = parseValue(d, here, depth); err != nil {
			return nil, err
		}
	}
	return object, closing(d)
}

func closing(d parser) error {
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
		return Malformed(fmt.Sprintf("it is not JSON at byte %d", syntax.Offset))
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return Malformed("it ends too early")
	}
	return Malformed("it is not JSON")
}

// Join is the path of a field.
func Join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
