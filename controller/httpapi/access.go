package httpapi

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// access is what a route wants of a key, and which rate it counts for.
type access struct {
	rate   controller.RateClass // "": it does not count
	scopes []core.KeyScope      // all of them
}

func needs(rate controller.RateClass, scopes ...core.KeyScope) access { return access{rate, scopes} }

// routes is the one table from the contract's operations to what they want. Operations outside the table are refused for everybody.
var routes = map[string]access{
	"createWorkspace":    needs(controller.RateWrite, core.ScopeWorkspaceCreate),
	"listWorkspaces":     needs(controller.RateRead, core.ScopeWorkspaceRead),
	"getWorkspace":       needs(controller.RateRead, core.ScopeWorkspaceRead),
	"patchWorkspace":     needs(controller.RateWrite, core.ScopeWorkspaceCreate),
	"deleteWorkspace":    needs(controller.RateWrite, core.ScopeWorkspaceDelete),
	"terminateWorkspace": needs(controller.RateWrite, core.ScopeWorkspaceDelete),
	"forkWorkspace":      needs(controller.RateWrite, core.ScopeWorkspaceCreate, core.ScopeCheckpointCreate),
	"restoreWorkspace":   needs(controller.RateWrite, core.ScopeWorkspaceCreate),
	"suspendWorkspace":   needs(controller.RateWrite, core.ScopeWorkspaceCreate, core.ScopeCheckpointCreate),
	"resumeWorkspace":    needs(controller.RateWrite, core.ScopeWorkspaceCreate),
	"getWorkspaceUsage":  needs(controller.RateRead, core.ScopeWorkspaceRead),
	"listEgress":         needs(controller.RateRead, core.ScopeWorkspaceRead),
	"listGrants":         needs(controller.RateRead, core.ScopeGrantRead),
	"getGrant":           needs(controller.RateRead, core.ScopeGrantRead),
	"putGrant":           needs(controller.RateWrite, core.ScopeGrantWrite),
	"deleteGrant":        needs(controller.RateWrite, core.ScopeGrantWrite),
	"listEffects":        needs(controller.RateRead, core.ScopeCheckpointRead),
	"listResealReports":  needs(controller.RateRead, core.ScopeWorkspaceRead),
	"getAttestation":     needs(controller.RateRead, core.ScopeWorkspaceRead),
	"listPorts":          needs(controller.RateRead, core.ScopeWorkspaceRead),
	"createPort":         needs(controller.RateWrite, core.ScopeWorkspaceCreate),
	"deletePort":         needs(controller.RateWrite, core.ScopeWorkspaceCreate),

	"getConsole":         needs(controller.RateExec, core.ScopeWorkspaceExec),
	"listProcesses":      needs(controller.RateExec, core.ScopeWorkspaceExec),
	"exec":               needs(controller.RateExec, core.ScopeWorkspaceExec),
	"stepWorkspace":      needs(controller.RateExec, core.ScopeWorkspaceExec, core.ScopeCheckpointCreate),
	"listSessions":       needs(controller.RateExec, core.ScopeWorkspaceExec),
	"getSession":         needs(controller.RateExec, core.ScopeWorkspaceExec),
	"deleteSession":      needs(controller.RateExec, core.ScopeWorkspaceExec),
	"signalSession":      needs(controller.RateExec, core.ScopeWorkspaceExec),
	"setSessionDeadline": needs(controller.RateExec, core.ScopeWorkspaceExec),
	"resizeSession":      needs(controller.RateExec, core.ScopeWorkspaceExec),
	"getSessionOutput":   needs(controller.RateExec, core.ScopeWorkspaceExec),
	"writeSessionStdin":  needs(controller.RateExec, core.ScopeWorkspaceExec),
	"attachSession":      needs(controller.RateExec, core.ScopeWorkspaceExec),
	"createFilesPass":    needs(controller.RateExec, core.ScopeWorkspaceExec),
	"getFile":            needs(controller.RateExec, core.ScopeWorkspaceExec),
	"statFile":           needs(controller.RateExec, core.ScopeWorkspaceExec),
	"putFile":            needs(controller.RateExec, core.ScopeWorkspaceExec),
	"deleteFile":         needs(controller.RateExec, core.ScopeWorkspaceExec),
	"createWatch":        needs(controller.RateExec, core.ScopeWorkspaceExec),
	"listWatches":        needs(controller.RateExec, core.ScopeWorkspaceExec),
	"deleteWatch":        needs(controller.RateExec, core.ScopeWorkspaceExec),
	"getWatchEvents":     needs(controller.RateExec, core.ScopeWorkspaceExec),
	"makeDirectory":      needs(controller.RateExec, core.ScopeWorkspaceExec),
	"renameFile":         needs(controller.RateExec, core.ScopeWorkspaceExec),
	"setFileAttributes":  needs(controller.RateExec, core.ScopeWorkspaceExec),

	"createCheckpoint":         needs(controller.RateWrite, core.ScopeCheckpointCreate),
	"listWorkspaceCheckpoints": needs(controller.RateRead, core.ScopeCheckpointRead),
	"listCheckpoints":          needs(controller.RateRead, core.ScopeCheckpointRead),
	"getCheckpoint":            needs(controller.RateRead, core.ScopeCheckpointRead),
	"patchCheckpoint":          needs(controller.RateWrite, core.ScopeCheckpointCreate),
	"deleteCheckpoint":         needs(controller.RateWrite, core.ScopeCheckpointDelete),
	"forkCheckpoint":           needs(controller.RateWrite, core.ScopeWorkspaceCreate),
	"restoreCheckpoint":        needs(controller.RateWrite, core.ScopeWorkspaceCreate),
	"stepCheckpoint":           needs(controller.RateWrite, core.ScopeWorkspaceCreate, core.ScopeWorkspaceExec, core.ScopeWorkspaceDelete, core.ScopeCheckpointCreate),
	"getPrepared":              needs(controller.RateRead, core.ScopeCheckpointRead),
	"putPrepared":              needs(controller.RateWrite, core.ScopeWorkspaceCreate),
	"pruneCheckpoints":         needs(controller.RateWrite, core.ScopeCheckpointDelete),
	"getCheckpointUsage":       needs(controller.RateRead, core.ScopeCheckpointRead),
	"getRetention":             needs(controller.RateRead, core.ScopeCheckpointRead),
	"putRetention":             needs(controller.RateWrite, core.ScopeCheckpointDelete),
	"deleteRetention":          needs(controller.RateWrite, core.ScopeCheckpointDelete),
	"exportCheckpoint":         needs(controller.RateExec, core.ScopeCheckpointRead, core.ScopeWorkspaceExec), // as to read the guest's files
	"getCheckpointFile":        needs(controller.RateExec, core.ScopeCheckpointRead, core.ScopeWorkspaceExec), // as to read the guest's files
	"importCheckpoint":         needs(controller.RateWrite, core.ScopeCheckpointImport),
	"getLineage":               needs(controller.RateRead, core.ScopeCheckpointRead),
	"listChildren":             needs(controller.RateRead, core.ScopeCheckpointRead),
	"diffCheckpoints":          needs(controller.RateExec, core.ScopeCheckpointRead),
	"getTree":                  needs(controller.RateRead, core.ScopeCheckpointRead),

	"getOperation":      needs(controller.RateRead, core.ScopeWorkspaceRead),
	"listOperations":    needs(controller.RateRead, core.ScopeWorkspaceRead),
	"cancelOperation":   needs(controller.RateWrite, core.ScopeWorkspaceCreate),
	"streamEvents":      needs(controller.RateRead, core.ScopeWorkspaceRead, core.ScopeCheckpointRead),
	"listAudit":         needs(controller.RateRead, core.ScopeAuditRead),
	"checkAudit":        needs(controller.RateRead, core.ScopeAuditRead),
	"listImages":        needs(controller.RateRead, core.ScopeFleetRead),
	"buildImage":        needs(controller.RateWrite, core.ScopeWorkspaceCreate, core.ScopeWorkspaceExec, core.ScopeWorkspaceDelete, core.ScopeCheckpointCreate),
	"getImage":          needs(controller.RateRead, core.ScopeCheckpointRead),
	"deleteImage":       needs(controller.RateWrite, core.ScopeCheckpointCreate),
	"getUpload":         needs(controller.RateRead, core.ScopeWorkspaceRead),
	"putUpload":         needs(controller.RateExec, core.ScopeWorkspaceExec),
	"deleteUpload":      needs(controller.RateWrite, core.ScopeWorkspaceExec),
	"getOperationLog":   needs(controller.RateRead, core.ScopeWorkspaceExec),
	"listRunners":       needs(controller.RateRead, core.ScopeFleetRead),
	"deleteRunner":      needs(controller.RateAdmin, core.ScopeAdmin),
	"patchRunner":       needs(controller.RateAdmin, core.ScopeAdmin),
	"collectStore":      needs(controller.RateAdmin, core.ScopeAdmin),
	"checkStore":        needs(controller.RateAdmin, core.ScopeAdmin),
	"checkStoreData":    needs(controller.RateAdmin, core.ScopeAdmin),
	"createRunnerToken": needs(controller.RateAdmin, core.ScopeRunnerJoin),

	"getSelf":       needs(controller.RateRead),
	"createProject": needs(controller.RateAdmin, core.ScopeAdmin),
	"listProjects":  needs(controller.RateAdmin, core.ScopeProjectRead),
	"getProject":    needs(controller.RateAdmin, core.ScopeProjectRead),
	"patchProject":  needs(controller.RateAdmin, core.ScopeAdmin),
	"deleteProject": needs(controller.RateAdmin, core.ScopeAdmin),
	"createKey":     needs(controller.RateAdmin, core.ScopeKeyWrite),
	"listKeys":      needs(controller.RateAdmin, core.ScopeKeyRead),
	"getKey":        needs(controller.RateAdmin, core.ScopeKeyRead),
	"revokeKey":     needs(controller.RateAdmin, core.ScopeKeyWrite),

	// These need no key (security: [] in the contract). What says how the service is does not count.
	"attach":           needs(controller.RateOpen),
	"getSpecification": needs(controller.RateOpen),
	"getAuthority":     needs(controller.RateOpen),
	"getHealth":        needs(""),
	"getReadiness":     needs(""),
}

