package core

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"strings"
)

// Digest names immutable bytes: "sha256:" and 64 lower-case hex digits.
type Digest string

const digestPrefix = "sha256:"

// DigestOf returns the digest of b.
func DigestOf(b []byte) Digest {
	sum := sha256.Sum256(b)
	return Digest(digestPrefix + hex.EncodeToString(sum[:]))
}

// DigestReader reads r to its end and returns the digest and the number of bytes.
func DigestReader(r io.Reader) (Digest, int64, error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	if err != nil {
		return "", n, err
	}
	return Digest(digestPrefix + hex.EncodeToString(h.Sum(nil))), n, nil
}

// ParseDigest checks the form of a digest that came from outside.
func ParseDigest(s string) (Digest, error) {
	body, ok := strings.CutPrefix(s, digestPrefix)
	if raw, err := hex.DecodeString(body); !ok || err != nil || len(raw) != sha256.Size || strings.ToLower(body) != body {
		return "", Errorf(Invalid, CodeInvalidDigest, "%q is not a digest of the form sha256:<64 hex digits>", Clip(s))
	}
	return Digest(s), nil
}

// Hex returns the digest without its prefix, fit for a file name.
func (d Digest) Hex() string { return strings.TrimPrefix(string(d), digestPrefix) }

// Short returns the first twelve hex digits.
func (d Digest) Short() string {
	h := d.Hex()
	return h[:min(12, len(h))]
}
