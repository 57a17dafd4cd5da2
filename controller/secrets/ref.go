package secrets

import (
	"regexp"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

const (
	vaultScheme = "vault://"
	maxRef      = 512
	// projectMark stands in a prefix for the id of a project: names may be used again, ids never are.
	projectMark = "{project}"
)

var (
	// segment has nothing in it that anybody on the way could read as an escape, a query or a way up.
	segment = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*$`)
	field   = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)
)

// reference is a parsed vault://mount/path#field.
type reference struct {
	project core.ProjectID

	text  string
	path  string // with the mount, as people write it: without the data/ of version 2
	field string
}

func parseReference(text string) (reference, error) {
	rest, ok := strings.CutPrefix(text, vaultScheme)
	path, name, named := strings.Cut(rest, "#")
	parts := strings.Split(path, "/")
	switch {
	case len(text) > maxRef:
		return reference{}, badRef("it has more than %d bytes", maxRef)
	case !ok || len(parts) < 2 || slices.ContainsFunc(parts, func(s string) bool { return !segment.MatchString(s) }):
		return reference{}, badRef("%q is not vault://mount/path#field, with a path of letters, digits, _, - and dots", core.Clip(text))
	case !named || !field.MatchString(name):
		return reference{}, badRef("%q does not name a field, as vault://mount/path#field does", core.Clip(text))
	}
	return reference{text: text, path: path, field: name}, nil
}

// prefix is a template of what a project's paths begin with.
type prefix string

func parsePrefix(text string) (prefix, error) {
	parts := strings.Split(strings.TrimSuffix(text, "/"), "/")
	marks := 0
	for _, p := range parts {
		if p == projectMark {
			marks++
		} else if !segment.MatchString(p) {
			marks = -len(parts)
		}
	}
	if marks != 1 || parts[0] == projectMark || len(text) > maxRef/2 {
		return "", core.Errorf(core.Invalid, core.CodeInvalidField, "--vault-prefix: %q is not a path such as secret/coppice/%s/: it begins with a mount and has %s once, since projects must not read one another's secrets",
			core.Clip(text), projectMark, projectMark)
	}
	return prefix(strings.Join(parts, "/") + "/"), nil
}

// of is what the paths of a project begin with.
func (p prefix) of(project core.ProjectID) string {
	return strings.ReplaceAll(string(p), projectMark, string(project))
}
