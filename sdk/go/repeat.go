package coppice

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"net/http"
)

const headerKey = "Idempotency-Key"

type idempotencyKey struct{}

// WithIdempotencyKey gives the calls made with the context that make something a key of the caller's own (1 to 255 printable
// ASCII characters), so that a program that has crashed may repeat its call and gets what the first made. Use one key for one
// call. Without it every call gets a key that only its own tries share.
func WithIdempotencyKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, idempotencyKey{}, key)
}

func keyOf(ctx context.Context) string {
	if key, _ := ctx.Value(idempotencyKey{}).(string); key != "" {
		return key
	}
	return "go-" + rand.Text()
}

// repeatable says whether to repeat a request with a key after this answer. What an operation says is final; what the server
// could not even begin, or was cut off from, is not. The answer can still be read afterwards.
func repeatable(resp *http.Response) bool {
	switch resp.StatusCode {
	case http.StatusBadGateway, http.StatusGatewayTimeout, http.StatusServiceUnavailable, http.StatusConflict:
	default:
		return false
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	_ = resp.Body.Close()
	resp.Body = io.NopCloser(bytes.NewReader(body))
	if err != nil {
		return false
	}
	var p Problem
	if json.Unmarshal(body, &p) != nil || p.Code == "" {
		return resp.StatusCode != http.StatusConflict // a proxy's
	}
	switch Code(p.Code) { //nolint:exhaustive // the rest is for the caller
	case CodeDatabaseUnavailable, "CONTROLLER_STOPPING":
		return true
	case CodeIdempotencyInProgress:
		return p.OperationID == "" // else the operation is waited for
	}
	return false
}
