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

// WithIdempotencyKey sets the key of the creating calls that are made with the context (1 to 255 printable ASCII
// characters). A program that has crashed may repeat its call with the same key, and gets the result of the first call.
// Use a different key for each call. Without it, every call gets its own key, which only the client's own repetitions
// use.
func WithIdempotencyKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, idempotencyKey{}, key)
}

func keyOf(ctx context.Context) string {
	if key, _ := ctx.Value(idempotencyKey{}).(string); key != "" {
		return key
	}
	return "go-" + rand.Text()
}

// repeatable reports whether a request with a key should be repeated after this answer. The result of an operation is
// final; an error before the server began, or a lost connection, is not. The answer can still be read afterwards.
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
		return resp.StatusCode != http.StatusConflict // an answer of a proxy
	}
	switch Code(p.Code) { //nolint:exhaustive // the rest is for the caller
	case CodeDatabaseUnavailable, "CONTROLLER_STOPPING":
		return true
	case CodeIdempotencyInProgress:
		return p.OperationID == "" // otherwise the client waits for the operation
	}
	return false
}
