package exit

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestExitStatus(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, OK},
		{errors.New("plain"), Failure},
		{fs.ErrNotExist, Failure},
		{fmt.Errorf("wrapped: %w", core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "no")), Exhausted},
		{core.Errorf(core.Internal, "NEW_CODE", "no"), Failure},
		{fmt.Errorf("call: %w", &coppice.Error{Code: coppice.CodeWorkspaceNotFound, Status: 404}), NotFound},
		{&coppice.Error{Code: "FROM_THE_FUTURE", Status: 409}, Conflict},
		{&coppice.Error{Code: "FROM_THE_FUTURE", Status: 503}, Unavailable},
		{&coppice.Error{Code: "FROM_THE_FUTURE"}, Failure},
		{&coppice.Error{Code: coppice.CodeInternal, Status: 500}, Internal},
		{StatusError(37), 37},
		{fmt.Errorf("remote: %w", StatusError(0)), 0},
		{Misuse(errors.New("bad flag")), Usage},
	} {
		if got := Status(c.err); got != c.want {
			t.Errorf("exitStatus(%v) = %d, want %d", c.err, got, c.want)
		}
	}
}

// TestEveryCodeHasAStatus reads the codes out of core, so that a new one is not forgotten.
func TestEveryCodeHasAStatus(t *testing.T) {
	t.Parallel()
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join("..", "..", "..", "core", "error.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{codeUsage: true}
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && len(v.Values) == 1 {
			typ, okType := v.Type.(*ast.Ident)
			lit, okLit := v.Values[0].(*ast.BasicLit)
			if okType && okLit && typ.Name == "Code" {
				code := strings.Trim(lit.Value, `"`)
				seen[code] = true
				if _, ok := ofCode[code]; !ok {
					t.Errorf("%s has no exit status", code)
				}
			}
		}
		return true
	})
	for code := range ofCode {
		if !seen[code] {
			t.Errorf("%s is in the table and not in core", code)
		}
	}
}
