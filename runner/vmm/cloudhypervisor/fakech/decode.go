package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
)

// decode reads JSON as serde does: with its words for what is wrong, and an error for a field that is missing where the tag need
// says that it must be there. What is not known is ignored.
func decode(b []byte, v any) error {
	w := &walker{dec: json.NewDecoder(bytes.NewReader(b)), all: b}
	w.dec.UseNumber()
	if err := w.walk(reflect.TypeOf(v)); err != nil {
		return err
	}
	if rest := bytes.TrimLeft(b[w.dec.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return w.at("trailing characters", len(b)-len(rest)+1)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return chain{err.Error()}
	}
	return nil
}

type walker struct {
	dec *json.Decoder
	all []byte
}

// at is an error at an offset.
func (w *walker) at(words string, offset int) error {
	before := w.all[:min(offset, len(w.all))]
	line := bytes.Count(before, []byte("\n")) + 1
	column := offset - (bytes.LastIndexByte(before, '\n') + 1)
	return chain{fmt.Sprintf("%s at line %d column %d", words, line, column)}
}

func (w *walker) here(format string, a ...any) error {
	return w.at(fmt.Sprintf(format, a...), int(w.dec.InputOffset()))
}

// syntax is why the decoder gave up.
func (w *walker) syntax(err error) error {
	var s *json.SyntaxError
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &s) && strings.HasPrefix(s.Error(), "unexpected end") {
		return w.at("EOF while parsing "+w.missing(), len(w.all))
	}
	if errors.As(err, &s) {
		if strings.Contains(s.Error(), "in literal") {
			return w.at("expected ident", int(s.Offset))
		}
		return w.at("expected value", int(s.Offset))
	}
	return chain{err.Error()}
}

// missing says what the text stops in.
func (w *walker) missing() string {
	var open []byte
	inString, last := false, byte(0)
	for i := 0; i < len(w.all); i++ {
		switch c := w.all[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
			last = c
		case inString || c == ' ' || c == '\n' || c == '\t' || c == '\r':
		case c == '{' || c == '[':
			open = append(open, c)
			last = c
		case (c == '}' || c == ']') && len(open) > 0:
			open = open[:len(open)-1]
			last = c
		default:
			last = c
		}
	}
	switch {
	case inString:
		return "a string"
	case len(open) == 0 || last == ':':
		return "a value"
	case open[len(open)-1] == '[':
		return "a list"
	}
	return "an object"
}

// variants is a type with few values.
type variants interface{ variants() []string }

// walk reads a value that is to become one of type t; nil for any.
func (w *walker) walk(t reflect.Type) error {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == reflect.TypeFor[json.RawMessage]() {
		t = nil
	}
	tok, err := w.dec.Token()
	if err != nil {
		return w.syntax(err)
	}
	switch tok := tok.(type) {
	case json.Delim:
		if tok == '{' {
			return w.object(t)
		}
		return w.list(t)
	case string:
		if t != nil && t.Kind() != reflect.String {
			return w.here("invalid type: string %q, expected %s", tok, rust(t))
		}
		if t == nil {
			return nil
		}
		if v, ok := reflect.TypeAssert[variants](reflect.Zero(t)); ok {
			var list []string
			for _, name := range v.variants() {
				if name == tok {
					return nil
				}
				list = append(list, "`"+name+"`")
			}
			return w.here("unknown variant `%s`, expected one of %s", tok, strings.Join(list, ", "))
		}
	case json.Number:
		return w.number(t, tok.String())
	case bool:
		if t != nil && t.Kind() != reflect.Bool {
			return w.here("invalid type: boolean `%v`, expected %s", tok, rust(t))
		}
	}
	return nil
}

func (w *walker) number(t reflect.Type, n string) error {
	if t == nil {
		return nil
	}
	kind := "integer"
	if strings.ContainsAny(n, ".eE") {
		kind = "floating point"
	}
	v := reflect.New(t)
	switch t.Kind() {
	case reflect.Int, reflect.Int64, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		if json.Unmarshal([]byte(n), v.Interface()) == nil {
			return nil
		}
		if kind == "integer" {
			return w.here("invalid value: integer `%s`, expected %s", n, rust(t))
		}
	default:
	}
	return w.here("invalid type: %s `%s`, expected %s", kind, n, rust(t))
}

// rust is what Rust calls a type.
func rust(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "u" + t.Kind().String()[4:]
	case reflect.Int, reflect.Int64:
		return "i32"
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "a boolean"
	case reflect.Slice:
		return "a sequence"
	default:
		return "a map"
	}
}

func (w *walker) list(t reflect.Type) error {
	var element reflect.Type
	if t != nil {
		if t.Kind() != reflect.Slice && t.Kind() != reflect.Array {
			return w.here("invalid type: sequence, expected %s", rust(t))
		}
		element = t.Elem()
	}
	for w.dec.More() {
		if err := w.walk(element); err != nil {
			return err
		}
	}
	_, err := w.dec.Token()
	if err != nil {
		return w.syntax(err)
	}
	return nil
}

func (w *walker) object(t reflect.Type) error {
	if t != nil && t.Kind() != reflect.Struct && t.Kind() != reflect.Map {
		return w.here("invalid type: map, expected %s", rust(t))
	}
	known := map[string]reflect.StructField{}
	var order []string
	if t != nil && t.Kind() == reflect.Struct {
		for _, f := range reflect.VisibleFields(t) {
			if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
				known[name] = f
				order = append(order, name)
			}
		}
	}
	seen := map[string]bool{}
	for w.dec.More() {
		tok, err := w.dec.Token()
		if err != nil {
			return w.syntax(err)
		}
		key, ok := tok.(string)
		if !ok {
			return w.here("key must be a string")
		}
		var of reflect.Type
		if f, ok := known[key]; ok {
			if seen[key] {
				return w.here("duplicate field `%s`", key)
			}
			of = f.Type
		} else if t != nil && t.Kind() == reflect.Map {
			of = t.Elem()
		}
		seen[key] = true
		if err := w.walk(of); err != nil {
			return err
		}
	}
	if _, err := w.dec.Token(); err != nil {
		return w.syntax(err)
	}
	for _, name := range order {
		if known[name].Tag.Get("need") != "" && !seen[name] {
			return w.here("missing field `%s`", name)
		}
	}
	return nil
}
