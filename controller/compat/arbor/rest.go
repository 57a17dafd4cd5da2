package arbor

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// maxAnswer bounds an answer of the REST API to a request that begins an operation.
const maxAnswer = 4 << 20

// begin posts a request that begins an operation, and does not wait for it, as the methods of the SDK would do. path is that of the REST API.
// The operation has no id if nothing was left to do.
func (c caller) begin(ctx context.Context, path string, body any) (coppice.Operation, error) {
	var op coppice.Operation
	payload, err := json.Marshal(body)
	if err != nil {
		return op, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://coppice"+path+"?wait=0", bytes.NewReader(payload))
	if err != nil {
		return op, err
	}
	req.Header.Set("Authorization", "Bearer "+c.key)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", agent)
	resp, err := c.raw.Do(req)
	if err != nil {
		return op, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return op, err
	}
	switch {
	case resp.StatusCode == http.StatusAccepted:
		return op, json.Unmarshal(b, &op)
	case resp.StatusCode >= http.StatusBadRequest:
		return op, refusal(resp.StatusCode, b)
	}
	return op, nil
}

// refusal reads a problem of the REST API.
func refusal(status int, body []byte) error {
	var p struct {
		Code        coppice.Code `json:"code"`
		Detail      string       `json:"detail"`
		RequestID   string       `json:"request_id"`
		OperationID string       `json:"operation_id"`
	}
	if err := json.Unmarshal(body, &p); err != nil || p.Code == "" {
		return &coppice.Error{Code: coppice.CodeInternal, Status: http.StatusBadGateway, Detail: "the REST API gave an answer that is no problem document"}
	}
	return &coppice.Error{Code: p.Code, Status: status, Detail: p.Detail, RequestID: p.RequestID, OperationID: p.OperationID}
}

// with returns the fields of an object of Coppice. Arbor's fields replace those of the same name.
func with(object any, fields map[string]any) (map[string]any, error) {
	b, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	out := map[string]any{}
	if err := json.Unmarshal(b, &out); err != nil {
		return nil, err
	}
	maps.Copy(out, fields)
	return out, nil
}
