// Package httpapi serves the public REST API of api/openapi.yaml over the controller's use cases,
// and the small internal API to which runners report. It owns authentication, strict input, the
// mapping of errors to problems, and streams. It knows no rules about states and no SQL.
//
// It checks requests against the contract itself: it refuses parameters and bodies that the
// contract does not describe, by name, before a handler sees them. So no field is ever ignored.
// requests.go checks what a schema cannot express.
package httpapi
