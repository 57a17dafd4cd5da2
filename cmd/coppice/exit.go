package main

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/coppice-dev/coppice/core"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The exit statuses, after sysexits.h where it has one. `exec` and `shell` pass on the remote command's instead.
const (
	exitOK          = 0
	exitFailure     = 1   // it did not work; the message says why. Also: doctor found that this host will not do
	exitUsage       = 2   // the command line is wrong
	exitBadInput    = 65  // what was sent is wrong
	exitNotFound    = 66  // the named object does not exist
	exitUnavailable = 69  // the server, a runner, a guest or the database cannot be reached
	exitInternal    = 70  // a fault in Coppice
	exitExhausted   = 73  // quota, capacity or disk used up
	exitConflict    = 75  // not in this state; may work later
	exitPermission  = 77  // no key, or one that may not
	exitHost        = 78  // this host cannot do it as it is set up
	exitTimedOut    = 124 // as timeout(1)
	exitCanceled    = 130 // as after Ctrl-C
)

const codeUsage = "USAGE"

// exitOfCode is the one table from an error's code to the exit status.
var exitOfCode = map[string]int{
	codeUsage:                               exitUsage,
	string(core.CodeInternal):               exitInternal,
	string(core.CodeCanceled):               exitCanceled,
	string(core.CodeTimedOut):               exitTimedOut,
	string(core.CodeInvalidID):              exitBadInput,
	string(core.CodeInvalidDigest):          exitBadInput,
	string(core.CodeInvalidName):            exitBadInput,
	string(core.CodeInvalidField):           exitBadInput,
	string(core.CodeUnknownField):           exitBadInput,
	string(core.CodeMalformedBody):          exitBadInput,
	string(core.CodeBodyTooLarge):           exitBadInput,
	string(core.CodeUnsupportedMedia):       exitBadInput,
	string(core.CodeMethodNotAllowed):       exitBadInput,
	string(core.CodeUnauthenticated):        exitPermission,
	string(core.CodePermissionDenied):       exitPermission,
	string(core.CodePortNotAllowed):         exitPermission,
	string(core.CodeEgressForbidden):        exitPermission,
	string(core.CodeEgressBeyondParent):     exitPermission,
	string(core.CodeRouteNotFound):          exitNotFound,
	string(core.CodeWorkspaceNotFound):      exitNotFound,
	string(core.CodeCheckpointNotFound):     exitNotFound,
	string(core.CodeOperationNotFound):      exitNotFound,
	string(core.CodeSessionNotFound):        exitNotFound,
	string(core.CodeImageNotFound):          exitNotFound,
	string(core.CodeRunnerNotFound):         exitNotFound,
	string(core.CodePortNotFound):           exitNotFound,
	string(core.CodeFileNotFound):           exitNotFound,
	string(core.CodeSandboxNotFound):        exitNotFound,
	string(core.CodeProjectNotFound):        exitNotFound,
	string(core.CodeKeyNotFound):            exitNotFound,
	string(core.CodeGrantNotFound):          exitNotFound,
	string(core.CodeNameTaken):              exitConflict,
	string(core.CodeWorkspaceNotReady):      exitConflict,
	string(core.CodeCheckpointNotReady):     exitConflict,
	string(core.CodeGrantHostDenied):        exitConflict,
	string(core.CodeSecretRequired):         exitConflict,
	string(core.CodeGrantsTooLarge):         exitConflict,
	string(core.CodeSecretNotFound):         exitConflict,
	string(core.CodeCheckpointInUse):        exitConflict,
	string(core.CodeCheckpointPinned):       exitConflict,
	string(core.CodeRetentionNotFound):      exitNotFound,
	string(core.CodeVersionConflict):        exitConflict,
	string(core.CodeStateConflict):          exitConflict,
	string(core.CodePortTaken):              exitConflict,
	string(core.CodeIdempotencyInProgress):  exitConflict,
	string(core.CodeIdempotencyMismatch):    exitBadInput,
	string(core.CodeIdempotencySecretShown): exitConflict,
	string(core.CodeProjectNotEmpty):        exitConflict,
	string(core.CodeRateLimited):            exitExhausted,
	string(core.CodeEventsExpired):          exitConflict,
	string(core.CodeQuotaExceeded):          exitExhausted,
	string(core.CodeCapacity):               exitExhausted,
	string(core.CodeDiskFull):               exitExhausted,
	string(core.CodeNoRunner):               exitUnavailable,
	string(core.CodeRunnerUnreachable):      exitUnavailable,
	string(core.CodeDatabaseUnavailable):    exitUnavailable,
	string(core.CodeGuestUnreachable):       exitUnavailable,
	string(core.CodeGuestBusy):              exitUnavailable,
	string(core.CodeControllerStopping):     exitUnavailable,
	string(core.CodeIncompatibleHost):       exitHost,
	string(core.CodeUnsupported):            exitHost,
	string(core.CodeDiskUnreadable):         exitFailure,
	string(core.CodeKeyUnavailable):         exitHost,
	string(core.CodeVMMFailed):              exitFailure,
	string(core.CodeSandboxLost):            exitFailure,
	string(core.CodeRunnerLost):             exitFailure,
	string(core.CodeHeartbeatStale):         exitUnavailable,
	string(core.CodeGuestProtocol):          exitFailure,
	string(core.CodeNotQuiesced):            exitFailure,
	string(core.CodeResealFailed):           exitFailure,
	string(core.CodeAttestationRefused):     exitFailure,
	string(core.CodeAttestationNotFound):    exitNotFound,
	string(core.CodeForkFailed):             exitFailure,
	string(core.CodeCheckpointCorrupt):      exitFailure,
	string(core.CodeCheckpointIncomplete):   exitFailure,
	string(core.CodeManifestInvalid):        exitFailure,
	string(core.CodeImportInvalid):          exitBadInput,
	string(core.CodeStoreUnavailable):       exitUnavailable,
	string(core.CodeSecretUnavailable):      exitUnavailable,
	string(core.CodeStoreAuth):              exitUnavailable,
	string(core.CodePagerGone):              exitUnavailable,
	string(core.CodeEgressGone):             exitUnavailable,
	string(core.CodeEgressReduced):          exitUnavailable,
	string(core.CodeRulesNotWritten):        exitUnavailable,
	string(core.CodeAuthorityUnusable):      exitUnavailable,
	string(core.CodeWriteNotLogged):         exitUnavailable,

	string(core.CodeCertificateRefused):    exitPermission,
	string(core.CodeJoinTokenRefused):      exitPermission,
	string(core.CodeRunnerRevoked):         exitPermission,
	string(core.CodeRunnerInUse):           exitConflict,
	string(core.CodeControllerUnreachable): exitUnavailable,
}

