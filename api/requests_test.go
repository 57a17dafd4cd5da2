package api_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/coppice-dev/coppice/api"
)

var update = flag.Bool("update", false, "write requests.gen.json again")

// TestRequestsAreCurrent: requests.gen.json is what openapi.yaml says about requests. -update writes it.
func TestRequestsAreCurrent(t *testing.T) {
	t.Parallel()
	doc, err := json.Marshal(load(t))
	if err != nil {
		t.Fatal(err)
	}
	var whole map[string]any
	if err := json.Unmarshal(doc, &whole); err != nil {
		t.Fatal(err)
	}
	want, err := json.Marshal(requestsOf(whole))
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')
	if *update {
		if err := os.WriteFile("requests.gen.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(want, api.Requests()) {
		t.Error("api/requests.gen.json is not what api/openapi.yaml says: run make generate")
	}
}

// TestRequestsKeepEveryOperation: the short form has the parameters and bodies of all operations, with the same schemas.
func TestRequestsKeepEveryOperation(t *testing.T) {
	t.Parallel()
	short, err := openapi3.NewLoader().LoadFromData(api.Requests())
	if err != nil {
		t.Fatal(err)
	}
	whole := load(t)
	if len(short.Paths.Map()) != len(whole.Paths.Map()) {
		t.Fatalf("%d paths, want %d", len(short.Paths.Map()), len(whole.Paths.Map()))
	}
	for path, item := range whole.Paths.Map() {
		got := short.Paths.Value(path)
		same(t, path, got.Parameters, item.Parameters)
		if len(got.Operations()) != len(item.Operations()) {
			t.Errorf("%s: %d operations, want %d", path, len(got.Operations()), len(item.Operations()))
		}
		for method, op := range item.Operations() {
			has := got.GetOperation(method)
			same(t, op.OperationID, []any{has.OperationID, has.Tags, has.Security, has.Parameters, has.RequestBody}, []any{op.OperationID, op.Tags, op.Security, op.Parameters, op.RequestBody})
		}
	}
	for name, got := range short.Components.Schemas {
		same(t, name, got, whole.Components.Schemas[name])
	}
}

// same compares two values without the texts for readers.
func same(t *testing.T, what string, got, want any) {
	t.Helper()
	text := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		var plain any
		if err := json.Unmarshal(b, &plain); err != nil {
			t.Fatal(err)
		}
		b, err = json.Marshal(withoutTexts(plain))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if g, w := text(got), text(want); g != w {
		t.Errorf("%s: got %s\nwant %s", what, g, w)
	}
}

// requestsOf takes from a document all that says nothing about requests: answers, texts for readers, and the schemas of answers alone.
func requestsOf(doc map[string]any) map[string]any {
	paths := doc["paths"].(map[string]any) //nolint:forcetypeassert // the document is valid
	for _, item := range paths {
		for _, op := range item.(map[string]any) { //nolint:forcetypeassert // likewise
			if op, ok := op.(map[string]any); ok {
				delete(op, "responses")
			}
		}
	}
	components := doc["components"].(map[string]any) //nolint:forcetypeassert // likewise
	short := map[string]any{"openapi": doc["openapi"], "info": map[string]any{"title": "requests", "version": "1"}, "paths": withoutTexts(paths)}
	kept := map[string]any{}
	for found := referred(paths); len(found) > 0; {
		kind, name, _ := strings.Cut(found[0], "/")
		found = found[1:]
		of, _ := kept[kind].(map[string]any)
		if of == nil {
			of = map[string]any{}
			kept[kind] = of
		}
		if of[name] == nil {
			of[name] = withoutTexts(components[kind].(map[string]any)[name]) //nolint:forcetypeassert // likewise
			found = append(found, referred(of[name])...)
		}
	}
	short["components"] = kept
	return short
}

// referred lists the components that a value refers to.
func referred(v any) (names []string) {
	switch v := v.(type) {
	case map[string]any:
		if ref, ok := v["$ref"].(string); ok {
			names = append(names, strings.TrimPrefix(ref, "#/components/"))
		}
		for _, inner := range v {
			names = append(names, referred(inner)...)
		}
	case []any:
		for _, inner := range v {
			names = append(names, referred(inner)...)
		}
	}
	return names
}

// withoutTexts removes descriptions, summaries and examples. The names of properties are left alone.
func withoutTexts(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, inner := range v {
			properties, ok := inner.(map[string]any)
			switch {
			case key == "properties" && ok:
				for _, property := range properties {
					withoutTexts(property)
				}
			case key == "description" || key == "summary" || key == "example" || key == "examples":
				delete(v, key)
			default:
				withoutTexts(inner)
			}
		}
	case []any:
		for _, inner := range v {
			withoutTexts(inner)
		}
	}
	return v
}
