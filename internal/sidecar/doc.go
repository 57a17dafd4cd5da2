// Package sidecar starts processes that go on when the one that has started them ends, and speaks to them: over a unix socket of whole
// messages, a request and its answer, one after the other, each JSON with descriptors.
package sidecar
