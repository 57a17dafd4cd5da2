package core

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"log/slog"
)

// DataKey is 32 secret bytes by which data is encrypted. It is never printed or logged. Its JSON has the bytes, for connections between
// controllers, runners and their pagers: nothing with a DataKey in it may be written to a disk or shown.
type DataKey [32]byte

// NewDataKey makes one at random.
func NewDataKey() DataKey {
	var k DataKey
	_, _ = rand.Read(k[:]) // never fails: crypto/rand ends the program instead
	return k
}

const hiddenKey = "[a key]"

// String hides the bytes.
func (DataKey) String() string { return hiddenKey }

// GoString hides the bytes.
func (DataKey) GoString() string { return hiddenKey }

// Format hides the bytes, whatever the verb.
func (DataKey) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(hiddenKey)) }

// LogValue implements slog.LogValuer.
func (DataKey) LogValue() slog.Value { return slog.StringValue(hiddenKey) }

// MarshalText gives the bytes in base64.
func (k DataKey) MarshalText() ([]byte, error) {
	return base64.StdEncoding.AppendEncode(nil, k[:]), nil
}

// UnmarshalText takes what MarshalText gives and nothing else. Its errors say nothing of what was given.
func (k *DataKey) UnmarshalText(text []byte) error {
	b, err := base64.StdEncoding.Strict().AppendDecode(nil, text)
	if err != nil || len(b) != len(k) {
		return Errorf(Invalid, CodeInvalidField, "this is no key of %d bytes", len(k))
	}
	copy(k[:], b)
	return nil
}
