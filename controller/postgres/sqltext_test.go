package postgres_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// root is the import path of the adapter's package, and transactions that of the package through which all statements go.
const (
	root         = "github.com/coppice-dev/coppice/controller/postgres"
	transactions = root + "/pgtx"
)

// statement is an SQL text that a call sends to the database.
type statement struct {
	at   token.Position
	sql  string
	args map[string]types.Type // by name; nil: not known here
	all  bool                  // args has no more than this statement needs
	row  types.Type            // of its result; nil: none is read
}

// function is a function of the adapter.
type function struct {
	decl *ast.FuncDecl
	info *types.Info
}

// call is a call of a function of the adapter, and caller is where it is.
type call struct {
	expr   *ast.CallExpr
	caller *function
}

// scope is a function with the arguments of one of its calls.
type scope struct {
	*function
	args map[types.Object]bound
}

// bound is an expression in the scope where it is evaluated.
type bound struct {
	expr ast.Expr
	in   *scope
}

// sources evaluates the expressions that make SQL.
type sources struct {
	fset      *token.FileSet
	functions map[string]*function
	callers   map[string][]call
	globals   map[types.Object]bound
}

// errCaller says that an expression has a parameter: its value depends on the caller.
var errCaller = errors.New("depends on the caller")

// load reads the packages of the adapter. They are checked from their sources, and what they import is read as it was compiled.
func load(t *testing.T) *sources {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-json=ImportPath,Dir,Export,GoFiles", "./...")
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath") // the settings of make build: nothing is compiled again
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	type listed struct {
		ImportPath, Dir, Export string
		GoFiles                 []string
	}
	exports, own := map[string]string{}, []listed{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
		if (p.ImportPath == root || strings.HasPrefix(p.ImportPath, root+"/")) && p.ImportPath != transactions {
			own = append(own, p)
		}
	}
	x := &sources{fset: token.NewFileSet(), functions: map[string]*function{}, callers: map[string][]call{}, globals: map[types.Object]bound{}}
	imp := importer.ForCompiler(x.fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	for _, p := range own {
		var files []*ast.File
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(x.fset, filepath.Join(p.Dir, name), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
		}
		info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}, Instances: map[*ast.Ident]types.Instance{}}
		if _, err := (&types.Config{Importer: imp}).Check(p.ImportPath, x.fset, files, info); err != nil {
			t.Fatal(err)
		}
		x.index(files, info)
	}
	return x
}

// index notes functions, calls and variables of a package.
func (x *sources) index(files []*ast.File, info *types.Info) {
	for _, f := range files {
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if v, ok := s.(*ast.ValueSpec); ok && len(v.Values) == len(v.Names) {
						for i, name := range v.Names {
							x.globals[info.Defs[name]] = bound{v.Values[i], &scope{function: &function{info: info}}}
						}
					}
				}
			case *ast.FuncDecl:
				fn := &function{decl: d, info: info}
				x.functions[info.Defs[d.Name].(*types.Func).FullName()] = fn
				ast.Inspect(d, func(n ast.Node) bool {
					if c, ok := n.(*ast.CallExpr); ok {
						if callee, _ := fn.callee(c); callee != "" {
							x.callers[callee] = append(x.callers[callee], call{c, fn})
						}
					}
					return true
				})
			}
		}
	}
}

// callee is the full name of the function that is called, and the row's type if the call has one.
func (f *function) callee(c *ast.CallExpr) (string, types.Type) {
	fun := ast.Unparen(c.Fun)
	if i, ok := fun.(*ast.IndexExpr); ok {
		fun = i.X
	}
	if s, ok := fun.(*ast.SelectorExpr); ok {
		fun = s.Sel
	}
	id, ok := fun.(*ast.Ident)
	if !ok {
		return "", nil
	}
	callee, ok := f.info.Uses[id].(*types.Func)
	if !ok {
		return "", nil
	}
	var row types.Type
	if inst, ok := f.info.Instances[id]; ok && inst.TypeArgs.Len() > 0 {
		row = inst.TypeArgs.At(0)
	}
	return callee.Origin().FullName(), row
}

