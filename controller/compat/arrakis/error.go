package arrakis

import (
	"net/http"

	"github.com/coppice-dev/coppice/controller/compat/shared"
)

// notFound is one answer for an absent VM and for a VM of somebody else.
func notFound(name string) *shared.StatusError {
	return shared.Failf(http.StatusNotFound, "VM %q was not found", shared.Clip(name))
}

// writeFailure writes an error in Arrakis' form.
func writeFailure(w http.ResponseWriter, f *shared.StatusError) {
	writeJSON(w, f.Status, map[string]any{"error": map[string]string{"message": f.Message}})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	shared.WriteJSON(w, status, v, `{"error":{"message":"the answer cannot be encoded"}}`)
}
