// Package process is the wire of E2B's process.Process: messages and Connect handlers, generated from
// process.proto.
package process
