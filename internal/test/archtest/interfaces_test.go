package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// maxMethods is how many methods an interface may have, with those of the interfaces that it embeds.
const maxMethods = 20

// wide are the interfaces that have more methods than that. Each has a reason, and a bound at its present size: lower it when the interface
// shrinks, and do not raise it.
var wide = map[string]struct {
	methods int
	why     string
}{
	"controller.AllTx":      {245, "the methods of all packages of the controller together: only the adapter, its tests and the store's InTx name it"},
	"controller.Tx":         {77, "one transaction of a use case changes rows of many tables; it shrinks with each package that is taken out of controller"},
	"controller/fleet.Tx":   {33, "registration, heartbeats, placement and fences declare their parts; they are one package because a heartbeat needs all"},
	"controller/tenancy.Tx": {30, "projects, keys, quotas, the audit log and usage declare their parts"},
}

// TestInterfaceSize keeps interfaces small enough for a reader, and for a double in a test. A caller that needs a few methods declares an
// interface of its own with these.
func TestInterfaceSize(t *testing.T) {
	t.Parallel()
	all := interfaces(t)
	sizes := map[string]int{}
	for name := range all {
		sizes[name] = len(all.methods(name))
	}
	for _, name := range slices.Sorted(maps.Keys(sizes)) {
		bound, why := maxMethods, "declare what each caller needs beside the caller"
		if w, ok := wide[name]; ok {
			bound, why = w.methods, w.why
		}
		if sizes[name] > bound {
			t.Errorf("%s has %d methods, more than %d: %s", name, sizes[name], bound, why)
		}
	}
	for name, w := range wide {
		switch size := sizes[name]; {
		case w.why == "" || w.methods <= maxMethods:
			t.Errorf("%s: an exception needs a reason and a bound over %d", name, maxMethods)
		case size <= maxMethods:
			t.Errorf("%s has %d methods: it needs no exception any more", name, size)
		case size < w.methods*9/10:
			t.Errorf("%s has %d methods: lower its bound of %d", name, size, w.methods)
		}
	}
}

// TestInterfaceMethods: methods of embedded interfaces count once, those of a foreign one as one, and those of an alias as those of its type.
func TestInterfaceMethods(t *testing.T) {
	t.Parallel()
	all := typeTable{}
	for dir, source := range map[string]string{
		"a": "package a\nimport (\"io\"; renamed \"" + module + "/b\")\ntype X interface { io.Reader; Y; renamed.Z; One(); Two() }\ntype Y interface { Two(); Three() }\ntype S struct{}",
		"b": "package b\nimport \"" + module + "/c\"\ntype Z = c.V",
		"c": "package c\ntype V interface { Four(); ~int | string }",
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "", source, 0)
		if err != nil {
			t.Fatal(err)
		}
		all.add(dir, f)
	}
	want := []string{"Four", "One", "Three", "Two", "io.Reader"}
	if got := slices.Sorted(maps.Keys(all.methods("a.X"))); !slices.Equal(got, want) {
		t.Errorf("a.X has %q, want %q", got, want)
	}
	if got := all.methods("a.S"); len(got) != 0 {
		t.Errorf("a struct has %d methods", len(got))
	}
}

// interfaces returns the types of all packages of this module that are interfaces, or other names of types. Generated files are left out.
func interfaces(t *testing.T) typeTable {
	t.Helper()
	all := typeTable{}
	for _, p := range packages(t) {
		if p.path() == "" || p.ForTest != "" {
			continue
		}
		for _, name := range append(slices.Clone(p.GoFiles), p.CgoFiles...) {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			if !ast.IsGenerated(f) {
				all.add(p.path(), f)
			}
		}
	}
	return all
}

// typeTable has types by the path of their package and their name.
type typeTable map[string]declaration

// declaration is a type, and imports are those of its file: paths within this module by name.
type declaration struct {
	dir     string
	typ     ast.Expr
	imports map[string]string
}

func (d typeTable) add(dir string, f *ast.File) {
	imports := map[string]string{}
	for _, i := range f.Imports {
		target, err := strconv.Unquote(i.Path.Value)
		own, ok := strings.CutPrefix(target, module+"/")
		if err != nil || !ok {
			continue
		}
		name := path.Base(own)
		if i.Name != nil {
			name = i.Name.Name
		}
		imports[name] = own
	}
	for _, decl := range f.Decls {
		g, ok := decl.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, s := range g.Specs {
			if typ, ok := s.(*ast.TypeSpec); ok {
				d[dir+"."+typ.Name.Name] = declaration{dir, typ.Type, imports}
			}
		}
	}
}

// methods returns the names of the methods of a type that is an interface. A foreign interface that it embeds counts as one.
func (d typeTable) methods(name string) map[string]bool {
	found := map[string]bool{}
	of, ok := d[name]
	if !ok {
		return found
	}
	embed := func(e ast.Expr) {
		if i, ok := e.(*ast.IndexExpr); ok { // of a generic type
			e = i.X
		}
		switch e := e.(type) {
		case *ast.Ident:
			maps.Copy(found, d.methods(of.dir+"."+e.Name))
		case *ast.SelectorExpr:
			pkg, _ := e.X.(*ast.Ident)
			if own, ok := of.imports[pkg.Name]; ok {
				maps.Copy(found, d.methods(own+"."+e.Sel.Name))
			} else if _, within := of.typ.(*ast.InterfaceType); within {
				found[pkg.Name+"."+e.Sel.Name] = true
			}
		}
	}
	i, ok := of.typ.(*ast.InterfaceType)
	if !ok {
		embed(of.typ) // another name
		return found
	}
	for _, m := range i.Methods.List {
		for _, n := range m.Names {
			found[n.Name] = true
		}
		if len(m.Names) == 0 {
			embed(m.Type)
		}
	}
	return found
}
