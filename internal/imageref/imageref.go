// Package imageref reads references of images in registries, as docker pull takes them.
package imageref

import (
	"github.com/google/go-containerregistry/pkg/name"

	"github.com/coppice-dev/coppice/core"
)

// MaxBytes bounds a reference.
const MaxBytes = 512

// Parse reads a reference: python:3.12-slim, registry.example/team/app@sha256:…. The only digests are those of sha256.
func Parse(text string, options ...name.Option) (name.Reference, error) {
	bad := func(why string) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not the name of an image in a registry (%s); such names are python:3.12-slim and registry.example/team/app@sha256:…", core.Clip(text), why)
	}
	if len(text) > MaxBytes {
		return nil, bad("it is too long")
	}
	ref, err := name.ParseReference(text, options...)
	if err != nil {
		return nil, bad(core.Clip(err.Error()))
	}
	if d, ok := ref.(name.Digest); ok {
		if _, err := core.ParseDigest(d.DigestStr()); err != nil {
			return nil, bad("its digest is not a sha256 digest")
		}
	}
	return ref, nil
}

// Whole returns the whole name of a reference, with the registry and the tag: index.docker.io/library/python:latest for python. All
// spellings of a reference have the same whole name.
func Whole(text string) (string, error) {
	ref, err := Parse(text)
	if err != nil {
		return "", err
	}
	return ref.Name(), nil
}
