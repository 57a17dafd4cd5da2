package core

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"log/slog"
)

// DataKey is a secret key of 32 bytes for encrypting data. It is never printed or logged. Its JSON has the bytes, for
// connections between controllers, runners and their pagers: nothing that contains a DataKey may be written to a disk
// or shown.
type DataKey [32]byte

// NewDataKey makes a random key.
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

// MarshalText returns the bytes in base64.
func (k DataKey) MarshalText() ([]byte, error) {
	return base64.StdEncoding.AppendEncode(nil, k[:]), nil
}

// UnmarshalText accepts only the output of MarshalText. Its errors do not quote the input.
func (k *DataKey) UnmarshalText(text []byte) error {
	b, err := base64.StdEncoding.Strict().AppendDecode(nil, text)
	if err != nil || len(b) != len(k) {
		return Errorf(Invalid, CodeInvalidField, "this is not a key of %d bytes", len(k))
	}
	copy(k[:], b)
	return nil
}
