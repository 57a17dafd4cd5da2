// Package template turns E2B's template builds into builds of images. A template is an image of the project.
// Its labels have the template's name and the id of its build. The layer keeps nothing that later requests
// need: it finds the operation of a build by the idempotency key of the request that began it.
package template

import (
	"net/http"

	"github.com/coppice-dev/coppice/controller/compat/shared"
)

// The names that every project has.
const (
	Base       = "base"    // the image for sandboxes without a template
	DefaultTag = "default" // the only tag
	Root       = "root"    // the user if a client names none
)

// Unsupported refuses a feature of E2B that this layer does not have.
func Unsupported(what string) *shared.StatusError {
	return shared.Failf(http.StatusNotImplemented, "%s: Coppice does not support this through E2B's API; docs/COMPATIBILITY.md lists what it does", what)
}
