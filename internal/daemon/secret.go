package daemon

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// NewSecret returns 32 random bytes in hex.
func NewSecret() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails: crypto/rand ends the program instead
	return hex.EncodeToString(b)
}

// Keep returns what a file holds, and makes it when it is not there.
func Keep(path string, fresh func() string) (string, error) {
	b, err := os.ReadFile(path)
	if err == nil {
		if v := strings.TrimSpace(string(b)); v != "" {
			return v, nil
		}
		return "", fmt.Errorf("%s is empty; remove it to have another made", path)
	}
	if !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	v := fresh()
	return v, atomicfile.Write(path, []byte(v+"\n"), 0o600)
}