type actingKey struct{}

// ActFor returns a context for requests that a layer of this process makes for an API key, whose secret it does not have. The
// layer has verified a credential that was issued to the key. Whatever the key may not do is refused as usual. No request from
// outside has such a context.
func ActFor(ctx context.Context, key core.KeyID) context.Context {
	return context.WithValue(ctx, actingKey{}, key)
}

// HoldKey returns a context that ends with a key, for what such a layer does past this API. The returned function must be called when the
// work is done.
func HoldKey(ctx context.Context, control *controller.Controller, id core.KeyID) (context.Context, context.CancelFunc, error) {
	key, err := control.Tenancy.ValidKey(ctx, id)
	if err != nil {
		return ctx, func() {}, err
	}
	ctx, release := control.Tenancy.WithKey(ctx, key)
	return ctx, release, nil
}

// ConfirmPort asks where a forwarded port listens now, for such a layer. The key must be one that the layer acts for.
func ConfirmPort(ctx context.Context, control *controller.Controller, id core.KeyID, ws core.WorkspaceID, port core.PortID) (string, error) {
	key, err := control.Tenancy.ValidKey(ctx, id)
	if err != nil {
		return "", err
	}
	at, err := control.Ports().Confirm(ctx, key.ProjectID, ws, port)
	if err != nil {
		return "", err
	}
	return at.String(), nil
}

