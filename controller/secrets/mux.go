package secrets

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// Source is one place that secrets are in.
type Source interface {
	// Check refuses what cannot name a secret of a project, without asking anybody: INVALID_FIELD.
	Check(project core.ProjectID, ref string) error
	// Read returns what is there: SECRET_NOT_FOUND where that is nothing of use, SECRET_UNAVAILABLE where nobody can say.
	Read(ctx context.Context, project core.ProjectID, ref string) (grant.Secret, error)
}

// Mux has a source for each scheme, such as "vault". It is a Source itself.
type Mux map[string]Source

var _ Source = Mux(nil)

// Check asks the source of the reference's scheme.
func (m Mux) Check(project core.ProjectID, ref string) error {
	s, err := m.source(ref)
	if err != nil {
		return err
	}
	return s.Check(project, ref)
}

// Read asks the source of the reference's scheme.
func (m Mux) Read(ctx context.Context, project core.ProjectID, ref string) (grant.Secret, error) {
	s, err := m.source(ref)
	if err != nil {
		return grant.Secret{}, err
	}
	return s.Read(ctx, project, ref)
}

func (m Mux) source(ref string) (Source, error) {
	scheme, _, ok := strings.Cut(ref, "://")
	if s, there := m[scheme]; ok && there {
		return s, nil
	}
	return nil, badRef("%q is in no place that this controller knows; a reference begins with %s", core.Clip(ref), strings.Join(slices.Sorted(maps.Keys(m)), ":// or ")+"://")
}

func badRef(format string, a ...any) error {
	return core.Errorf(core.Invalid, core.CodeInvalidField, "vault_ref: "+format, a...)
}

// secret makes a secret of a value that was found.
func secret(ref, value string) (grant.Secret, error) {
	if err := grant.CheckSecret(value); err != nil {
		return grant.Secret{}, core.Errorf(core.FailedPrecondition, core.CodeSecretNotFound, "what is at %s cannot be used: %s", ref, core.MessageOf(err))
	}
	return grant.NewSecret(value), nil
}
