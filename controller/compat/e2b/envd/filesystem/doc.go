// Package filesystem is the wire of E2B's filesystem.Filesystem: messages and Connect handlers,
// generated from filesystem.proto.
package filesystem
