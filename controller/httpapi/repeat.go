package httpapi

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/controller"
)

const (
	headerKey      = "Idempotency-Key"
	headerReplayed = "Idempotency-Replayed"
)

// makes says what the operations of the contract that take an idempotency key make, by the prefix of its id. Those that are
// not named here make an operation ("op"), whose admission binds the key wherever it happens.
var makes = map[string]string{
	"exec":          "sess",
	"createPort":    "port",
	"createProject": "prj",
	"createKey":     "key",

	"importCheckpoint": "ckpt",
}

// repeats is the middleware that hands the use cases the key of a request that may be repeated, and marks an answer that is
// an earlier one's.
func (k contract) repeats(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		op := k.of(c)
		req := c.Request()
		if op == nil || !op.keyed || req.Header.Get(headerKey) == "" {
			return next(c)
		}
		hash, err := requestHash(c)
		if err != nil {
			return err
		}
		claim := &controller.Claim{Key: req.Header.Get(headerKey), Hash: hash, Kind: "op"}
		if kind, ok := makes[op.id]; ok {
			claim.Kind = kind
		}
		c.SetRequest(req.WithContext(controller.WithClaim(req.Context(), claim)))
		c.Response().Before(func() {
			if claim.Replayed() {
				c.Response().Header().Set(headerReplayed, "true")
			}
		})
		return next(c)
	}
}

// requestHash tells requests of one key apart: by method, path, query and JSON value of the body. How long the client waits
// does not count, nor does the order of fields.
func requestHash(c echo.Context) ([32]byte, error) {
	req := c.Request()
	query := req.URL.Query()
	query.Del("wait")
	var body []byte
	if raw, ok := c.Get(keyBody).([]byte); ok {
		var value any
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()
		if err := d.Decode(&value); err != nil {
			return [32]byte{}, fmt.Errorf("read the checked body: %w", err)
		}
		var err error
		if body, err = json.Marshal(value); err != nil {
			return [32]byte{}, fmt.Errorf("encode the checked body: %w", err)
		}
	}
	return sha256.Sum256(fmt.Appendf(nil, "%s %s?%s\n%s", req.Method, req.URL.EscapedPath(), query.Encode(), body)), nil
}
