package e2b

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The purposes of tokens. A token of one is refused for the other.
const (
	purposeEnvd    = "envd"
	purposeTraffic = "traffic"
)

const (
	keyIDPrefix = "key_"
	keyPrefix   = "e2b_" // of an API key in E2B's form

	// maxToken bounds the length of a credential.
	maxToken = 2048
)

// tokens makes and checks the access tokens of sandboxes: the sandbox's id, the part of a key's id after "key_", and a MAC, with
// dots between them.
type tokens struct{ secret []byte }

func (t tokens) issue(purpose string, ws coppice.WorkspaceID, key coppice.KeyID) string {
	mac := hmac.New(sha256.New, t.secret)
	for _, part := range []string{purpose, ws, key} {
		mac.Write([]byte(part))
		mac.Write([]byte{0})
	}
	return strings.Join([]string{sandboxID(ws), strings.TrimPrefix(key, keyIDPrefix), hex.EncodeToString(mac.Sum(nil))}, ".")
}

// check returns the key that a token of a sandbox was issued to.
func (t tokens) check(purpose string, ws coppice.WorkspaceID, token string) (coppice.KeyID, bool) {
	if len(token) > maxToken {
		return "", false
	}
	_, rest, _ := strings.Cut(token, ".")
	bare, _, _ := strings.Cut(rest, ".")
	key := keyIDPrefix + bare
	want := t.issue(purpose, ws, key)
	return key, subtle.ConstantTimeCompare([]byte(want), []byte(token)) == 1
}

// signature is what E2B's clients compute for a link to a file.
func signature(path, op, user, token string, expires int64) string {
	text := strings.Join([]string{path, op, user, token}, ":")
	if expires != 0 {
		text += ":" + strconv.FormatInt(expires, 10)
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// link is a signed request for a file.
type link struct {
	path, op, user, signature string
	expires                   int64 // 0: never
}

// errExpired has the words that clients look for.
var errExpired = shared.Failf(401, "signature is already expired")

// verify reports whether a link was signed with the token. It reports an expiry only for such a link.
func (l link) verify(token string, now time.Time) (bool, error) {
	want := signature(l.path, l.op, l.user, token, l.expires)
	if subtle.ConstantTimeCompare([]byte(want), []byte(l.signature)) != 1 {
		return false, nil
	}
	if l.expires != 0 && now.Unix() > l.expires {
		return false, errExpired
	}
	return true, nil
}

// apiKey reads the Coppice key in a header: as it is, or in the only form that some versions of E2B's clients accept, "e2b_" and hex digits.
func apiKey(value string) string {
	if len(value) > maxToken {
		return ""
	}
	if rest, ok := strings.CutPrefix(value, keyPrefix); ok {
		if raw, err := hex.DecodeString(rest); err == nil {
			return string(raw)
		}
	}
	return value
}

// WrapKey writes a Coppice key in the form that every version of E2B's clients accepts.
func WrapKey(key string) string { return keyPrefix + hex.EncodeToString([]byte(key)) }
