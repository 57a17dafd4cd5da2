package grant

import (
	"crypto/rand"
	"encoding/base32"
	"log/slog"
	"strings"
)

// Prefix begins every placeholder. The proxy searches for it in everything that a guest sends without TLS.
const Prefix = "coppice-brokered-"

// NewPlaceholder makes a unique placeholder: 160 random bits.
func NewPlaceholder() string {
	var b [20]byte
	_, _ = rand.Read(b[:]) // never fails
	return Prefix + strings.ToLower(base32.StdEncoding.EncodeToString(b[:]))
}

// MinSecret and MaxSecret bound a secret, in bytes. Answers would contain a shorter text by accident.
const (
	MinSecret = 8
	MaxSecret = 16 << 10
)

// Secret is a value that is neither printed nor logged. The zero Secret is empty.
type Secret struct{ value string }

// NewSecret makes a secret of its value.
func NewSecret(value string) Secret { return Secret{value} }

// Reveal returns the value.
func (s Secret) Reveal() string { return s.value }

const hidden = "[secret]"

// String implements fmt.Stringer.
func (s Secret) String() string { return hidden }

// GoString implements fmt.GoStringer.
func (s Secret) GoString() string { return hidden }

// LogValue implements slog.LogValuer.
func (s Secret) LogValue() slog.Value { return slog.StringValue(hidden) }

// MarshalJSON implements json.Marshaler.
func (s Secret) MarshalJSON() ([]byte, error) { return []byte(`"` + hidden + `"`), nil }
