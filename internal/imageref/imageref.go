// Package imageref reads references of images in registries, as docker pull takes them.
package imageref

import (
	"slices"
	"strings"

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

// Public allows pulls from every registry at a public address.
const Public = "public"

// Registries are those from which projects may pull. The zero value is none.
type Registries struct {
	// Public allows all others, too, at public addresses.
	Public bool
	// Hosts are HOST[:PORT] that the operator has named, and PlainHTTP those of them that have no TLS.
	Hosts, PlainHTTP []string
}

// ParseRegistries reads a list of HOST[:PORT], http://HOST[:PORT] and public.
func ParseRegistries(list []string) (Registries, error) {
	var out Registries
	for _, text := range list {
		if text == Public {
			out.Public = true
			continue
		}
		host, plain := strings.CutPrefix(text, "http://")
		reg, err := name.NewRegistry(host, name.StrictValidation)
		if err != nil {
			return out, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not the host of a registry, HOST[:PORT], nor http://HOST[:PORT], nor %s", core.Clip(text), Public)
		}
		if out.Hosts = append(out.Hosts, reg.RegistryStr()); plain {
			out.PlainHTTP = append(out.PlainHTTP, reg.RegistryStr())
		}
	}
	return out, nil
}

// None reports whether nothing may be pulled.
func (r Registries) None() bool { return !r.Public && len(r.Hosts) == 0 }

// Allow fails with PERMISSION_DENIED unless a project may pull a reference.
func (r Registries) Allow(reference string) error {
	ref, err := Parse(reference)
	if err != nil {
		return err
	}
	host := ref.Context().RegistryStr()
	if r.Public || slices.Contains(r.Hosts, host) {
		return nil
	}
	return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "the operator does not allow pulls from the registry %s (--image-registry)", core.Clip(host))
}

// IsExplicit reports whether a text can only be a reference, because a name of an image has no such character.
func IsExplicit(text string) bool {
	return strings.ContainsAny(text, "/:") && !strings.HasPrefix(text, "sha256:")
}
