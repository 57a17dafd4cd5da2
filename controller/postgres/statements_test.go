package postgres_test

import (
	"context"
	"fmt"
	"go/types"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
)

// fewestStatements is below the number of statements that the adapter has: so many must be found.
const fewestStatements = 250

var argument = regexp.MustCompile(`@([a-z_]+)`)

// TestEveryStatement reads all statements of the adapter from its source and has the server prepare them on the migrated schema. So a
// misspelt or changed table, column or function is found although no test runs the statement. It compares names and types of the arguments
// with those of the statement, and the fields of its row with the columns of the result. A column that may be NULL has a field that can
// say so.
func TestEveryStatement(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), testpg.New(t, migrations.Up))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	c := &checker{t: t, conn: conn, nullable: nullable(t, conn), excused: map[string]bool{}}
	list := load(t).statements(t)
	for _, s := range list {
		c.check(s)
	}
	for name := range never {
		if !c.excused[name] {
			t.Errorf("%s is never NULL, or is not read any more: take it from the list of exceptions", name)
		}
	}
	if len(list) < fewestStatements {
		t.Errorf("%d statements were found, fewer than %d", len(list), fewestStatements)
	}
	t.Logf("%d statements, %d columns and %d arguments", len(list), c.columns, c.arguments)
}

// column is a column of a table.
type column struct {
	Table  uint32
	Number uint16
}

// nullable returns the columns that may be NULL.
func nullable(t *testing.T, conn *pgx.Conn) map[column]bool {
	t.Helper()
	rows, err := conn.Query(t.Context(), `SELECT attrelid, attnum FROM pg_attribute WHERE attnum > 0 AND NOT attnotnull`)
	if err != nil {
		t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[column])
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[column]bool, len(list))
	for _, c := range list {
		found[c] = true
	}
	return found
}

// checker compares statements with the schema.
type checker struct {
	t                  *testing.T
	conn               *pgx.Conn
	nullable           map[column]bool
	columns, arguments int
	excused            map[string]bool // the keys of never that were met
}

func (c *checker) check(s statement) {
	c.t.Helper()
	names := map[string]any{}
	for _, m := range argument.FindAllStringSubmatch(s.sql, -1) {
		names[m[1]] = m[1]
	}
	sql, order, err := pgx.NamedArgs(names).RewriteQuery(c.t.Context(), c.conn, s.sql, nil)
	if err != nil {
		c.t.Errorf("%s: %v", s.at, err)
		return
	}
	d, err := c.conn.Prepare(c.t.Context(), "", sql)
	if err != nil {
		c.t.Errorf("%s: %v\n%s", s.at, err, s.sql)
		return
	}
	if s.args != nil {
		c.checkArguments(s, order, d)
	}
	if s.row != nil {
		c.checkRow(s, d)
	}
}