// callerKey finds the key of a request.
func callerKey(c echo.Context, control *controller.Controller) (controller.Key, error) {
	ctx := c.Request().Context()
	if id, ok := ctx.Value(actingKey{}).(core.KeyID); ok {
		return control.Tenancy.ValidKey(ctx, id)
	}
	scheme, secret, _ := strings.Cut(c.Request().Header.Get("Authorization"), " ")
	secret = strings.TrimSpace(secret)
	if !control.Tenancy.Known(secret) {
		if err := reportAllowance(c)(control.AllowOpen(c.Request().RemoteAddr)); err != nil {
			return controller.Key{}, err
		}
	}
	if !strings.EqualFold(scheme, "Bearer") || secret == "" {
		return controller.Key{}, core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "this route needs an API key: Authorization: Bearer <key>")
	}
	return control.Tenancy.Authenticate(ctx, secret)
}

type projectKey struct{}

// projectOf returns the project of an authenticated request.
func projectOf(ctx context.Context) core.ProjectID {
	id, _ := ctx.Value(projectKey{}).(core.ProjectID)
	return id
}

// authenticate asks for an API key wherever the contract does, for the scopes that the table has, and keeps to the rates. The
// request ends with its key.
func (k contract) authenticate(control *controller.Controller, bodyTime time.Duration) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			op := k.of(c)
			if op == nil {
				return next(c)
			}
			entered := false
			err := op.enter(c, control, func(c echo.Context) error {
				entered = true
				return next(c)
			})
			if !entered { // net/http reads on before it answers: a body that does not come must not hold the connection
				_ = http.NewResponseController(c.Response()).SetReadDeadline(time.Now().Add(bodyTime)) // not every test's writer has a connection
			}
			if core.CodeOf(err) == core.CodeUnauthenticated && !c.Response().Committed {
				if slow := control.SlowFailure(c.Request().Context(), c.Request().RemoteAddr); slow != nil {
					return slow
				}
			}
			return err
		}
	}
}

