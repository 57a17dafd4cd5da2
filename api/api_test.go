package api_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/google/go-cmp/cmp"
	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
)

func load(t *testing.T) *openapi3.T {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(api.Specification())
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func TestSpecificationIsValid(t *testing.T) {
	t.Parallel()
	if err := load(t).Validate(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestEveryOperationNamesItsProblems(t *testing.T) {
	t.Parallel()
	for path, item := range load(t).Paths.Map() {
		for method, op := range item.Operations() {
			if op.OperationID == "" || op.Summary == "" {
				t.Errorf("%s %s: no operationId or no summary", method, path)
			}
			if op.Responses.Value("default") == nil {
				t.Errorf("%s %s: no default response", method, path)
			}
		}
	}
}

// The text messages of an attached WebSocket are passed on from the guest, whose agent may be newer.
var open = []string{"AttachMessage", "AttachEnd", "Annotations", "Env", "Labels", "LabelsPatch"}

func TestObjectsAreClosed(t *testing.T) {
	t.Parallel()
	for name, ref := range load(t).Components.Schemas {
		s := ref.Value
		if !s.Type.Is("object") || slices.Contains(open, name) {
			continue
		}
		if has := s.AdditionalProperties.Has; has == nil || *has {
			t.Errorf("schema %s lacks additionalProperties: false", name)
		}
	}
}

// server has the generated interface and none of its methods.
type server struct{ api.StrictServerInterface }

func TestGeneratedServerHasAllButTheStreams(t *testing.T) {
	t.Parallel()
	e := echo.New()
	api.RegisterHandlers(e, api.NewStrictHandler(server{}, nil))
	var got []string
	for _, r := range e.Routes() {
		got = append(got, r.Method+" "+r.Path)
	}
	var want []string
	for path, item := range load(t).Paths.Map() {
		for method, op := range item.Operations() {
			if !slices.Contains(op.Tags, "stream") {
				want = append(want, method+" "+strings.NewReplacer("{", ":", "}", "").Replace(path))
			}
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("routes (-specification +generated):\n%s\nrun: make generate", diff)
	}
}

func TestStatesAreThoseOfCore(t *testing.T) {
	t.Parallel()
	doc := load(t)
	check := func(schema string, want []string) {
		t.Helper()
		var got []string
		for _, v := range doc.Components.Schemas[schema].Value.Enum {
			got = append(got, v.(string))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-core +specification):\n%s", schema, diff)
		}
	}
	check("WorkspaceState", texts(core.WorkspaceStates()))
	check("CheckpointState", texts(core.CheckpointStates()))
	check("OperationState", texts(core.OperationStates()))
	check("EgressPolicy", []string{string(core.EgressDenyAll), string(core.EgressAllowAll)})
}

func texts[S ~string](states []S) []string {
	var out []string
	for _, s := range states {
		out = append(out, string(s))
	}
	return out
}

func TestIDPatternsTakeRealIDs(t *testing.T) {
	t.Parallel()
	doc := load(t)
	for schema, id := range map[string]string{
		"WorkspaceID":  string(core.NewID[core.WorkspaceID]()),
		"CheckpointID": string(core.NewID[core.CheckpointID]()),
		"OperationID":  string(core.NewID[core.OperationID]()),
		"SessionID":    string(core.NewID[core.SessionID]()),
		"PortID":       string(core.NewID[core.PortID]()),
		"RunnerID":     string(core.NewID[core.RunnerID]()),
		"Digest":       string(core.DigestOf(nil)),
	} {
		if err := doc.Components.Schemas[schema].Value.VisitJSON(id); err != nil {
			t.Errorf("%s: %v", schema, err)
		}
	}
}
