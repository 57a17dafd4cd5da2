package postgres

import (
	"fmt"
	"strings"

	"github.com/coppice-dev/coppice/controller"
)

// filter builds the WHERE of a list from parts that are all constant text; values travel as arguments.
type filter struct {
	relation  string
	ascending bool
	parts     []string
	args      args
}

func newFilter(relation string, p controller.Page, ascending bool) *filter {
	f := &filter{relation: relation, ascending: ascending, args: args{"limit": p.Limit}}
	if p.After != "" {
		order := "<"
		if ascending {
			order = ">"
		}
		f.add(relation+".id "+order+" @after", "after", p.After)
	}
	return f
}

func (f *filter) add(condition, name string, value any) {
	f.parts = append(f.parts, condition)
	if name != "" {
		f.args[name] = value
	}
}

func (f *filter) equal(column, value string) {
	if value != "" {
		f.add(f.relation+"."+column+" = @"+column, column, value)
	}
}

func (f *filter) suffix(s string) {
	if s != "" {
		f.add(fmt.Sprintf("right(%s.id, %d) = @suffix", f.relation, len(s)), "suffix", s)
	}
}

func (f *filter) anyOf(column string, values []string) {
	if len(values) > 0 {
		f.add(f.relation+"."+column+" = ANY(@any_"+column+"::text[])", "any_"+column, values)
	}
}

func (f *filter) labels(want map[string]*string) {
	set, keys := split(want)
	if len(set) > 0 {
		f.add(f.relation+".labels @> @labels::jsonb", "labels", set)
	}
	if len(keys) > 0 {
		f.add(f.relation+".labels ?& @label_keys::text[]", "label_keys", keys)
	}
}

func (f *filter) where() string {
	if len(f.parts) == 0 {
		return ""
	}
	return " WHERE " + strings.Join(f.parts, " AND ")
}

func (f *filter) tail() string {
	if f.ascending {
		return " ORDER BY " + f.relation + ".id LIMIT @limit"
	}
	return " ORDER BY " + f.relation + ".id DESC LIMIT @limit"
}