func (c *checker) checkArguments(s statement, order []any, d *pgconn.StatementDescription) {
	c.t.Helper()
	for i, name := range order {
		typ, ok := s.args[name.(string)]
		if !ok {
			c.t.Errorf("%s: the statement has no argument @%s", s.at, name)
			continue
		}
		c.arguments++
		v, ok := zero(typ)
		if !ok {
			continue
		}
		if c.conn.TypeMap().PlanEncode(d.ParamOIDs[i], c.conn.TypeMap().FormatCodeForOID(d.ParamOIDs[i]), v.Interface()) == nil && !isText(v) {
			c.t.Errorf("%s: the argument @%s is a %s and cannot be sent as a %s", s.at, name, typ, c.typeName(d.ParamOIDs[i]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.args)) {
		if s.all && !slices.Contains(order, any(name)) {
			c.t.Errorf("%s: the statement does not use the argument @%s", s.at, name)
		}
	}
}

// isText reports whether pgx sends a value as text to a type that it has no other form for.
func isText(v reflect.Value) bool { return v.Kind() == reflect.String }

func (c *checker) typeName(oid uint32) string {
	if t, ok := c.conn.TypeMap().TypeForOID(oid); ok {
		return t.Name
	}
	return fmt.Sprintf("type %d", oid)
}

// field is one of a row.
type field struct {
	name   string
	tagged bool
	typ    types.Type
}

func (f field) is(column string) bool {
	if f.tagged {
		return strings.EqualFold(f.name, column)
	}
	return strings.EqualFold(f.name, strings.ReplaceAll(column, "_", ""))
}

func fieldsOf(s *types.Struct) (list []field) {
	for i := range s.NumFields() {
		f := s.Field(i)
		tag, tagged := reflect.StructTag(s.Tag(i)).Lookup("db")
		switch inner, embeds := f.Type().Underlying().(*types.Struct); {
		case tag == "-":
		case f.Embedded() && embeds:
			list = append(list, fieldsOf(inner)...)
		case tagged:
			list = append(list, field{tag, true, f.Type()})
		case f.Exported():
			list = append(list, field{f.Name(), false, f.Type()})
		}
	}
	return list
}

func (c *checker) checkRow(s statement, d *pgconn.StatementDescription) {
	c.t.Helper()
	row, isStruct := s.row.Underlying().(*types.Struct)
	if !isStruct {
		if len(d.Fields) != 1 {
			c.t.Errorf("%s: the result has %d columns, and not one for a %s", s.at, len(d.Fields), s.row)
			return
		}
		c.checkColumn(s, d.Fields[0], s.row)
		return
	}
	fields := fieldsOf(row)
	for _, f := range fields {
		at := slices.IndexFunc(d.Fields, func(d pgconn.FieldDescription) bool { return f.is(d.Name) })
		if at < 0 {
			c.t.Errorf("%s: the result has no column for the field %s of %s", s.at, f.name, s.row)
			continue
		}
		c.checkColumn(s, d.Fields[at], f.typ)
	}
	if len(d.Fields) != len(fields) {
		c.t.Errorf("%s: the result has %d columns, and %s has %d fields", s.at, len(d.Fields), s.row, len(fields))
	}
}

// never are columns that may be NULL in their table, but not in the rows of a result, and why.
var never = map[string]string{
	"countRow.parent_id":           "the parents are asked for",
	"ruledRow.parent":              "the workspaces of the parents are asked for",
	"referenceRow.manifest_key":    "a constraint: what is sealed has a manifest",
	"referenceRow.manifest_digest": "a constraint: what is sealed has a manifest",
	"referenceRow.manifest_bytes":  "a constraint: what is sealed has a manifest",
}

func (c *checker) checkColumn(s statement, d pgconn.FieldDescription, typ types.Type) {
	c.t.Helper()
	c.columns++
	name := types.TypeString(s.row, func(*types.Package) string { return "" }) + "." + d.Name
	if c.nullable[column{d.TableOID, d.TableAttributeNumber}] && !takesNull(typ) {
		if c.excused[name] = true; never[name] != "" {
			return
		}
		c.t.Errorf("%s: the column %s may be NULL, and a %s cannot", s.at, d.Name, typ)
	}
	v, ok := zero(typ)
	m := c.conn.TypeMap()
	if _, known := m.TypeForOID(d.DataTypeOID); !ok || !known {
		return
	}
	to := reflect.New(v.Type())
	if reflect.TypeOf(m.PlanScan(d.DataTypeOID, m.FormatCodeForOID(d.DataTypeOID), to.Interface())) == fails(m) {
		c.t.Errorf("%s: the column %s is a %s and cannot be read into a %s", s.at, d.Name, c.typeName(d.DataTypeOID), typ)
	}
}

// fails is the type of a plan that cannot work.
func fails(m *pgtype.Map) reflect.Type {
	return reflect.TypeOf(m.PlanScan(pgtype.Int8OID, pgtype.BinaryFormatCode, new([]string)))
}

// takesNull reports whether a value of a type can say that it is NULL.
func takesNull(t types.Type) bool {
	switch u := t.Underlying().(type) {
	case *types.Pointer, *types.Slice, *types.Map, *types.Interface:
		return true
	case *types.Struct: // JSON, or a type that reads its column itself
		return true
	case *types.Basic:
		return u.Kind() == types.UntypedNil
	}
	return false
}

// zero returns the zero value of a type as this test can make it: types with a name become what they are made of. It has none for JSON and
// for types that read their column themselves.
func zero(t types.Type) (reflect.Value, bool) {
	typ := reflected(t)
	if typ == nil {
		return reflect.Value{}, false
	}
	return reflect.Zero(typ), true
}

var basics = map[types.BasicKind]reflect.Type{
	types.Bool: reflect.TypeFor[bool](), types.String: reflect.TypeFor[string](), types.Int: reflect.TypeFor[int](), types.Int16: reflect.TypeFor[int16](),
	types.Int32: reflect.TypeFor[int32](), types.Int64: reflect.TypeFor[int64](), types.Uint8: reflect.TypeFor[uint8](), types.Uint16: reflect.TypeFor[uint16](),
	types.Uint32: reflect.TypeFor[uint32](), types.Uint64: reflect.TypeFor[uint64](), types.Float32: reflect.TypeFor[float32](), types.Float64: reflect.TypeFor[float64](),
	types.UntypedString: reflect.TypeFor[string](), types.UntypedInt: reflect.TypeFor[int](), types.UntypedBool: reflect.TypeFor[bool](), types.UntypedFloat: reflect.TypeFor[float64](),
}

func reflected(t types.Type) reflect.Type {
	t = types.Unalias(t)
	if named, ok := t.(*types.Named); ok {
		if named.Obj().Pkg() != nil && named.Obj().Pkg().Path() == "time" && named.Obj().Name() == "Time" {
			return reflect.TypeFor[time.Time]()
		}
		for m := range named.Origin().Methods() {
			if name := m.Name(); name == "ScanBytes" || name == "Scan" || name == "MarshalJSON" {
				return nil
			}
		}
	}
	switch u := t.Underlying().(type) {
	case *types.Basic:
		return basics[u.Kind()]
	case *types.Pointer:
		if e := reflected(u.Elem()); e != nil {
			return reflect.PointerTo(e)
		}
	case *types.Slice:
		if e := reflected(u.Elem()); e != nil {
			return reflect.SliceOf(e)
		}
	}
	return nil
}
