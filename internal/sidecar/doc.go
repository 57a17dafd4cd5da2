// Package sidecar starts processes that go on when their starter ends, and speaks to them over a
// unix socket of whole messages: a request and its answer, one after the other, each as JSON with
// descriptors.
package sidecar
