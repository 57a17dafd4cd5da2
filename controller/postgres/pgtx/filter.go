package pgtx

import (
	"fmt"
	"strings"

	"github.com/coppice-dev/coppice/controller"
)

// Filter builds the WHERE of a list from parts that are all constant text; values travel as arguments.
type Filter struct {
	Relation  string // the alias of the table in the statement
	ascending bool
	parts     []string
	Args      Args // of the statement
}

// NewFilter filters the rows of a relation to a page of them, in the order of ids.
func NewFilter(relation string, p controller.Page, ascending bool) *Filter {
	f := &Filter{Relation: relation, ascending: ascending, Args: Args{"limit": p.Limit}}
	if p.After != "" {
		order := "<"
		if ascending {
			order = ">"
		}
		f.Add(relation+".id "+order+" @after", "after", p.After)
	}
	return f
}

// Add adds a condition, and a value if it has a name.
func (f *Filter) Add(condition, name string, value any) {
	f.parts = append(f.parts, condition)
	if name != "" {
		f.Args[name] = value
	}
}

// Equal wants a value of a column, unless it is empty.
func (f *Filter) Equal(column, value string) {
	if value != "" {
		f.Add(f.Relation+"."+column+" = @"+column, column, value)
	}
}

// Suffix wants the end of an id, unless it is empty.
func (f *Filter) Suffix(s string) {
	if s != "" {
		f.Add(fmt.Sprintf("right(%s.id, %d) = @suffix", f.Relation, len(s)), "suffix", s)
	}
}

// AnyOf wants one of some values of a column, unless there are none.
func (f *Filter) AnyOf(column string, values []string) {
	if len(values) > 0 {
		f.Add(f.Relation+"."+column+" = ANY(@any_"+column+"::text[])", "any_"+column, values)
	}
}

// Labels wants labels; one without a value may have any.
func (f *Filter) Labels(want map[string]*string) {
	set, keys := Split(want)
	if len(set) > 0 {
		f.Add(f.Relation+".labels @> @labels::jsonb", "labels", set)
	}
	if len(keys) > 0 {
		f.Add(f.Relation+".labels ?& @label_keys::text[]", "label_keys", keys)
	}
}

// Where is the WHERE of the statement.
func (f *Filter) Where() string {
	if len(f.parts) == 0 {
		return ""
	}
	return " WHERE " + strings.Join(f.parts, " AND ")
}

// Tail is the ORDER BY and LIMIT of the statement.
func (f *Filter) Tail() string {
	if f.ascending {
		return " ORDER BY " + f.Relation + ".id LIMIT @limit"
	}
	return " ORDER BY " + f.Relation + ".id DESC LIMIT @limit"
}

// Split parts a patch of labels into what is set and what is removed.
func Split(patch map[string]*string) (set map[string]string, drop []string) {
	set, drop = map[string]string{}, []string{}
	for k, v := range patch {
		if v == nil {
			drop = append(drop, k)
		} else {
			set[k] = *v
		}
	}
	return set, drop
}
