// Package api is the public contract: openapi.yaml, and the models and the strict echo server that are generated from
// it (`make generate`; never edited). Operations tagged `stream` carry raw bytes or a WebSocket; they are not part of
// the generated server and are written by hand in controller/httpapi.
//
// The types here are the wire's. controller/httpapi converts them to and from core's at its edge; sdk/go has the same
// types, generated from the same file, so that its users do not import a server.
package api

import _ "embed"

//go:embed openapi.yaml
var specification []byte

// Specification returns openapi.yaml. The caller must not change it.
func Specification() []byte { return specification }
