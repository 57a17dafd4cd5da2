// Package exit decides the exit status of the program: one table from the code of an error to a status.
package exit

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/coppice-dev/coppice/core"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The exit statuses, after sysexits.h where it has one. `exec` and `shell` pass on the remote command's instead.
const (
	OK          = 0
	Failure     = 1   // it did not work; the message says why. Also: doctor found that this host will not do
	Usage       = 2   // the command line is wrong
	BadInput    = 65  // what was sent is wrong
	NotFound    = 66  // the named object does not exist
	Unavailable = 69  // the server, a runner, a guest or the database cannot be reached
	Internal    = 70  // a fault in Coppice
	Exhausted   = 73  // quota, capacity or disk used up
	Conflict    = 75  // not in this state; may work later
	Permission  = 77  // no key, or one that may not
	Host        = 78  // this host cannot do it as it is set up
	TimedOut    = 124 // as timeout(1)
	Canceled    = 130 // as after Ctrl-C
)

const codeUsage = "USAGE"

// ofCode is the one table from an error's code to the exit status.
var ofCode = map[string]int{
	codeUsage:                               Usage,
	string(core.CodeInternal):               Internal,
	string(core.CodeCanceled):               Canceled,
	string(core.CodeTimedOut):               TimedOut,
	string(core.CodeInvalidID):              BadInput,
	string(core.CodeInvalidDigest):          BadInput,
	string(core.CodeInvalidName):            BadInput,
	string(core.CodeInvalidField):           BadInput,
	string(core.CodeUnknownField):           BadInput,
	string(core.CodeMalformedBody):          BadInput,
	string(core.CodeBodyTooLarge):           BadInput,
	string(core.CodeUnsupportedMedia):       BadInput,
	string(core.CodeMethodNotAllowed):       BadInput,
	string(core.CodeUnauthenticated):        Permission,
	string(core.CodePermissionDenied):       Permission,
	string(core.CodePortNotAllowed):         Permission,
	string(core.CodeEgressForbidden):        Permission,
	string(core.CodeEgressBeyondParent):     Permission,
	string(core.CodeRouteNotFound):          NotFound,
	string(core.CodeWorkspaceNotFound):      NotFound,
	string(core.CodeCheckpointNotFound):     NotFound,
	string(core.CodeOperationNotFound):      NotFound,
	string(core.CodeSessionNotFound):        NotFound,
	string(core.CodeWatchNotFound):          NotFound,
	string(core.CodeImageNotFound):          NotFound,
	string(core.CodeUploadNotFound):         NotFound,
	string(core.CodeBuildFailed):            Failure,
	string(core.CodeDockerfileInvalid):      BadInput,
	string(core.CodeImageShape):             BadInput,
	string(core.CodeRunnerNotFound):         NotFound,
	string(core.CodePortNotFound):           NotFound,
	string(core.CodeFileNotFound):           NotFound,
	string(core.CodeSandboxNotFound):        NotFound,
	string(core.CodeProjectNotFound):        NotFound,
	string(core.CodeKeyNotFound):            NotFound,
	string(core.CodeGrantNotFound):          NotFound,
	string(core.CodeNameTaken):              Conflict,
	string(core.CodeWorkspaceNotReady):      Conflict,
	string(core.CodeCheckpointNotReady):     Conflict,
	string(core.CodeGrantHostDenied):        Conflict,
	string(core.CodeSecretRequired):         Conflict,
	string(core.CodeGrantsTooLarge):         Conflict,
	string(core.CodeSecretNotFound):         Conflict,
	string(core.CodeCheckpointInUse):        Conflict,
	string(core.CodeCheckpointPinned):       Conflict,
	string(core.CodeRetentionNotFound):      NotFound,
	string(core.CodeVersionConflict):        Conflict,
	string(core.CodeStateConflict):          Conflict,
	string(core.CodeOperationCanceled):      Canceled,
	string(core.CodeNotCancelable):          Conflict,
	string(core.CodePortTaken):              Conflict,
	string(core.CodePortClosed):             Unavailable,
	string(core.CodeIdempotencyInProgress):  Conflict,
	string(core.CodeIdempotencyMismatch):    BadInput,
	string(core.CodeIdempotencySecretShown): Conflict,
	string(core.CodeProjectNotEmpty):        Conflict,
	string(core.CodeRateLimited):            Exhausted,
	string(core.CodeEventsExpired):          Conflict,
	string(core.CodeQuotaExceeded):          Exhausted,
	string(core.CodeCapacity):               Exhausted,
	string(core.CodeDiskFull):               Exhausted,
	string(core.CodeNoRunner):               Unavailable,
	string(core.CodeRunnerUnreachable):      Unavailable,
	string(core.CodeDatabaseUnavailable):    Unavailable,
	string(core.CodeGuestUnreachable):       Unavailable,
	string(core.CodeGuestBusy):              Unavailable,
	string(core.CodeControllerStopping):     Unavailable,
	string(core.CodeIncompatibleHost):       Host,
	string(core.CodeUnsupported):            Host,
	string(core.CodeDiskUnreadable):         Failure,
	string(core.CodeKeyUnavailable):         Host,
	string(core.CodeVMMFailed):              Failure,
	string(core.CodeSandboxLost):            Failure,
	string(core.CodeRunnerLost):             Failure,
	string(core.CodeHeartbeatStale):         Unavailable,
	string(core.CodeGuestProtocol):          Failure,
	string(core.CodeNotQuiesced):            Failure,
	string(core.CodeResealFailed):           Failure,
	string(core.CodeAttestationRefused):     Failure,
	string(core.CodeAttestationNotFound):    NotFound,
	string(core.CodeForkFailed):             Failure,
	string(core.CodeCheckpointCorrupt):      Failure,
	string(core.CodeCheckpointIncomplete):   Failure,
	string(core.CodeManifestInvalid):        Failure,
	string(core.CodeImportInvalid):          BadInput,
	string(core.CodeStoreUnavailable):       Unavailable,
	string(core.CodeSecretUnavailable):      Unavailable,
	string(core.CodeStoreAuth):              Unavailable,
	string(core.CodePagerGone):              Unavailable,
	string(core.CodeEgressGone):             Unavailable,
	string(core.CodeEgressReduced):          Unavailable,
	string(core.CodeRulesNotWritten):        Unavailable,
	string(core.CodeAuthorityUnusable):      Unavailable,
	string(core.CodeWriteNotLogged):         Unavailable,

	string(core.CodeCertificateRefused):    Permission,
	string(core.CodeJoinTokenRefused):      Permission,
	string(core.CodeRunnerRevoked):         Permission,
	string(core.CodeRunnerInUse):           Conflict,
	string(core.CodeControllerUnreachable): Unavailable,
}

