// Package httpapi serves the public REST API of api/openapi.yaml over the controller's use cases, and the small internal one
// that runners report to. It owns authentication, strict input, the mapping of errors to problems, and streams; it knows no
// rules about states and no SQL.
//
// Requests are checked against the contract itself: parameters and bodies that it does not describe are refused by name
// before a handler sees them, so that no field is ever ignored. What a schema cannot say is checked in requests.go.
package httpapi
