package secrets

import (
	"context"
	"regexp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// Env is the controller's own environment, the same for every project: for development only.
type Env struct {
	Lookup func(name string) (string, bool)
}

var _ Source = Env{}

// envRef has nothing in it of the controller's own configuration.
var envRef = regexp.MustCompile(`^env://(COPPICE_SECRET_[A-Z0-9_]{1,64})$`)

// Check looks at the name.
func (Env) Check(_ core.ProjectID, ref string) error {
	if !envRef.MatchString(ref) {
		return badRef("%q is not env://COPPICE_SECRET_NAME: other variables of the controller are not given away", core.Clip(ref))
	}
	return nil
}

// Read returns what the variable has now.
func (e Env) Read(_ context.Context, project core.ProjectID, ref string) (grant.Secret, error) {
	if err := e.Check(project, ref); err != nil {
		return grant.Secret{}, err
	}
	value, there := e.Lookup(envRef.FindStringSubmatch(ref)[1])
	if !there {
		return grant.Secret{}, core.Errorf(core.FailedPrecondition, core.CodeSecretNotFound, "the controller has no variable %s; set it and start the controller again", ref)
	}
	return secret(ref, value)
}
