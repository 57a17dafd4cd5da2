package arrakis

import (
	"crypto/sha256"
	"encoding/base32"
	"net/http"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/controller/compat/shared"
)

// The labels of this layer.
const (
	labelName     = "arrakis/name"     // on workspaces: the name of the VM
	labelState    = "arrakis/state"    // on workspaces: which of paused and stopped a suspended one is
	labelSnapshot = "arrakis/snapshot" // on checkpoints: the id of the snapshot
	labelOf       = "arrakis/of"       // on checkpoints: the name of the VM
)

const (
	maxName     = 128 // bytes of a VM's name
	maxSnapshot = 200 // bytes of a snapshot's id; clients make one from a name and a time
)

// checkName refuses a name of a VM or an id of a snapshot that cannot be part of a path, or that a client would put into a path as
// something else.
func checkName(what, name string, most int) *shared.StatusError {
	bad := func(why string) *shared.StatusError {
		return shared.Failf(http.StatusBadRequest, "%s %q %s", what, shared.Clip(name), why)
	}
	switch {
	case name == "":
		return shared.Failf(http.StatusBadRequest, "Empty %s", what)
	case len(name) > most:
		return shared.Failf(http.StatusBadRequest, "%s: it has more than %d bytes", what, most)
	case !utf8.ValidString(name):
		return bad("is not UTF-8")
	case name == "." || name == "..":
		return bad("is a directory in a path; choose another")
	case strings.ContainsAny(name, `/\?#%`) || strings.ContainsFunc(name, unprintable):
		return bad(`has one of / \ ? # % or a character that cannot be printed; choose another`)
	case strings.TrimSpace(name) != name:
		return bad("begins or ends with a space")
	}
	return nil
}

func unprintable(r rune) bool { return !unicode.IsPrint(r) }

// hashed begins the names that are made from a hash.
const hashed = "arrakis--"

var legal = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

var encoding = base32.StdEncoding.WithPadding(base32.NoPadding)

// coppiceName is the name of the workspace or checkpoint. Two names never have the same one, so Coppice's rule that a name is used
// once is Arrakis' rule, too.
func coppiceName(name string) string {
	if legal.MatchString(name) && !strings.HasPrefix(name, hashed) {
		return name
	}
	const characters = 32
	sum := sha256.Sum256([]byte(name))
	return hashed + strings.ToLower(encoding.EncodeToString(sum[:])[:characters])
}