// statements finds those of all calls.
func (x *sources) statements(t *testing.T) []statement {
	t.Helper()
	var list []statement
	for name, sqlAt := range map[string]int{
		transactions + ".Many": 2, transactions + ".AsSystem": 2, transactions + ".ByIndex": 2, transactions + ".InOrder": 2, transactions + ".One": 3,
		"(*" + transactions + ".Tx).Exec": 1, "(*" + transactions + ".Tx).Soon": 0,
	} {
		calls := x.callers[name]
		if len(calls) == 0 {
			t.Errorf("nothing calls %s any more", name)
		}
		for _, c := range calls {
			_, row := c.caller.callee(c.expr)
			found, err := x.ofCall(c, c.expr.Args[sqlAt], c.expr.Args[sqlAt+1], row)
			if err != nil {
				t.Errorf("%s: the statement cannot be read from the source: %v", x.fset.Position(c.expr.Pos()), err)
			}
			list = append(list, found...)
		}
	}
	return list
}

// ofCall returns the statements of a call, one for each text that it may have, over all callers of its function.
func (x *sources) ofCall(c call, sql, args ast.Expr, row types.Type) ([]statement, error) {
	if rows := c.caller.table(sql); rows != nil {
		var list []statement
		for _, r := range rows {
			found, err := x.ofCall(c, r.Elts[0], r.Elts[1], row)
			if err != nil {
				return nil, err
			}
			list = append(list, found...)
		}
		return list, nil
	}
	scopes := []*scope{{function: c.caller}}
	if _, err := x.eval(sql, scopes[0]); errors.Is(err, errCaller) {
		scopes = x.scopes(c.caller, 0)
	}
	var list []statement
	for _, in := range scopes {
		found, err := x.eval(sql, in)
		if err != nil {
			return nil, err
		}
		for _, text := range found {
			s := statement{at: x.fset.Position(origin(sql, in)), sql: text, row: row}
			s.args, s.all = x.named(args, in)
			list = append(list, s)
		}
	}
	return list, nil
}

// origin is where the text of a statement is written.
func origin(sql ast.Expr, in *scope) token.Pos {
	for {
		id, ok := sql.(*ast.Ident)
		if !ok {
			return sql.Pos()
		}
		b, ok := in.args[in.info.Uses[id]]
		if !ok {
			return sql.Pos()
		}
		sql, in = b.expr, b.in
	}
}

// scopes are those of all calls of a function.
func (x *sources) scopes(f *function, depth int) []*scope {
	if depth > 5 {
		return nil
	}
	var list []*scope
	for _, c := range x.callers[f.info.Defs[f.decl.Name].(*types.Func).FullName()] {
		outer := x.scopes(c.caller, depth+1)
		if len(outer) == 0 {
			outer = []*scope{{function: c.caller}}
		}
		for _, o := range outer {
			list = append(list, f.with(c.expr, o))
		}
	}
	return list
}

// with binds the parameters of a function.
func (f *function) with(c *ast.CallExpr, in *scope) *scope {
	out := &scope{function: f, args: map[types.Object]bound{}}
	i := 0
	for _, field := range f.decl.Type.Params.List {
		for _, name := range field.Names {
			if i < len(c.Args) {
				out.args[f.info.Defs[name]] = bound{c.Args[i], in}
			}
			i++
		}
	}
	return out
}

// table returns the rows of a literal if the expression is a field of a variable that ranges over it.
func (f *function) table(e ast.Expr) (rows []*ast.CompositeLit) {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok {
		return nil
	}
	id, ok := sel.X.(*ast.Ident)
	if !ok {
		return nil
	}
	for _, elt := range f.ranged(f.info.Uses[id]) {
		if row, ok := elt.(*ast.CompositeLit); ok {
			rows = append(rows, row)
		}
	}
	return rows
}

// ranged returns the elements of the literal over which a variable ranges.
func (f *function) ranged(v types.Object) (elts []ast.Expr) {
	if f.decl == nil {
		return nil
	}
	ast.Inspect(f.decl, func(n ast.Node) bool {
		if r, ok := n.(*ast.RangeStmt); ok {
			id, named := r.Value.(*ast.Ident)
			if lit, ok := r.X.(*ast.CompositeLit); ok && named && f.info.Defs[id] == v {
				elts = lit.Elts
			}
		}
		return true
	})
	return elts
}