// statusError ends the program with a status and without a message: everything was said, or the status is another
// program's.
type statusError int

func (e statusError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// passOn ends this program with another one's exit status.
func passOn(status int) error {
	if status == 0 {
		return nil
	}
	return statusError(status)
}

// usageError is a mistake in the command line.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// misuse marks an error as a mistake in the command line.
func misuse(err error) error { return usageError{err} }

// isMisuse says whether an error is a mistake in the command line.
func isMisuse(err error) bool { return errors.As(err, new(usageError)) }

// exitStatus decides the exit status for an error.
func exitStatus(err error) int {
	var status statusError
	var api *coppice.Error
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &status):
		return int(status)
	case isMisuse(err):
		return exitUsage
	case errors.As(err, &api):
		if s, ok := exitOfCode[string(api.Code)]; ok {
			return s
		}
		return exitOfHTTP(api.Status) // a code that a newer server knows
	case core.CodeOf(err) == core.CodeInternal:
		return exitFailure // an error of the operating system, say, that nobody gave a code
	default:
		if s, ok := exitOfCode[string(core.CodeOf(err))]; ok {
			return s
		}
		return exitFailure
	}
}

func exitOfHTTP(status int) int {
	switch {
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return exitPermission
	case status == http.StatusNotFound:
		return exitNotFound
	case status == http.StatusConflict:
		return exitConflict
	case status == http.StatusTooManyRequests:
		return exitExhausted
	case status >= 500:
		return exitUnavailable
	case status >= 400:
		return exitBadInput
	}
	return exitFailure
}

// describe gives an error's code and its text. On a command line even the inner causes are shown: they are the
// user's own.
func describe(err error) (code, message string) {
	var api *coppice.Error
	switch {
	case isMisuse(err):
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