// StatusError ends the program with a status and without a message: everything was said, or the status is another
// program's.
type StatusError int

func (e StatusError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// PassOn ends this program with the exit status of another program.
func PassOn(status int) error {
	if status == 0 {
		return nil
	}
	return StatusError(status)
}

// usageError is a mistake in the command line.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// Misuse marks an error as a mistake in the command line.
func Misuse(err error) error { return usageError{err} }

// IsMisuse says whether an error is a mistake in the command line.
func IsMisuse(err error) bool { return errors.As(err, new(usageError)) }

// Status decides the exit status for an error.
func Status(err error) int {
	var status StatusError
	var api *coppice.Error
	switch {
	case err == nil:
		return OK
	case errors.As(err, &status):
		return int(status)
	case IsMisuse(err):
		return Usage
	case errors.As(err, &api):
		if s, ok := ofCode[string(api.Code)]; ok {
			return s
		}
		return ofHTTP(api.Status) // a code that a newer server knows
	case core.CodeOf(err) == core.CodeInternal:
		return Failure // an error of the operating system, say, that nobody gave a code
	default:
		if s, ok := ofCode[string(core.CodeOf(err))]; ok {
			return s
		}
		return Failure
	}
}

func ofHTTP(status int) int {
	switch {
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return Permission
	case status == http.StatusNotFound:
		return NotFound
	case status == http.StatusConflict:
		return Conflict
	case status == http.StatusTooManyRequests:
		return Exhausted
	case status >= 500:
		return Unavailable
	case status >= 400:
		return BadInput
	}
	return Failure
}

// Describe returns an error's code and its text. On a command line the text includes the inner causes, because they
// belong to the user.
func Describe(err error) (code, message string) {
	var api *coppice.Error
	switch {
	case IsMisuse(err):
		return codeUsage, err.Error()
	case errors.As(err, &api):
		message = err.Error()
		if api.RequestID != "" {
			message += " [request " + api.RequestID + "]"
		}
		return string(api.Code), message
	default:
		return string(core.CodeOf(err)), err.Error()
	}
}
