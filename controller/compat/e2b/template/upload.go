package template

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	keyPrefix = "key_"
	maxToken  = 2048
	linkTime  = time.Hour // in which the body of an upload must begin
)

var filesHash = regexp.MustCompile(`^[0-9a-f]{64}$`)

// UploadID is the id of the upload with the files that E2B's clients know by a hash.
func UploadID(hash string) string { return "e2b-" + hash }

// Links makes and checks links to send files to: E2B's clients send no key with them.
type Links struct{ Secret []byte }

// New returns the part of a link that stands for a key.
func (l Links) New(hash string, key coppice.KeyID, now time.Time) string {
	return l.token(hash, key, now.Add(linkTime).Unix())
}

func (l Links) token(hash string, key coppice.KeyID, expires int64) string {
	mac := hmac.New(sha256.New, l.Secret)
	for _, part := range []string{"upload", hash, key, strconv.FormatInt(expires, 10)} {
		mac.Write([]byte(part))
		mac.Write([]byte{0})
	}
	return fmt.Sprintf("%s.%d.%s", strings.TrimPrefix(key, keyPrefix), expires, hex.EncodeToString(mac.Sum(nil)))
}

// Check returns the key that a link stands for.
func (l Links) Check(hash, token string, now time.Time) (coppice.KeyID, error) {
	refused := shared.Failf(http.StatusForbidden, "the link is not valid, or its time is over")
	if len(token) > maxToken || !filesHash.MatchString(hash) {
		return "", refused
	}
	bare, rest, _ := strings.Cut(token, ".")
	until, _, _ := strings.Cut(rest, ".")
	expires, err := strconv.ParseInt(until, 10, 64)
	key := keyPrefix + bare
	if subtle.ConstantTimeCompare([]byte(l.token(hash, key, expires)), []byte(token)) != 1 || err != nil || now.Unix() > expires {
		return "", refused
	}
	return key, nil
}

// Present reports whether files are there, and stay there until a build has them.
func Present(ctx context.Context, client *coppice.Client, hash string) (bool, error) {
	if !filesHash.MatchString(hash) {
		return false, shared.Failf(http.StatusBadRequest, "the hash of the files has 64 hexadecimal digits in lower case")
	}
	up, err := client.Upload(ctx, UploadID(hash))
	const absent coppice.Code = "UPLOAD_NOT_FOUND"
	if errors.Is(err, absent) {
		return false, nil
	}
	return time.Until(up.ExpiresAt) > linkTime, err
}