func (op *operation) enter(c echo.Context, control *controller.Controller, next echo.HandlerFunc) error {
	ctx := c.Request().Context()
	if !op.secured {
		if op.access.rate != "" {
			if err := reportAllowance(c)(control.AllowOpen(c.Request().RemoteAddr)); err != nil {
				return err
			}
		}
		return next(c)
	}
	key, err := callerKey(c, control)
	if err != nil {
		return err
	}
	if err := reportAllowance(c)(control.Allow(key, op.access.rate)); err != nil {
		return err
	}
	if !op.listed {
		return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "no key may use this route")
	}
	if missing := core.MissingScope(key.Scopes, op.access.scopes...); missing != "" {
		return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "this key (%s) lacks the scope %s", key.Name, missing)
	}
	ctx, release := control.Tenancy.WithKey(context.WithValue(ctx, projectKey{}, key.ProjectID), key)
	defer release()
	c.SetRequest(c.Request().WithContext(ctx))
	return next(c)
}

const (
	headerLimit     = "RateLimit-Limit"
	headerRemaining = "RateLimit-Remaining"
	headerReset     = "RateLimit-Reset"
)

// reportAllowance writes what is left of a rate into the headers of the answer, also when the request fails.
func reportAllowance(c echo.Context) func(controller.Allowance, error) error {
	return func(left controller.Allowance, err error) error {
		h := c.Response().Header()
		h.Set(headerLimit, strconv.Itoa(left.Limit))
		h.Set(headerRemaining, strconv.Itoa(left.Remaining))
		h.Set(headerReset, wholeSeconds(left.Reset))
		return err
	}
}

func wholeSeconds(d time.Duration) string { return strconv.Itoa(int(math.Ceil(d.Seconds()))) }

// setRetryAfter says when a request that failed may succeed.
func setRetryAfter(h http.Header, p api.Problem, err error) {
	after := retryAfter
	switch {
	case p.Code == string(core.CodeIdempotencyInProgress):
		after = time.Second
	case p.Status != http.StatusServiceUnavailable && p.Status != http.StatusTooManyRequests:
		return
	}
	if soon, ok := errors.AsType[*controller.RateError](err); ok {
		after = max(soon.After, time.Second)
	}
	h.Set(headerRetry, wholeSeconds(after))
}
