// Package api is the public contract: openapi.yaml, and the models and the strict echo server that
// `make generate` makes from it. The generated files are never edited. Operations tagged `stream`
// carry raw bytes or a WebSocket; the generated server does not have them, and controller/httpapi
// implements them by hand.
//
// The types here are those of the wire. controller/httpapi converts them to and from core's types
// at its edge. sdk/go has the same types, generated from the same file, so its users do not import
// a server.
package api

import _ "embed"

//go:embed openapi.yaml
var specification []byte

// Specification returns openapi.yaml. The caller must not change it.
func Specification() []byte { return specification }

//go:embed requests.gen.json
var requests []byte

// Requests returns the part of openapi.yaml that says what requests must be, as JSON without texts for readers. A server that
// starts reads it in a third of the time. The caller must not change it.
func Requests() []byte { return requests }
