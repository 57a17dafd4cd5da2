package httpapi

import (
	"context"
	"encoding/pem"
	"net/http"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
)

// envelope is an attestation as it was signed. It is not decoded and encoded again: its form is part of it.
type envelope []byte

var _ api.GetAttestationResponseObject = envelope(nil)

// VisitGetAttestationResponse writes it, and a line's end.
func (e envelope) VisitGetAttestationResponse(w http.ResponseWriter) error {
	w.Header().Set(headerContent, "application/json")
	w.WriteHeader(http.StatusOK)
	_, err := w.Write(append(e, '\n'))
	return err
}

// GetAttestation serves GET /v1/workspaces/{id}/attestation.
func (s *server) GetAttestation(ctx context.Context, r api.GetAttestationRequestObject) (api.GetAttestationResponseObject, error) {
	got, err := s.control.Attestations().Get(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), r.Params.Epoch)
	if err != nil {
		return nil, err
	}
	return envelope(got.Envelope), nil
}

// GetAuthority serves GET /v1/authority.
func (s *server) GetAuthority(context.Context, api.GetAuthorityRequestObject) (api.GetAuthorityResponseObject, error) {
	der, err := s.control.Attestations().Authority()
	if err != nil {
		return nil, err
	}
	return api.GetAuthority200JSONResponse{
		Certificate: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), SHA256: core.DigestOf(der).Hex(),
	}, nil
}
