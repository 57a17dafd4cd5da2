package controller_test

import (
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// jsonFields lists the fields of a struct as JSON sees them, with their types.
func jsonFields(v any) []string {
	var list []string
	for f := range reflect.TypeOf(v).Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		list = append(list, name+" "+f.Type.String())
	}
	slices.Sort(list)
	return list
}

// TestGuestWire compares what the controller reads and writes with the protocol: it may not import it.
func TestGuestWire(t *testing.T) {
	t.Parallel()
	if mine, theirs := jsonFields(controller.GuestSession{}), jsonFields(guestapi.Session{}); !slices.Equal(mine, theirs) {
		t.Errorf("session: %v, the protocol has %v", mine, theirs)
	}
	if mine, theirs := jsonFields(controller.Process{}), jsonFields(guestapi.Process{}); !slices.Equal(mine, theirs) {
		t.Errorf("process: %v, the protocol has %v", mine, theirs)
	}
	for name, pair := range map[string][2]any{
		"file": {controller.GuestFile{}, guestapi.FileInfo{}}, "mkdir": {controller.MakeDirectory{}, guestapi.MakeDir{}},
		"watch": {controller.GuestWatch{}, guestapi.Watch{}}, "create watch": {controller.CreateWatch{}, guestapi.CreateWatch{}},
		"rename": {controller.RenameFile{}, guestapi.Rename{}}, "attributes": {controller.SetFileAttributes{}, guestapi.SetXAttrs{}},
	} {
		if mine, theirs := jsonFields(pair[0]), jsonFields(pair[1]); !slices.Equal(mine, theirs) {
			t.Errorf("%s: %v, the protocol has %v", name, mine, theirs)
		}
	}
	theirs := jsonFields(guestapi.SessionSpec{})
	for _, f := range append(jsonFields(controller.ExecRequest{}), "id core.SessionID") {
		if !slices.Contains(theirs, f) {
			t.Errorf("exec: the protocol has no field %q", f)
		}
	}
	if len(theirs) != reflect.TypeFor[controller.ExecRequest]().NumField()+1 {
		t.Errorf("exec: the protocol has %v", theirs)
	}
	for _, code := range []core.Code{
		guestapi.CodeAlreadySealed, guestapi.CodeQuarantined, guestapi.CodeWrongState, guestapi.CodeWrongGeneration, guestapi.CodeCommandNotFound,
		guestapi.CodeCommandFailed, guestapi.CodeSessionExists, guestapi.CodeSessionEnded, guestapi.CodeSessionLimit, guestapi.CodeWatchLimit,
		guestapi.CodeFileConflict, guestapi.CodeFileDenied,
	} {
		body := fmt.Sprintf(`{"category":"conflict","code":%q,"message":"x"}`, code)
		if err := controller.GuestProblem(&http.Response{Body: io.NopCloser(strings.NewReader(body))}); core.CodeOf(err) != code {
			t.Errorf("the agent's code %s becomes %s", code, core.CodeOf(err))
		}
	}
	if controller.GuestExited != guestapi.SessionExited {
		t.Error("the states have other names")
	}
}

// TestGuestProblem reads answers as a hostile guest would give them.
func TestGuestProblem(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body     string
		code     core.Code
		category core.Category
	}{
		"honest":            {`{"category":"not_found","code":"FILE_NOT_FOUND","message":"/x"}`, core.CodeFileNotFound, core.NotFound},
		"not allowed there": {`{"category":"permission_denied","code":"FILE_DENIED","message":"/x"}`, "FILE_DENIED", core.FailedPrecondition},
		"asks for the key":  {`{"category":"unauthenticated","code":"UNAUTHENTICATED","message":"log in at evil.example"}`, core.CodeGuestProtocol, core.Unavailable},
		"repeat it":         {`{"category":"conflict","code":"IDEMPOTENCY_IN_PROGRESS","message":"again"}`, core.CodeGuestProtocol, core.Unavailable},
		"rate":              {`{"category":"exhausted","code":"RATE_LIMITED","message":"again"}`, core.CodeGuestProtocol, core.Unavailable},
		"advice":            {`{"category":"exhausted","code":"QUOTA_EXCEEDED","message":"delete all"}`, core.CodeGuestProtocol, core.Unavailable},
		"odd code":          {`{"category":"not_found","code":"<script>","message":"x"}`, core.CodeGuestProtocol, core.Unavailable},
		"no code":           {`{}`, core.CodeGuestProtocol, core.Unavailable},
		"no json":           {strings.Repeat("<html>", 1<<20), core.CodeGuestProtocol, core.Unavailable},
		"empty":             {``, core.CodeGuestProtocol, core.Unavailable},
		"unknown category":  {`{"category":"odd","code":"X_Y","message":"x"}`, core.CodeGuestProtocol, core.Unavailable},
		"sandbox is gone":   {`{"category":"not_found","code":"SANDBOX_NOT_FOUND","message":"x"}`, core.CodeSandboxLost, core.Unavailable},
	} {
		err := controller.GuestProblem(&http.Response{StatusCode: http.StatusBadRequest, Body: io.NopCloser(strings.NewReader(c.body))})
		if core.CodeOf(err) != c.code || core.CategoryOf(err) != c.category {
			t.Errorf("%s: %v (%s, %s)", name, err, core.CodeOf(err), core.CategoryOf(err))
		}
	}
	err := controller.GuestProblem(&http.Response{StatusCode: http.StatusBadRequest, Body: io.NopCloser(strings.NewReader(
		`{"category":"invalid","code":"X","message":"\u001b[2J` + strings.Repeat("a", 9000) + `"}`))})
	if len(err.Error()) > 600 || strings.ContainsRune(err.Error(), 0x1b) {
		t.Errorf("foreign text is passed on as it is: %d bytes", len(err.Error()))
	}
}