// eval returns the texts that an expression may have.
func (x *sources) eval(e ast.Expr, in *scope) ([]string, error) {
	e = ast.Unparen(e)
	if v := in.info.Types[e].Value; v != nil && v.Kind() == constant.String {
		return []string{constant.StringVal(v)}, nil
	}
	switch e := e.(type) {
	case *ast.BinaryExpr:
		left, err := x.eval(e.X, in)
		if err != nil {
			return nil, err
		}
		right, err := x.eval(e.Y, in)
		return product(left, right), err
	case *ast.Ident:
		return x.variable(in.info.Uses[e], in)
	case *ast.CallExpr:
		return x.result(e, in)
	}
	return nil, fmt.Errorf("%s is neither constant nor one of the forms that this test knows", x.fset.Position(e.Pos()))
}

func product(left, right []string) []string {
	var list []string
	for _, l := range left {
		for _, r := range right {
			list = append(list, l+r)
		}
	}
	return list
}

// variable returns the texts that a parameter, a global or a local variable may have. What is added to it is always added.
func (x *sources) variable(v types.Object, in *scope) ([]string, error) {
	if b, ok := in.args[v]; ok {
		return x.eval(b.expr, b.in)
	}
	if g, ok := x.globals[v]; ok {
		return x.eval(g.expr, g.in)
	}
	if in.decl == nil {
		return nil, fmt.Errorf("%v has no value", v)
	}
	for _, field := range in.decl.Type.Params.List {
		for _, name := range field.Names {
			if in.info.Defs[name] == v {
				return nil, errCaller
			}
		}
	}
	var list []string
	var failed error
	for _, elt := range in.ranged(v) {
		found, err := x.eval(elt, in)
		list, failed = append(list, found...), errors.Join(failed, err)
	}
	in.assigned(v, func(tok token.Token, value ast.Expr) {
		found, err := x.eval(value, in)
		if failed = errors.Join(failed, err); tok == token.ADD_ASSIGN {
			list = product(list, found)
		} else {
			list = append(list, found...)
		}
	})
	if len(list) == 0 && failed == nil {
		failed = fmt.Errorf("%v is never assigned", v)
	}
	return list, failed
}

// assigned calls do for each value that is assigned to a variable or to an element of it.
func (f *function) assigned(v types.Object, do func(token.Token, ast.Expr)) {
	ast.Inspect(f.decl, func(n ast.Node) bool {
		a, ok := n.(*ast.AssignStmt)
		if !ok || len(a.Lhs) != len(a.Rhs) {
			return true
		}
		for i, l := range a.Lhs {
			if id, ok := l.(*ast.Ident); ok && (f.info.Defs[id] == v || f.info.Uses[id] == v) {
				do(a.Tok, a.Rhs[i])
			}
		}
		return true
	})
}

// result returns the texts that a call may have: of a function with one return, of Quoted, or of a filter.
func (x *sources) result(c *ast.CallExpr, in *scope) ([]string, error) {
	name, _ := in.callee(c)
	switch name {
	case transactions + ".Quoted":
		var list []string
		for _, a := range c.Args {
			one, err := x.eval(a, in)
			if err != nil {
				return nil, err
			}
			list = append(list, one...)
		}
		return []string{"'" + strings.Join(list, "', '") + "'"}, nil
	case "(*" + transactions + ".Filter).Where", "(*" + transactions + ".Filter).Tail":
		return x.filtered(c, in, strings.HasSuffix(name, "Tail"))
	}
	fn := x.functions[name]
	if fn == nil || len(fn.decl.Body.List) != 1 {
		return nil, fmt.Errorf("%s: %s is not known to make SQL", x.fset.Position(c.Pos()), name)
	}
	ret, ok := fn.decl.Body.List[0].(*ast.ReturnStmt)
	if !ok || len(ret.Results) != 1 {
		return nil, fmt.Errorf("%s is not one return", name)
	}
	return x.eval(ret.Results[0], fn.with(c, in))
}

