package mcp

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"

	"github.com/google/jsonschema-go/jsonschema"
)

// inputSchema is the schema of a tool's arguments. It comes from the fields of In and their tags:
//
//	jsonschema:"description"  range:"min,max" of a number  items:"min,max" of a list  length:"min,max" of a text
//	enum:"a|b"  default:"JSON"
//
// The SDK refuses arguments that do not fit, before a tool sees them.
func inputSchema[In any]() *jsonschema.Schema {
	t := reflect.TypeFor[In]()
	if known, ok := inputSchemas.Load(t); ok {
		return known.(*jsonschema.Schema) //nolint:forcetypeassert // nothing else is stored
	}
	s, err := jsonschema.For[In](nil)
	if err == nil {
		err = boundFields(s, t)
	}
	if err != nil {
		panic(fmt.Sprintf("schema of %s: %v", t, err)) // every test that makes a server would see it
	}
	known, _ := inputSchemas.LoadOrStore(t, s)
	return known.(*jsonschema.Schema) //nolint:forcetypeassert // nothing else is stored
}

// inputSchemas has the schemas by the type of the arguments. The SDK remembers what it derives from a schema by its
// address, so the servers of all keys have to share them.
var inputSchemas sync.Map

func boundFields(s *jsonschema.Schema, t reflect.Type) error {
	for f := range t.Fields() {
		if f.Anonymous {
			if err := boundFields(s, f.Type); err != nil {
				return err
			}
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		p := s.Properties[name]
		if p == nil {
			return fmt.Errorf("field %s has no property", f.Name)
		}
		if err := boundField(p, f); err != nil {
			return fmt.Errorf("field %s: %w", f.Name, err)
		}
		if f.Type.Kind() == reflect.Slice && f.Type.Elem().Kind() == reflect.Struct {
			if err := boundFields(p.Items, f.Type.Elem()); err != nil {
				return fmt.Errorf("field %s: %w", f.Name, err)
			}
		}
	}
	return nil
}

func boundField(p *jsonschema.Schema, f reflect.StructField) error {
	if len(p.Types) == 2 && p.Types[0] == "null" { // a slice or map: absent is enough, null would be a second way to say it
		p.Type, p.Types = p.Types[1], nil
	}
	if tag, ok := f.Tag.Lookup("range"); ok {
		low, high, err := pair(tag)
		if err != nil {
			return err
		}
		l, h := float64(low), float64(high)
		p.Minimum, p.Maximum = &l, &h
	}
	if tag, ok := f.Tag.Lookup("items"); ok {
		low, high, err := pair(tag)
		if err != nil {
			return err
		}
		p.MinItems, p.MaxItems = &low, &high
	}
	if tag, ok := f.Tag.Lookup("length"); ok {
		low, high, err := pair(tag)
		if err != nil {
			return err
		}
		p.MinLength, p.MaxLength = &low, &high
	}
	if tag, ok := f.Tag.Lookup("enum"); ok {
		for v := range strings.SplitSeq(tag, "|") {
			p.Enum = append(p.Enum, v)
		}
	}
	if tag, ok := f.Tag.Lookup("default"); ok {
		p.Default = json.RawMessage(tag)
	}
	return nil
}

func pair(tag string) (low, high int, err error) {
	a, b, _ := strings.Cut(tag, ",")
	if low, err = strconv.Atoi(a); err != nil {
		return 0, 0, err
	}
	high, err = strconv.Atoi(b)
	return low, high, err
}
