package mcp

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Codes of this server. All others are those of the API (docs/ERRORS.md).
const (
	codeArguments = "INVALID_ARGUMENTS"
	codeAmbiguous = "AMBIGUOUS_NAME"
	codeBusy      = "TOO_MANY_CALLS"
	codeTimeout   = "CALL_TIMEOUT"
	codeServer    = "SERVER_UNREACHABLE"
	codeInternal  = "INTERNAL"
	codeReadOnly  = "READ_ONLY"
)

// fault is a failed call, as the model sees it.
type fault struct {
	code, detail, hint string
}

func (f *fault) Error() string { return f.code + ": " + f.detail }

func invalid(format string, args ...any) error {
	return &fault{code: codeArguments, detail: fmt.Sprintf(format, args...)}
}

// hints say what to do next, by code.
var hints = map[string]string{
	codeArguments:          "Correct the arguments; the tool's input schema describes them.",
	codeAmbiguous:          "Give the id instead of the name.",
	codeBusy:               "Wait for a call of yours to end, then repeat this one.",
	codeTimeout:            "The server continues the work. Look with workspace_list or tree before you repeat the call.",
	codeServer:             "Coppice does not answer. Tell the user; `coppice doctor` and the server's log say more.",
	codeInternal:           "Repeat the call once. If it fails again, tell the user; the server's log has the cause.",
	codeReadOnly:           "This server only reads. Ask the user to start it without --read-only.",
	"CAPACITY":             "No runner has room. Delete or suspend workspaces that you no longer need, or ask for fewer.",
	"QUOTA_EXCEEDED":       "The project has used up a quota. Delete what you no longer need, or tell the user.",
	"RATE_LIMITED":         "Wait a few seconds, then repeat the call.",
	"WORKSPACE_NOT_FOUND":  "Call workspace_list for the workspaces there are.",
	"WORKSPACE_NOT_READY":  "Call workspace_show for its state. A suspended workspace is resumed with workspace_set_state.",
	"CHECKPOINT_NOT_FOUND": "Call tree for the checkpoints there are.",
	"CHECKPOINT_NOT_READY": "Call tree for the checkpoint's state.",
	"SESSION_NOT_FOUND":    "The session was killed, or its workspace was restored or deleted. Start the program again with exec.",
	"FILE_NOT_FOUND":       "Call file_list for the files there are.",
	"COMMAND_NOT_FOUND":    "The workspace has no such program. Pass shell syntax in \"shell\", not in \"command\".",
	"IMAGE_NOT_FOUND":      "Leave image out to get the default image.",
	"NAME_TAKEN":           "Choose another name, or leave the name out.",
	"PERMISSION_DENIED":    "The API key may not do this. Tell the user which tool was refused.",
	"UNAUTHENTICATED":      "The API key is wrong, expired or revoked. Tell the user.",
	"FORK_FAILED":          "Call workspace_list for children that are ready, then fork again for the missing ones.",
	"STATE_CONFLICT":       "Call workspace_show for its state, and repeat the call when the state has changed.",
	"GUEST_UNREACHABLE":    "Call workspace_show. If the workspace is ready, repeat the call once.",
	"DISK_FULL":            "Delete files in the workspace.",
	"EGRESS_BEYOND_PARENT": "A fork cannot reach more than its parent. Leave allow out.",
	"SESSION_LIMIT":        "Kill sessions that you no longer need with exec_kill.",
}

// explain turns an error into a fault with a code and a hint.
func explain(err error) *fault {
	var f *fault
	var refused *coppice.Error
	switch {
	case errors.As(err, &f):
	case errors.As(err, &refused):
		f = &fault{code: string(refused.Code), detail: refused.Detail}
		for _, field := range refused.Fields {
			f.detail += fmt.Sprintf("; %s: %s", field.Field, field.Detail)
		}
		if refused.RequestID != "" {
			f.detail += " (request " + refused.RequestID + ")"
		}
	case errors.Is(err, context.DeadlineExceeded):
		f = &fault{code: codeTimeout, detail: fmt.Sprintf("the call did not end within %s", maxCall)}
	default:
		if e := (*url.Error)(nil); errors.As(err, &e) {
			err = e.Err // an address within the cluster is not for every caller
		}
		f = &fault{code: codeServer, detail: err.Error()}
	}
	if f.hint == "" {
		f.hint = hints[f.code]
	}
	if f.hint == "" {
		f.hint = "Read the detail and correct the arguments; docs/ERRORS.md describes the code."
	}
	return f
}

// maxDetail bounds the detail of an error in an answer, in bytes.
const maxDetail = 4096

// result is a fault as the answer of a tool. A detail may quote a guest, so it is marked.
func (f *fault) result() *sdk.CallToolResult {
	detail := clip(f.detail, maxDetail)
	var text strings.Builder
	fmt.Fprintf(&text, "error %s\nhint: %s\n%s", f.code, f.hint, quote("detail of the error; it may quote the workspace", detail))
	return &sdk.CallToolResult{
		IsError: true,
		Content: []sdk.Content{&sdk.TextContent{Text: text.String()}},
		Meta:    sdk.Meta{"coppice.dev/error": map[string]any{"code": f.code, "hint": f.hint, "detail": newGuestBytes([]byte(detail))}},
	}
}
