package httpapi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strconv"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// inGuest are the operations of the contract that change something which no row shows, or take a whole machine out, with the parameter
// that names the object. All others that change something are recorded by the database.
var inGuest = map[string]string{
	"deleteSession":      "session_id",
	"signalSession":      "session_id",
	"resizeSession":      "session_id",
	"setSessionDeadline": "session_id",
	"writeSessionStdin":  "session_id",
	"createFilesPass":    "workspace_id",
	"putFile":            "workspace_id",
	"deleteFile":         "workspace_id",
	"exportCheckpoint":   "checkpoint_id",
}

// audit is the middleware that says who changes what: to the transactions of the request, and to the log itself where the
// change is not one of the database.
func (k contract) audit(control *controller.Controller) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			op := k.of(c)
			if op == nil {
				return next(c)
			}
			ctx := c.Request().Context()
			origin := controller.Origin{Actor: string(controller.KeyOf(ctx).ID), Source: sourceOf(c), Action: op.id}
			if !op.secured {
				origin.Actor = "anonymous" // the attach token's record names its key
			}
			ctx = controller.WithOrigin(ctx, origin)
			c.SetRequest(c.Request().WithContext(ctx))
			object, ok := inGuest[op.id]
			if !ok {
				return next(c)
			}
			record := controller.AuditRecord{ProjectID: projectOf(ctx), Object: c.Param(object), Outcome: controller.AuditAccepted}
			if path := c.QueryParam("path"); path != "" {
				record.Detail = detail(map[string]string{"path": path})
			}
			if err := control.Tenancy.Audit(ctx, record); err != nil {
				return err
			}
			err := next(c)
			if err == nil {
				return nil
			}
			record.Outcome, record.Detail = controller.AuditFailed, detail(map[string]string{"code": string(core.CodeOf(err))})
			if auditErr := control.Tenancy.Audit(context.WithoutCancel(ctx), record); auditErr != nil {
				return fmt.Errorf("%w; and it was not recorded: %w", err, auditErr)
			}
			return err
		}
	}
}

// sourceOf is the address at the other end of the connection. What headers say of it is the client's word.
func sourceOf(c echo.Context) string {
	host, _, err := net.SplitHostPort(c.Request().RemoteAddr)
	if err != nil {
		return "unix"
	}
	return host
}

func detail(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		return nil // strings always have a form
	}
	return b
}

func auditRecordOf(r controller.AuditRecord) api.AuditRecord {
	return api.AuditRecord{
		ID: strconv.FormatInt(r.ID, 10), CreatedAt: r.CreatedAt, RequestID: r.RequestID, Actor: r.Actor, Source: r.Source, Action: r.Action, ObjectID: r.Object,
		Before: r.Before, After: r.After, Outcome: api.AuditOutcome(r.Outcome), OperationID: string(r.OperationID), Detail: r.Detail,
	}
}

// auditedProject is the project that is asked for, or else the key's own.
func auditedProject(ctx context.Context, asked string) core.ProjectID {
	return cmp.Or(core.ProjectID(asked), projectOf(ctx))
}

// ListAudit serves GET /v1/audit.
func (s *server) ListAudit(ctx context.Context, r api.ListAuditRequestObject) (api.ListAuditResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	f := controller.AuditFilter{
		Limit: p.Limit, Actor: r.Params.Actor, Action: r.Params.Action, Object: r.Params.ObjectID, RequestID: r.Params.RequestID,
		Operation: core.OperationID(r.Params.OperationID), Outcome: controller.AuditOutcome(r.Params.Outcome), Since: r.Params.Since, Until: r.Params.Until,
	}
	if p.After != "" {
		if f.After, err = strconv.ParseInt(p.After, 10, 64); err != nil || f.After <= 0 {
			return nil, badCursor()
		}
	}
	list, err := s.control.Tenancy.AuditRecords(ctx, controller.KeyOf(ctx), auditedProject(ctx, r.Params.ProjectID), f)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(r controller.AuditRecord) string { return strconv.FormatInt(r.ID, 10) })
	return api.ListAudit200JSONResponse{Items: convert(list, auditRecordOf), NextCursor: next}, nil
}

// CheckAudit serves GET /v1/audit/check.
func (s *server) CheckAudit(ctx context.Context, r api.CheckAuditRequestObject) (api.CheckAuditResponseObject, error) {
	got, err := s.control.Tenancy.CheckAudit(ctx, controller.KeyOf(ctx), auditedProject(ctx, r.Params.ProjectID))
	if err != nil {
		return nil, err
	}
	return api.CheckAudit200JSONResponse{
		Intact: got.Broken == 0, Seals: got.Seals, Records: got.Records, Unsealed: got.Unsealed, BrokenSeal: got.Broken, Head: got.Head,
	}, nil
}
