package guest

import (
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// StepError says which reseal step is not proven. Its code is RESEAL_FAILED.
type StepError struct {
	Step   string
	Reason string
}

func (e *StepError) Error() string { return "reseal step " + e.Step + ": " + e.Reason }

// Verify judges a reseal by the evidence of its steps. want is the request that was sent. Any step that is missing, failed,
// skipped without being allowed to, repeated, or whose evidence does not show what was asked is a *StepError inside a
// RESEAL_FAILED. The sandbox must be destroyed then.
func Verify(report core.ResealReport, want guestapi.ResealRequest) error {
	return verify(report, want)
}

// VerifyReseed judges a reseed by the same rules.
func VerifyReseed(res guestapi.ReseedResponse) error { return verifyReseed(res) }