// filtered returns the longest text of a filter: with every condition that is added before.
func (x *sources) filtered(c *ast.CallExpr, in *scope, tail bool) ([]string, error) {
	id, ok := c.Fun.(*ast.SelectorExpr).X.(*ast.Ident)
	if !ok {
		return nil, errors.New("a filter is not a variable")
	}
	q := in.info.Uses[id]
	var relation, order string
	var conditions []string
	text := func(e ast.Expr) string {
		list, err := x.eval(e, in)
		if err != nil || len(list) != 1 {
			return fmt.Sprintf("(no constant: %v)", err)
		}
		return list[0]
	}
	in.assigned(q, func(_ token.Token, value ast.Expr) {
		if made, ok := value.(*ast.CallExpr); ok { // NewFilter
			relation, order = text(made.Args[0]), " DESC"
			compare := "<"
			if ascends := in.info.Types[made.Args[2]].Value; ascends == nil || constant.BoolVal(ascends) {
				order, compare = "", ">"
			}
			conditions = append(conditions, relation+".id "+compare+" @after")
		} else if ref, ok := value.(*ast.UnaryExpr); ok { // &pgtx.Filter{Relation: …}
			relation, order = text(ref.X.(*ast.CompositeLit).Elts[0].(*ast.KeyValueExpr).Value), " DESC"
		}
	})
	ast.Inspect(in.decl, func(n ast.Node) bool {
		add, ok := n.(*ast.CallExpr)
		if !ok || add.Pos() >= c.Pos() {
			return true
		}
		sel, ok := add.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if of, ok := sel.X.(*ast.Ident); !ok || in.info.Uses[of] != q {
			return true
		}
		switch sel.Sel.Name {
		case "Add":
			conditions = append(conditions, text(add.Args[0]))
		case "Equal":
			conditions = append(conditions, relation+"."+text(add.Args[0])+" = @"+text(add.Args[0]))
		case "Suffix":
			conditions = append(conditions, "right("+relation+".id, 4) = @suffix")
		case "AnyOf":
			conditions = append(conditions, relation+"."+text(add.Args[0])+" = ANY(@any_"+text(add.Args[0])+"::text[])")
		case "Labels":
			conditions = append(conditions, relation+".labels @> @labels::jsonb", relation+".labels ?& @label_keys::text[]")
		}
		return true
	})
	if tail {
		return []string{" ORDER BY " + relation + ".id" + order + " LIMIT @limit"}, nil
	}
	return []string{" WHERE " + strings.Join(conditions, " AND ")}, nil
}

// named returns the types of arguments by their names, or nil if they are not written where they can be seen. all says that they are
// one literal.
func (x *sources) named(e ast.Expr, in *scope) (args map[string]types.Type, all bool) {
	args = map[string]types.Type{}
	switch e := ast.Unparen(e).(type) {
	case *ast.CompositeLit:
		for _, elt := range e.Elts {
			kv := elt.(*ast.KeyValueExpr)
			args[constant.StringVal(in.info.Types[kv.Key].Value)] = in.info.Types[kv.Value].Type
		}
		return args, true
	case *ast.Ident:
		v := in.info.Uses[e]
		if b, ok := in.args[v]; ok {
			return x.named(b.expr, b.in)
		}
		in.assigned(v, func(_ token.Token, value ast.Expr) {
			some, _ := x.named(value, in)
			maps.Copy(args, some)
		})
		ast.Inspect(in.decl, func(n ast.Node) bool {
			if a, ok := n.(*ast.AssignStmt); ok && len(a.Lhs) == len(a.Rhs) {
				for i, l := range a.Lhs {
					if at, ok := l.(*ast.IndexExpr); ok {
						if id, ok := at.X.(*ast.Ident); ok && in.info.Uses[id] == v {
							args[constant.StringVal(in.info.Types[at.Index].Value)] = in.info.Types[a.Rhs[i]].Type
						}
					}
				}
			}
			return true
		})
		return args, false
	}
	return nil, false // of a filter
}
